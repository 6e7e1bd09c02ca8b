"""What a step is told besides its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam._definition import Scalars

Number = float | Tensor


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

    def on(self, device: torch.device) -> "Hyperparameters":
        """With its tensors on a device, as 0-d; a number that lives on the CPU may stay there."""
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

    def scalars(self, dtype: torch.dtype, device: torch.device) -> Scalars:
        """As tensors for the definition."""

        def scalar(number: Number) -> Tensor:
            if isinstance(number, Tensor):
                return moved(number, device, dtype)
            return torch.full((), number, dtype=dtype, device=device)

        def rest(beta: Number) -> Tensor:
            return 1 - scalar(beta) if isinstance(beta, Tensor) else scalar(1 - beta)

        divisor = scalar(1.0 if self.grad_scale is None else self.grad_scale)
        return Scalars(
            lr=scalar(self.lr),
            alpha1=rest(self.beta1),
            alpha2=rest(self.beta2),
            eps=scalar(self.eps),
            weight_decay=scalar(self.weight_decay),
            divisor=-divisor if self.maximize else divisor,
            skip=scalar(0.0 if self.skip is None else self.skip),
        )


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
    return number.to(device, dtype, non_blocking=device.type != "cpu")


def _moved(number: Number, device: torch.device) -> Number:
    if not isinstance(number, Tensor):
        return number
    number = number.reshape(())
    if number.is_cpu:
        return number
    return moved(number, device, torch.float64 if number.dtype == torch.float64 else torch.float32)
