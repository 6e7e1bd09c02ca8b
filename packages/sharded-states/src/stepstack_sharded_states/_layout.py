"""Where each parameter lies in a flat buffer, and which part of it each shard owns. Pure arithmetic on ints.

A bucket is `shards` equal slices. Parameters lie in it one behind the other, each in a whole number of blocks of 64
elements: the rest of its last block is padding, whose gradient is zero. So every piece, the part of a parameter
in one slice, is a whole number of blocks too, and the pieces of a slice touch: what runs over them runs as over one.
The last block of a bucket is kept free, for what ranks tell each other in a reduction.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BLOCK = 64
"""Elements. 128 bytes of bf16: a cache line, an aligned vector load, the block of a block-wise quantised state."""


@dataclass(frozen=True)
class Entry:
    """A parameter as the layout sees it: its size in elements, its group, and what it may share a bucket with."""

    numel: int
    group: int
    owner: Hashable
    """Of its norm: those of one owner lie together."""
    kind: Hashable
    """Those of one kind have the same number of shards."""
    shards: int
    itemsize: int


@dataclass(frozen=True)
class BucketLayout:
    """`members` are indices of entries, in the order in which they lie; member i starts at `starts[i]`."""

    members: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    shards: int
    slice_numel: int

    @property
    def numel(self) -> int:
        return self.shards * self.slice_numel

    def piece(self, position: int, shard: int) -> tuple[int, int]:
        """Start and stop, in the bucket, of the part of a member that `shard` owns; equal where it owns nothing."""
        first, last = shard * self.slice_numel, (shard + 1) * self.slice_numel
        start = min(max(self.starts[position], first), last)
        return start, max(start, min(self.stops[position], last))


def plan(entries: Sequence[Entry], capacity: float) -> list[BucketLayout]:
    """Even buckets of about `capacity` bytes, in the order in which backward completes them.

    Entries of one kind share buckets, of several groups and owners too. Inside a bucket they are sorted by both, so
    that what is stepped and measured alike lies together. A parameter is never cut over two buckets: the slices cut it.
    """
    total: Counter[Hashable] = Counter()
    for entry in entries:
        total[entry.kind] += _bytes(entry)
    even = {kind: size / max(1, math.ceil(size / capacity)) for kind, size in total.items() if size}
    open_buckets: dict[Hashable, list[int]] = {}
    filled: Counter[Hashable] = Counter()
    closed: Counter[Hashable] = Counter()
    complete: list[list[int]] = []
    for index in arrival_order(entries):
        entry = entries[index]
        open_buckets.setdefault(entry.kind, []).append(index)
        filled[entry.kind] += _bytes(entry)
        if entry.numel and filled[entry.kind] >= (closed[entry.kind] + 1) * even[entry.kind]:
            complete.append(open_buckets.pop(entry.kind))
            closed[entry.kind] = int(filled[entry.kind] / even[entry.kind])
    complete += open_buckets.values()
    return [_lay_out(members, entries) for members in complete]


def choose(layouts: Sequence[BucketLayout], ratio: float) -> list[BucketLayout]:
    """Buckets that together have `ratio` of the elements, within half a bucket: those that backward completes first."""
    chosen, numel, wanted = [], 0, ratio * sum(layout.numel for layout in layouts)
    for layout in layouts:
        if numel + layout.numel / 2 < wanted:
            chosen.append(layout)
            numel += layout.numel
    return chosen


def arrival_order(entries: Sequence[Entry]) -> list[int]:
    """Indices in the order in which their gradients are expected: the model's order, reversed.

    Groups (decay and no decay, say) come one after the other, but run through the model side by side: an entry's place
    in the model is taken to be its place in its group.
    """
    size: dict[int, int] = {}
    place: list[int] = []
    for entry in entries:
        place.append(size.get(entry.group, 0))
        size[entry.group] = place[-1] + 1
    return sorted(
        range(len(entries)),
        key=lambda i: ((place[i] + 0.5) / size[entries[i].group], entries[i].group),
        reverse=True,
    )


def aligned(numel: int, unit: int = BLOCK) -> int:
    """`numel` rounded up to whole units."""
    return -(-numel // unit) * unit


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The stride with which a tensor is kept in a bucket: its own if it is dense (any order of axes), else contiguous.

    Dense means that its elements fill an interval of memory, each place once: channels_last and transposed are,
    an expanded tensor or every second column is not.
    """
    expected = 1
    for step, length in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step != expected:
            return _contiguous_stride(shape)
        expected *= length
    return tuple(stride)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * max(shape[axis + 1], 1)
    return tuple(stride)


def _bytes(entry: Entry) -> int:
    return aligned(entry.numel) * entry.itemsize


def _lay_out(members: list[int], entries: Sequence[Entry]) -> BucketLayout:
    owners = list(dict.fromkeys(entries[i].owner for i in sorted(members)))
    members = sorted(members, key=lambda i: (entries[i].group, owners.index(entries[i].owner), i))
    starts, stops, end = [], [], 0
    for index in members:
        starts.append(end)
        end += aligned(entries[index].numel)
        stops.append(end)
    shards = entries[members[0]].shards
    return BucketLayout(tuple(members), tuple(starts), tuple(stops), shards, aligned(-(-(end + BLOCK) // shards)))
