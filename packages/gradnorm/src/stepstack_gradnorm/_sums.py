"""What a norm is the root of, kept so that pieces of a gradient add up in any order without losing digits or range."""

import math
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_gradnorm._backends import check_backend, sums_of_squares
from stepstack_gradnorm._torch import flat, summed


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
        """Their roots, in fp32."""


def sum_for(norm_type: float, backend: str = "auto") -> Sum:
    """What a norm of this type is the root of, measured by the backend."""
    p = float(norm_type)
    check_backend(backend, p)
    if math.isnan(p) or p < 0:
        raise ValueError(f"norm_type is 0 (non-zero elements), a positive number, or inf, not {norm_type}")
    dtype = torch.float64 if has_float64() else torch.float32
    if p == math.inf:
        return Maximum(dtype)
    if p == 0 or (p <= 6 and dtype is torch.float64):
        return Powers(p, dtype, backend)
    return ScaledPowers(p, dtype)


class Powers:
    """Σ|x|^p, as it is. In fp64 no power up to the sixth of an fp32 number leaves the range."""

    shape: tuple[int, ...] = ()

    def __init__(self, p: float, dtype: torch.dtype, backend: str) -> None:
        self.p, self.dtype, self.backend = p, dtype, backend

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        lists = [_reals(tensors, self.p) for tensors in lists]
        if self.p == 2:
            return sums_of_squares(self.backend, lists)
        norms = torch.stack(torch._foreach_norm(flat(lists), self.p, dtype=self.dtype))
        return summed(norms if self.p in (0, 1) else norms.pow_(self.p), [*map(len, lists)])

    def together(self, several: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(several, 1))  # of numbers that are not negative: the sum

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.SUM, group)
        return values

    def norm(self, values: Tensor) -> Tensor:
        return (values if self.p in (0, 1) else values.pow(1 / self.p)).float()


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
        return values.float()


class ScaledPowers:
    """m and Σ|x/m|^p where m is max|x|: for powers that leave the range of the dtype. Two passes over the gradient."""

    shape: tuple[int, ...] = (2,)

    def __init__(self, p: float, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype

    def of(self, lists: list[list[Tensor]]) -> Tensor:
        return self.together(_like(lists, torch.stack([self._of(tensor) for tensor in flat(lists)])))

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
        return (scales * powers.pow(1 / self.p)).float()


def has_float64() -> bool:
    """Whether the accelerator of this machine, if there is one, has fp64. The same on every rank."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "xpu":
        return accelerator is None or accelerator.type != "mps"
    return bool(torch.xpu.get_device_properties().has_fp64)


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
