"""What a norm is the root of, kept so that pieces of a gradient add up in any order without losing digits or range."""

import math
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_gradnorm._backends import check_backend, check_takes, sums_of_squares
from stepstack_gradnorm._torch import flat, summed

WIDE = (torch.float64, torch.complex128)

_HUGE, _TINY = 2.0**600, 2.0**-600


class Sum(Protocol):
    """What pieces of a gradient add up to. A value is a tensor of `shape`; several are stacked along dim 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        """The value of each list, stacked. All tensors are on one device, of one dtype; none is empty."""

    def together(self, several: list[Tensor]) -> Tensor:
        """Each stack of values added up, stacked. A stack of none gives what adds nothing."""

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Each value added up over the ranks of the group, by one all-reduce."""

    def norm(self, values: Tensor) -> Tensor:
        """Their roots, in the dtype."""


def check(norm_type: float, backend: str = "auto") -> None:
    """Raise ValueError unless there is such a norm, and such a backend for it."""
    p = float(norm_type)
    check_backend(backend, p)
    if math.isnan(p) or p < 0:
        raise ValueError(f"norm_type is 0 (non-zero elements), a positive number, or inf, not {norm_type}")


def sum_for(norm_type: float, backend: str = "auto", *, no_fp64_anywhere: bool = False) -> Sum:
    """What a norm of this type is the root of, measured by the backend.

    `no_fp64_anywhere`: whether neither this rank nor one that it adds up with has a gradient in fp64.
    """
    p = float(norm_type)
    dtype = torch.float64 if has_float64() else torch.float32
    if p == math.inf:
        return Maximum(dtype)
    if p == 0 or (dtype is torch.float64 and (p <= 1 or (p <= 6 and no_fp64_anywhere))):
        return Powers(p, dtype, backend)
    return Squares(backend) if p == 2 and dtype is torch.float64 else ScaledPowers(p, dtype)


class Powers:
    """Σ|x|^p, as it is: for powers that are in the range of fp64, as those up to the sixth of an fp32 number are."""

    shape: tuple[int, ...] = ()

    def __init__(self, p: float, dtype: torch.dtype, backend: str) -> None:
        self.p, self.dtype, self.backend = p, dtype, backend

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        lists = [_reals(tensors, self.p) for tensors in lists]
        return sums_of_squares(self.backend, lists) if self.p == 2 else _powers(lists, self.p, self.dtype)

    def together(self, several: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(several, 1))  # of numbers that are not negative: the sum

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.SUM, group)
        return values

    def norm(self, values: Tensor) -> Tensor:
        return values if self.p in (0, 1) else values.pow(1 / self.p)


class Squares:
    """Σ(x/2⁶⁰⁰)², Σx² and Σ(x·2⁶⁰⁰)²: the squares of each tensor are in the one that has the range for its largest.

    A square of what is no fp64 is always in the range of fp64, so such tensors are in the middle. Ranks that have fp64
    and others send the same numbers.
    """

    shape: tuple[int, ...] = (3,)
    dtype = torch.float64

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        if flat(lists)[0].dtype not in WIDE:
            lists = [_reals(tensors, 2) for tensors in lists]
            return torch.nn.functional.pad(sums_of_squares(self.backend, lists).unsqueeze(1), (1, 1))
        check_takes(self.backend, *_reals(flat(lists)[:1], 2))
        largest, squares = ScaledPowers(2, self.dtype).each(flat(lists)).unbind(1)
        is_large, is_small = largest > 2.0**480, largest < 2.0**-400
        slots = [
            torch.where(is_large, (largest * _TINY).square() * squares, 0),
            torch.where(is_large | is_small, 0, largest.square() * squares),
            torch.where(is_small, (largest * _HUGE).square() * squares, 0),
        ]
        return self.together(_like(lists, torch.stack(slots, 1)))

    def together(self, several: list[Tensor]) -> Tensor:
        if len(set(map(len, several))) == 1:
            return torch.stack(several).sum(1)
        return torch.stack([values.sum(0) for values in several])

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.SUM, group)
        return values

    def norm(self, values: Tensor) -> Tensor:
        large, middle, small = values.sqrt().unbind(-1)
        return torch.hypot(torch.hypot(large * _HUGE, middle), small * _TINY)


class Maximum:
    """max|x|."""

    shape: tuple[int, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        lists = [_reals(tensors, math.inf) for tensors in lists]
        return self.together(_like(lists, torch.stack(torch._foreach_norm(flat(lists), math.inf)).to(self.dtype)))

    def together(self, several: list[Tensor]) -> Tensor:
        zero = several[0].new_zeros(1)
        return torch.stack(torch._foreach_norm([values if len(values) else zero for values in several], math.inf))

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        is_nan = values.isnan()  # a flag of its own: MAX may lose a NaN
        packed = torch.stack((values.masked_fill(is_nan, 0), is_nan.to(values.dtype)))
        dist.all_reduce(packed, dist.ReduceOp.MAX, group)
        return packed[0].masked_fill(packed[1] > 0, math.nan)

    def norm(self, values: Tensor) -> Tensor:
        return values


class ScaledPowers:
    """m and Σ|x/m|^p where m is max|x|: for powers that may leave the range of the dtype.

    Two passes over the gradient; one, with 1 for m, where all powers are in the range of fp64: up to the sixth of what
    is no fp64.
    """

    shape: tuple[int, ...] = (2,)

    def __init__(self, p: float, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        if self.p <= 6 and self.dtype is torch.float64 and flat(lists)[0].dtype not in WIDE:
            powers = _powers([_reals(tensors, self.p) for tensors in lists], self.p, self.dtype)
            return torch.stack(((powers > 0).to(self.dtype), powers), 1)  # 0 for m is beside all others nothing
        return self.together(_like(lists, self.each(flat(lists))))

    def each(self, tensors: list[Tensor]) -> Tensor:
        """The value of each tensor, stacked."""
        return torch.stack([self._of(tensor) for tensor in tensors])

    def _of(self, tensor: Tensor) -> Tensor:
        pieces = torch.split(tensor.reshape(-1), 2**24)  # a copy in the wide dtype is made of one piece at a time
        scale = torch.stack([_magnitude(piece, self.dtype).amax() for piece in pieces]).amax()
        divisor = torch.where((scale > 0) & scale.isfinite(), scale, 1)
        powers = [_magnitude(piece, self.dtype).div_(divisor).pow_(self.p).sum() for piece in pieces]
        return torch.stack((scale, torch.stack(powers).sum()))

    def together(self, several: list[Tensor]) -> Tensor:
        return torch.stack([self._together(values) for values in several])

    def _together(self, values: Tensor) -> Tensor:
        scales, powers = torch.cat((values, values.new_zeros(1, 2))).unbind(1)
        scale = scales.amax()
        divisor = torch.where((scale > 0) & scale.isfinite(), scale, 1)
        return torch.stack((scale, (powers * (scales / divisor).pow(self.p)).sum()))

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        slots = values.new_zeros(group.size(), *values.shape)  # SUM of one slot for each rank: nothing is added up
        slots[group.rank()] = values
        dist.all_reduce(slots, dist.ReduceOp.SUM, group)
        return self.together([*slots.unbind(1)])

    def norm(self, values: Tensor) -> Tensor:
        scales, powers = values.unbind(-1)
        return scales * powers.pow(1 / self.p)


def has_float64() -> bool:
    """Whether the accelerator of this machine, if there is one, has fp64. The same on every rank."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "xpu":
        return accelerator is None or accelerator.type != "mps"
    return bool(torch.xpu.get_device_properties().has_fp64)


def _powers(lists: list[list[Tensor]], p: float, dtype: torch.dtype) -> Tensor:
    """Σ|x|^p of each list of real tensors, stacked, in the dtype."""
    norms = torch.stack(torch._foreach_norm(flat(lists), p, dtype=dtype))
    return summed(norms if p in (0, 1) else norms.pow_(p), [*map(len, lists)])


def _like(lists: list[list[Tensor]], values: Tensor) -> list[Tensor]:
    """Stacked values of all tensors, cut as the tensors are into lists."""
    return [*torch.split(values, [len(tensors) for tensors in lists])]


def _reals(tensors: list[Tensor], p: float) -> list[Tensor]:
    """Real tensors of the same norm, in a dtype that torch takes norms of."""
    if not tensors:
        return tensors
    if tensors[0].is_complex():
        if p == 2:
            return [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
        return [tensor.to(torch.complex128).abs() for tensor in tensors]  # complex64's own |z| overflows
    if tensors[0].element_size() == 1:
        return [tensor.float() for tensor in tensors]  # fp8
    return tensors


def _magnitude(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype).abs()
