"""What a step is told besides its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam._border import check_options
from stepstack_fused_adam._definition import Scalars

Number = float | Tensor

_OPTIONS = itemgetter("lr", "eps", "weight_decay", "maximize", "bias_correction", "decoupled_weight_decay")


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one parameter group in one step; tensors among them have one element and stay where they are.

    `grad_scale` divides the gradients, None is 1. `skip` is None, or fp32 and exactly 0 or 1.
    """

    lr: Number
    beta1: Number
    beta2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool = True
    maximize: bool = False
    bias_correction: bool = True
    grad_scale: Tensor | None = None
    skip: Tensor | None = None

    @classmethod
    def of(
        cls, group: Mapping[str, Any], grad_scale: Tensor | None = None, skip: Tensor | None = None
    ) -> "Hyperparameters":
        """Those of a parameter group."""
        names = ("lr", "eps", "weight_decay", "maximize", "bias_correction")
        beta1, beta2 = group["betas"]
        return cls(
            beta1=beta1,
            beta2=beta2,
            decoupled=group["decoupled_weight_decay"],
            grad_scale=grad_scale,
            skip=skip,
            **{name: group[name] for name in names},
        )

    @property
    def any_tensors(self) -> bool:
        """Whether a number other than the rate is a tensor."""
        return any(isinstance(number, Tensor) for number in (self.beta1, self.beta2, self.eps, self.weight_decay))

    @property
    def all_on_host(self) -> bool:
        """Whether all numbers are floats, and there is no flag and no scale."""
        return self.grad_scale is None and self.skip is None and not self._has_options_in_tensors

    @property
    def _has_options_in_tensors(self) -> bool:
        return isinstance(self.lr, Tensor) or self.any_tensors

    def on(self, device: torch.device) -> "Hyperparameters":
        """With its tensors on a device, as 0-d; a number that lives on the CPU may stay there."""
        there = all(number is None or number.device == device for number in (self.grad_scale, self.skip))
        if there and not self._has_options_in_tensors:
            return self
        return replace(
            self,
            lr=_moved(self.lr, device),
            beta1=_moved(self.beta1, device),
            beta2=_moved(self.beta2, device),
            eps=_moved(self.eps, device),
            weight_decay=_moved(self.weight_decay, device),
            grad_scale=None if self.grad_scale is None else moved(self.grad_scale, device),
            skip=None if self.skip is None else moved(self.skip, device),
        )

    def numbers(self, dtype: torch.dtype, device: torch.device) -> tuple[Number, ...]:
        """What the definition asks for, in the order of its `Scalars`: floats, or tensors of a dtype on a device."""

        def here(number: Number) -> Number:
            return moved(number, device, dtype) if isinstance(number, Tensor) else number

        divisor = 1.0 if self.grad_scale is None else here(self.grad_scale)
        return (
            here(self.lr),
            1 - here(self.beta1),
            1 - here(self.beta2),
            here(self.eps),
            here(self.weight_decay),
            -divisor if self.maximize else divisor,
            0.0 if self.skip is None else here(self.skip),
        )

    def scalars(self, dtype: torch.dtype, device: torch.device) -> Scalars:
        """As tensors for the definition."""
        return Scalars(
            *(
                number if isinstance(number, Tensor) else torch.full((), number, dtype=dtype, device=device)
                for number in self.numbers(dtype, device)
            )
        )


class Latest:
    """The hyperparameters of each group in the last step: checked and made anew when one of its options is replaced."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[tuple[object, ...], Hyperparameters]] = {}

    def of(
        self, index: int, group: Mapping[str, Any], grad_scale: Tensor | None, skip: Tensor | None
    ) -> Hyperparameters:
        """ValueError where no step can be made by the options."""
        options = (*group["betas"], *_OPTIONS(group), group.get("differentiable"))
        if grad_scale is None and skip is None and index in self._made:
            made_of, by = self._made[index]
            if len(options) == len(made_of) and all(map(is_, options, made_of)):
                return by
        check_options(group, f"group {index}")
        by = Hyperparameters.of(group, grad_scale, skip)
        if by.all_on_host:
            self._made[index] = options, by
        return by


def contract(grad_scale: Number | None, found_inf: Number | None) -> tuple[Tensor | None, Tensor | None]:
    """(`grad_scale`, `skip`): both 0-d fp32 or None, and skip exactly 1 wherever found_inf is not 0, NaN included.

    Raises ValueError where one has not one element.
    """
    grad_scale, found_inf = (
        number.full_tensor() if isinstance(number, DTensor) else number for number in (grad_scale, found_inf)
    )
    for name, number in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(number.shape)}; it is one number for all parameters")
    scale = None if grad_scale is None else torch.as_tensor(grad_scale).reshape(()).to(torch.float32)
    skip = None if found_inf is None else (torch.as_tensor(found_inf).reshape(()) != 0).to(torch.float32)
    return scale, skip


def moved(number: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The number on the device. Waits for a copy to the CPU only, which could be read there before it has arrived."""
    if number.dtype == dtype and number.device == device:
        return number  # as `to` would say, in a third of the time
    return number.to(device, dtype, non_blocking=device.type != "cpu")


def _moved(number: Number, device: torch.device) -> Number:
    if not isinstance(number, Tensor):
        return number
    number = number.reshape(())
    if number.is_cpu:
        return number
    return moved(number, device, torch.float64 if number.dtype == torch.float64 else torch.float32)
