"""Runs: stretches of memory that a step treats alike."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class Run:
    """A parameter with its states, or a stretch of adjacent ones: dense, of one shape and one order in memory.

    `step` is 0-d fp32. `master` is the fp32 weight of which `param` is the rounded copy.
    """

    step: Tensor
    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    master: Tensor | None = None

    @cached_property
    def numel(self) -> int:
        return self.param.numel()

    @cached_property
    def weight(self) -> Tensor:
        """What the arithmetic moves."""
        return self.param if self.master is None else self.master

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the weight and the moments."""
        moments = (self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq)
        return (self.weight.dtype, *(moment.dtype for moment in moments if moment is not None))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the step: those with one element for each of the parameter."""
        return self.param, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq, self.master

    @cached_property
    def flat(self) -> "Run":
        """The same memory, with one dim."""
        return self.extended(self.numel)

    def extended(self, numel: int) -> "Run":
        """The flat run of `numel` elements that starts where this one does."""
        return self._each(lambda tensor: flat(tensor, numel))

    def cut(self, limit: int) -> "list[Run]":
        """Flat runs of at most `limit` elements, in order."""
        return [self.flat._each(partial(_part, start=start, limit=limit)) for start in range(0, self.numel, limit)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Run":
        param, exp_avg, exp_avg_sq, *optional = (None if tensor is None else change(tensor) for tensor in self.tensors)
        assert param is not None
        assert exp_avg is not None
        assert exp_avg_sq is not None
        return Run(self.step, param, exp_avg, exp_avg_sq, *optional)


def _part(tensor: Tensor, *, start: int, limit: int) -> Tensor:
    return tensor[start : start + limit]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def flat(tensor: Tensor, numel: int) -> Tensor:
    """`numel` elements of memory from where a dense tensor starts, in physical order."""
    return tensor.detach().as_strided((numel,), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once, in whatever order of the dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense_like(tensor: Tensor) -> Tensor:
    """A tensor without memory, dense, in the order of this one; of its own strides if it is dense itself."""
    return torch.empty_like(tensor, device="meta")


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same physical order."""
    return all(a == b or size == 1 for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True))


def stretches(members: Iterable[Sequence[Tensor | None]]) -> Iterator[list[int]]:
    """Indices of the members that lie one after the other in memory, in all of their dense tensors at once."""
    members = list(members)
    order = sorted(range(len(members)), key=lambda index: _address(members[index]))
    stretch = order[:1]
    for index in order[1:]:
        if all(map(_follows, members[index], members[stretch[-1]])):
            stretch.append(index)
        else:
            yield stretch
            stretch = [index]
    if stretch:
        yield stretch


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
