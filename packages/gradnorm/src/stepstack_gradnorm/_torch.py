"""The sums of squares in plain torch: the definition."""

import torch
from torch import Tensor

_CHUNK = 2**18  # elements whose copy in fp64 stays in a CPU's cache
_SMALL = 2**16  # elements below which calls of its own cost a tensor more than they save


def sums_of_squares(tensors: list[Tensor]) -> Tensor:
    """Σx² of each, stacked, in fp64. They are real tensors on one device, of one dtype, and none is empty.

    torch.stack([tensor.double().square().sum() for tensor in tensors])
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square_()  # converts as it reads
    small = [tensor for tensor in tensors if tensor.numel() < _SMALL]
    squares = iter(torch.stack(torch._foreach_norm(small, 2, dtype=torch.float64)).square_() if small else ())
    return torch.stack([next(squares) if tensor.numel() < _SMALL else _by_chunks(tensor) for tensor in tensors])


def _by_chunks(tensor: Tensor) -> Tensor:
    wide = torch.empty(_CHUNK, dtype=torch.float64)
    sums = []
    for chunk in torch.split(tensor.reshape(-1), _CHUNK):
        copy = wide[: len(chunk)].copy_(chunk)
        sums.append(torch.dot(copy, copy))
    return torch.stack(sums).sum()
