"""The sums of squares in plain torch: the definition."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

_CHUNK = 2**20  # elements that are copied in fp64 at a time: few enough for a cache, enough for few calls
_SMALL = 2**16  # elements below which calls of its own cost a tensor more than they save


def sums_of_squares(lists: list[list[Tensor]]) -> Tensor:
    """Σx² of each list, stacked, in fp64. The tensors are real, on one device, of one dtype, and none is empty.

    torch.stack([torch.cat([tensor.flatten() for tensor in tensors]).double().square().sum() for tensors in lists])
    """
    tensors = flat(lists)
    if tensors[0].device.type != "cpu":
        squares = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square_()  # converts as it reads
        return summed(squares, [*map(len, lists)])
    small = [tensor for tensor in tensors if tensor.numel() < _SMALL]
    done = iter(torch.stack(torch._foreach_norm(small, 2, dtype=torch.float64)).square_() if small else ())
    squares = torch.stack([next(done) if tensor.numel() < _SMALL else _by_chunks(tensor) for tensor in tensors])
    return summed(squares, [*map(len, lists)])


def flat(lists: list[list[Tensor]]) -> list[Tensor]:
    """All tensors of all lists."""
    return [*chain.from_iterable(lists)]


def summed(values: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of the first so many values, of the next so many …, stacked. They are not negative."""
    if len(counts) == 1:
        return values.sum(0, keepdim=True)
    return torch.stack(torch._foreach_norm([*torch.split(values, [*counts])], 1))


def _by_chunks(tensor: Tensor) -> Tensor:
    wide = torch.empty(_CHUNK, dtype=torch.float64)
    sums = []
    for chunk in torch.split(tensor.reshape(-1), _CHUNK):
        copy = wide[: len(chunk)].copy_(chunk)
        sums.append(torch.dot(copy, copy))
    return torch.stack(sums).sum()
