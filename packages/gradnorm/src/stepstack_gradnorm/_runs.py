"""The memory of gradients on this rank: every element once, neighbours joined into one flat view."""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepstack_gradnorm._part import Grads, Part, each

Place: TypeAlias = tuple[torch.device, torch.dtype]


@torch.no_grad()
def local_runs(grads: Grads) -> dict[Place, list[Tensor]]:
    """Views of what these gradients hold on this rank, by device and dtype, for operations in place.

    A gradient that is given twice is there once; what is empty is left out; tensors that lie next to each other in
    one storage come as one flat view of all of them. Of a DTensor it is the local tensor, of a sparse tensor the
    values as they are stored (not coalesced), of an expanded one the elements that exist. No communication, no sync.
    """
    tensors: dict[Hashable, Tensor] = {}
    for item in each(grads):
        for tensor in item.tensors if isinstance(item, Part) else (item,):
            local = _existing(local_tensor(tensor))
            tensors.setdefault(identity(local), local)
    return runs(tensors.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of it. Under no_grad nothing is dispatched."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def identity(tensor: Tensor) -> Hashable:
    """Equal for two tensors that are the same elements of the same memory."""
    pointer = _pointer(tensor)
    if pointer is None:
        return id(tensor)
    return pointer, tensor.dtype, tensor.shape, tensor.stride()


def runs(tensors: Iterable[Tensor]) -> dict[Place, list[Tensor]]:
    """The tensors by device and dtype; dense neighbours of one storage are joined, empty ones left out."""
    places: dict[Place, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            places.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return {place: _joined(several) for place, several in places.items()}


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    alone, dense = [], []
    for tensor in tensors:
        pointer = _pointer(tensor)
        if pointer is None or not _is_dense(tensor):
            alone.append(tensor)
        else:
            dense.append((pointer, tensor.numel(), tensor))
    dense.sort(key=lambda span: span[:2])
    size = tensors[0].element_size()
    start = 0
    while start < len(dense):
        end, stop = start, dense[start][0]
        while end < len(dense) and dense[end][0] == stop and _same_storage(dense[start][2], dense[end][2]):
            stop += dense[end][1] * size
            end += 1
        first = dense[start][2]
        alone.append(first if end - start == 1 else first.as_strided(((stop - dense[start][0]) // size,), (1,)))
        start = end
    return alone


def _existing(tensor: Tensor) -> Tensor:
    """The elements that exist: an expanded dim has one."""
    if tensor.layout is not torch.strided:
        return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if 0 in tensor.stride():
        size = [1 if stride == 0 else length for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.as_strided(size, tensor.stride())
    return tensor


def _pointer(tensor: Tensor) -> int | None:
    """Where its memory starts, None if it has none that can be looked at (meta, fake, wrapper subclasses)."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type == "meta":
        return None
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # inside torch.func transforms
        return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one interval of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one is other or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
