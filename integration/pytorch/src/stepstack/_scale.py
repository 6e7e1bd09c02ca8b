"""The end of a step for a loss scale, with scalers that can be told and with torch's, which looks for itself."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import stepstack_grad_scaler


def update_scale(scaler: GradScaler, found_inf: Tensor) -> None:
    """Let the scaler know how the step went: exactly 0 or 1, 0-d. No wait."""
    if isinstance(scaler, stepstack_grad_scaler.GradScaler):
        scaler.update(found_inf=found_inf)
        return
    # It is shown one number where it would read all the gradients again.
    scaler.step(_Shown(torch.where(found_inf == 0, 0.0, math.inf)))
    scaler.update()


class _Shown(Optimizer):
    """An optimizer for a scaler to look at: it has one gradient, and its step changes nothing."""

    _step_supports_amp_scaling = True

    def __init__(self, grad: Tensor) -> None:
        param = torch.zeros_like(grad)
        param.grad = grad
        super().__init__([param], {})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """The step was made before."""
