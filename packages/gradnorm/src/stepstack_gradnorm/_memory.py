"""The memory of gradients on this rank: every element once, neighbours joined into one flat view."""

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from stepstack_gradnorm._part import Grads, in_parts

Place: TypeAlias = tuple[torch.device, torch.dtype]
Seen: TypeAlias = dict[Hashable, Tensor]  # by where their memory starts

_MANY = 8  # tensors, from which on questions to all at once take less than one by one
_device, _dtype = attrgetter("device"), attrgetter("dtype")


@torch.no_grad()
def local_runs(grads: Grads) -> dict[Place, list[Tensor]]:
    """Views of what these gradients hold on this rank, by device and dtype, for operations in place.

    A gradient that is given twice is there once; what is empty is left out; tensors that lie next to each other in
    one storage come as one flat view of all of them. Of a DTensor it is the local tensor, of a sparse tensor the
    values as they are stored (not coalesced), of an expanded one the elements that exist, of a lazy negative or
    conjugate the memory beneath, without the sign. No communication, no sync.
    """
    memory = Memory()
    seen: Seen = {}
    for tensors, _ in in_parts(grads):
        for tensor in () if memory.add_all(tensors, seen) else tensors:
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_contiguous()
            memory.add(tensor if is_plain else _existing(local_tensor(tensor)), seen)
    return memory.runs()


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of it, when it has arrived. Under no_grad nothing is dispatched."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class Memory:
    """Tensors that are not empty, by device and dtype, each once."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()  # of empty tensors too
        self._places: dict[Place, tuple[list[Tensor], list[int]]] = {}

    def add_all(self, tensors: Sequence[Tensor], seen: Seen) -> bool:
        """Add many as `add` does, at once: plain contiguous ones of one place, none empty, none at a place seen before.

        False, and nothing has changed, if they are not so. Nothing is kept from one call to the next: a plan would have
        to ask nearly as much of each tensor to be safe from `.data`, `set_`, `resize_` and ids that are used again.
        """
        if len(tensors) < _MANY or {*map(type, tensors)} != {Tensor} or not all(map(Tensor.is_contiguous, tensors)):
            return False
        place = tensors[0].device, tensors[0].dtype
        if {*map(_device, tensors)} != {place[0]} or {*map(_dtype, tensors)} != {place[1]}:
            return False
        try:
            starts = [*map(Tensor.data_ptr, tensors)]  # 0 of an empty one
        except RuntimeError:  # sparse
            return False
        if not all(starts) or len({*starts}) < len(starts) or not seen.keys().isdisjoint(starts):
            return False
        seen.update(zip(starts, tensors, strict=True))
        self.dtypes.add(place[1])
        there, known = self._places.setdefault(place, ([], []))
        there.extend(tensors)
        known.extend(starts)
        return True

    def add(self, tensor: Tensor, seen: Seen, content: Tensor | None = None) -> bool:
        """Add a tensor (or its content), unless it is empty or has been seen: the same elements of the same memory.

        Whether it has not been seen.
        """
        if not tensor.numel():
            self.dtypes.add(tensor.dtype)
            return True
        at, there = start(tensor), tensor
        is_sparse = at < 0 and tensor.layout is not torch.strided
        if is_sparse:
            there = _stored(tensor)
            if not there.numel():
                self.dtypes.add(there.dtype)
                return True
            at = start(there)
        if at not in seen:
            seen[at] = there
        elif _is_repeated(there, at, seen):
            return False
        if is_sparse and content is None:
            content = _coalesced(tensor)
        if content is not None:
            if not content.numel():
                self.dtypes.add(content.dtype)
                return True
            tensor, at = content, start(content)
        try:
            tensors, starts = self._places[tensor.device, tensor.dtype]
        except KeyError:
            tensors, starts = self._places[tensor.device, tensor.dtype] = ([], [])
            self.dtypes.add(tensor.dtype)
        tensors.append(tensor)
        starts.append(at)
        return True

    def runs(self) -> dict[Place, list[Tensor]]:
        """The tensors, where those that are dense neighbours in one storage are one flat view."""
        return {place: _joined(_all_beneath(tensors), starts) for place, (tensors, starts) in self._places.items()}


def start(tensor: Tensor) -> int:
    """Where its memory starts; a negative number of its own if it has none to look at (meta, fake, sparse, wrapped)."""
    if type(tensor) is not Tensor:
        return -id(tensor)
    try:
        return tensor.data_ptr() or -id(tensor)
    except RuntimeError:
        return -id(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one interval of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _joined(tensors: list[Tensor], starts: list[int]) -> list[Tensor]:
    size = tensors[0].element_size()
    ends = [start + size * numel for start, numel in zip(starts, map(Tensor.numel, tensors), strict=True)]
    if {*ends}.isdisjoint(starts):
        return tensors
    dense = [True] * len(tensors) if all(map(Tensor.is_contiguous, tensors)) else [*map(is_dense, tensors)]
    order = sorted(range(len(tensors)), key=starts.__getitem__)
    runs, first, last, limit = [], order[0], order[0], -1
    for at in order[1:]:
        if ends[last] == starts[at] and starts[first] > 0 and dense[last] and dense[at]:
            if limit < 0:
                limit = _end_of_storage(tensors[first], starts[first])
            if ends[at] <= limit:  # that of the first, so this one lies in it
                last = at
                continue
        runs.append((first, last))
        first, last, limit = at, at, -1
    runs.append((first, last))
    return [
        tensors[first] if first == last else tensors[first].as_strided(((ends[last] - starts[first]) // size,), (1,))
        for first, last in runs
    ]


def _end_of_storage(tensor: Tensor, start: int) -> int:
    return start - int(tensor.storage_offset()) * tensor.element_size() + int(tensor.untyped_storage().nbytes())


def _all_beneath(tensors: list[Tensor]) -> list[Tensor]:
    if any(map(Tensor.is_neg, tensors)) or (tensors[0].is_complex() and any(map(Tensor.is_conj, tensors))):
        return [*map(_beneath, tensors)]
    return tensors


def _beneath(tensor: Tensor) -> Tensor:
    """The memory of a lazy conjugate or negative: of the same magnitude, and multiplied as the tensor is."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _is_repeated(tensor: Tensor, at: int, seen: Seen) -> bool:
    """Whether, of what has been seen at this place, something is the same elements; if not, it is seen now."""
    elements = (at, _elements(tensor))
    if seen[at] is tensor or (at, _elements(seen[at])) == elements or elements in seen:
        return True
    seen[elements] = tensor
    return False


def _elements(tensor: Tensor) -> Hashable:
    """Equal for tensors that start at one place and are the same elements, in whatever shape and order.

    These are the real numbers in memory: a sign that is lazy makes no other elements of them.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(_beneath(tensor))
    if tensor.is_contiguous():
        return tensor.dtype, ((1, tensor.numel()),)
    spread: list[tuple[int, int]] = []
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if spread and stride == spread[-1][0] * spread[-1][1]:
            spread[-1] = (spread[-1][0], spread[-1][1] * length)
        elif length > 1:
            spread.append((stride, length))
    return tensor.dtype, tuple(spread)


def _existing(tensor: Tensor) -> Tensor:
    """The elements that exist: an expanded dim has one."""
    if tensor.layout is not torch.strided:
        tensor = _stored(tensor)
    if 0 not in tensor.stride():
        return tensor
    size = [1 if stride == 0 else length for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return _beneath(tensor).as_strided(size, tensor.stride())


def _stored(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor, as they are in memory."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        raise TypeError("a gradient is of the layout torch._mkldnn, which nobody can look into: pass grad.to_dense()")
    return tensor.values()


def _coalesced(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor, where an index that was repeated has the sum of its values."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
