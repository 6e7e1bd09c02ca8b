"""Which boxes of a tensor an interval of its memory is. Pure arithmetic on ints.

A checkpoint knows tensors by their logical indices and takes boxes of them: an offset and a size in each dim. A piece
is an interval of elements in the order of memory. Whole rows of it are one box, what it has of the row before them and
of the row after them is the same question with one dim less: at most 2·ndim − 1 boxes in all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Offsets and sizes in the tensor's own dims, and the interval of memory that the box is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def boxes(
    interval: tuple[int, int], shape: Sequence[int], stride: Sequence[int], limit: int | None = None
) -> list[Box]:
    """The boxes that the elements [start, stop) of a dense tensor are, counted and ordered as they lie in memory.

    `stride` says how they lie: channels_last and transposed tensors too, as long as they fill their memory. With
    `limit`, boxes of more elements are cut into several.
    """
    order = memory_order(shape, stride)
    lying = [shape[dim] for dim in order]
    found, start = [], interval[0]
    for whole in _rectangles(*interval, lying):
        for offsets, sizes in _at_most(limit, *whole):
            stop = start + prod(sizes)
            found.append(Box(_in_place(offsets, order), _in_place(sizes, order), start, stop))
            start = stop
    return found


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims of a dense tensor, from the one with the longest step in memory to the one with the shortest."""
    return sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -stride[dim], dim))


_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def _rectangles(start: int, stop: int, shape: Sequence[int]) -> Iterator[_Rectangle]:
    """The boxes of [start, stop) of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # inside one row
        yield from _in_row(last, start - last * row, stop - last * row, rest)
        return
    yield from _in_row(first - 1, start - (first - 1) * row, row if start < first * row else 0, rest)
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    yield from _in_row(last, 0, stop - last * row, rest)


def _in_row(number: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[_Rectangle]:
    for offsets, sizes in _rectangles(start, stop, shape):
        yield (number, *offsets), (1, *sizes)


def _at_most(limit: int | None, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[_Rectangle]:
    """A box in parts of whole rows, each of at most `limit` elements."""
    if limit is None or prod(sizes) <= max(limit, 1):
        yield offsets, sizes
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    rows = max(1, limit // prod(sizes[dim + 1 :]))
    for row in range(0, sizes[dim], rows):
        part = (*sizes[:dim], min(rows, sizes[dim] - row), *sizes[dim + 1 :])
        yield from _at_most(limit, (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :]), part)


def _in_place(lying: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """From the order of memory to that of the dims."""
    placed = [0] * len(order)
    for number, dim in zip(lying, order, strict=True):
        placed[dim] = number
    return tuple(placed)
