"""Runs: stretches of memory that a step treats alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # public, but not in __all__

from stepstack_fused_adam._block8 import blocks
from stepstack_fused_adam._definition import States


@dataclass(frozen=True, eq=False)
class Run:
    """The states of a parameter, or of adjacent ones, all dense and in one order in memory.

    `shape` is a tensor without memory that is as the parameter: of its shape, strides and dtype. The parameter itself
    is handed to each step, like the gradient, so that nothing here keeps its memory alive. `step` is 0-d fp32, the
    number of steps made.
    """

    shape: Tensor
    device: torch.device
    step: Tensor
    states: States

    @cached_property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.shape.dtype

    @cached_property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Of the parameter and the states."""
        return (self.dtype, *(None if tensor is None else tensor.dtype for tensor in self.states))

    @cached_property
    def floating(self) -> bool:
        """Whether all of it is stored as floating numbers, none in parts or as codes."""
        return all(dtype is None or dtype.is_floating_point for dtype in self.dtypes)

    @cached_property
    def coded(self) -> bool:
        """Whether there are codes, and scales of blocks."""
        return self.states.exp_avg_scale is not None or self.states.exp_avg_sq_scale is not None

    @property
    def batch(self) -> int:
        """How many elements to have copies of at a time: a CPU keeps these in its caches, a GPU wants long kernels."""
        return 2**20 if self.device.type == "cpu" else 2**25

    @cached_property
    def flat(self) -> "Run":
        """The same memory, with one dim."""
        return self.extended(self.numel)

    @cached_property
    def apart(self) -> States:
        """The states, flat, each `apart`."""
        return _states(None if tensor is None else apart(tensor) for tensor in self.flat.states)

    def extended(self, numel: int) -> "Run":
        """The flat run of `numel` elements that starts where this one does."""
        sized = zip(self.states, state_sizes(numel), strict=True)
        flats = (None if tensor is None else flat(tensor, size) for tensor, size in sized)
        return Run(self.shape.new_empty(numel), self.device, self.step, _states(flats))

    def cut(self, limit: int) -> "list[Run]":
        """Flat runs of at most `limit` elements, in order; a multiple of 64, for the sake of the scales."""
        shapes = torch.split(self.flat.shape, limit)
        columns = [
            [None] * len(shapes) if tensor is None else torch.split(tensor, size)
            for tensor, size in zip(self.flat.states, state_sizes(limit), strict=True)
        ]
        return [
            Run(shape, self.device, self.step, _states(tensors))
            for shape, *tensors in zip(shapes, *columns, strict=True)
        ]


def run_of(param: Tensor, step: Tensor, states: States) -> Run:
    """Of one parameter, on this rank."""
    return Run(dense_like(param), param.device, step, states)


def state_sizes(numel: int) -> tuple[int, ...]:
    """Of each state of so many elements."""
    return tuple(blocks(numel) if name.endswith("_scale") else numel for name in States._fields)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
        return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return tensor


def flat(tensor: Tensor, numel: int) -> Tensor:
    """`numel` elements of memory from where a dense tensor starts, in physical order."""
    return tensor.detach().as_strided((numel,), (1,))


def apart(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that is nobody's view and starts at offset 0.

    torch.compile would make a case of every kind of view, and of small offsets.
    """
    return from_dlpack(to_dlpack(tensor))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once, in whatever order of the dims."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory: some dim's step is no longer than what the faster dims span."""
    if not tensor.numel():
        return False
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def dense_like(tensor: Tensor) -> Tensor:
    """A tensor without memory, dense, in the order of this one; of its own strides if it is dense itself."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same physical order."""
    return not one.numel() or all(
        a == b or size == 1 for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True)
    )


def stretches(members: Sequence[Sequence[Tensor | None]]) -> list[list[int]]:
    """Indices of the members that lie one after the other in memory, in all of their dense tensors at once."""
    found: list[list[int]] = []
    for index in sorted(range(len(members)), key=lambda index: _address(members[index])):
        if found and all(map(_follows, members[index], members[found[-1][-1]])):
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _states(tensors: Iterable[Tensor | None]) -> States:
    return States(*tensors)  # type: ignore[arg-type]  # made from other states: None is where it was there


def _address(member: Sequence[Tensor | None]) -> tuple[str, int, int]:
    first = member[0]
    assert first is not None
    return str(first.device), first.untyped_storage().data_ptr(), int(first.storage_offset())


def _follows(later: Tensor | None, earlier: Tensor | None) -> bool:
    if later is None or earlier is None:
        return later is earlier
    return (
        later.dtype == earlier.dtype
        and later.storage_offset() == earlier.storage_offset() + earlier.numel()
        and later.untyped_storage().data_ptr() == earlier.untyped_storage().data_ptr()
    )
