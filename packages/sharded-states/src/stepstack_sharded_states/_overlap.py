"""Which parameters share memory. Moved into buckets each would get its own, and what was tied would drift apart."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def overlap(named: Iterable[tuple[str, Parameter]]) -> tuple[str, str] | None:
    """The names of two different parameters, one of them trainable, that have an element of memory in common."""
    lying = [
        (param.data_ptr(), name, param)
        for name, param in named
        if param.numel() and param.device.type != "meta" and _has_memory(param)
    ]
    reaching: list[tuple[str, Parameter]] = []  # those that may reach beyond where the next one begins
    for start, name, param in sorted(lying, key=lambda place: place[0]):
        reaching = [(other_name, other) for other_name, other in reaching if start < _end(other)]
        for other_name, other in reaching:
            if (param.requires_grad or other.requires_grad) and _share(other, param):
                return other_name, name
        reaching.append((name, param))
    return None


def _has_memory(tensor: Tensor) -> bool:
    """Of its own, rather than that of several tensors."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _end(tensor: Tensor) -> int:
    last = sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share(one: Tensor, other: Tensor) -> bool:
    """Of two whose intervals of memory meet, `one`'s first: columns of a matrix need not share, though theirs do."""
    distance, odd = divmod(other.data_ptr() - one.data_ptr(), one.element_size())
    if odd or one.element_size() != other.element_size():
        return True
    taken = torch.zeros((max(_end(one), _end(other)) - one.data_ptr()) // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), distance).any())
