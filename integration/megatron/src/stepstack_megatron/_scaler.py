"""Megatron's dynamic loss scale, decided on the device."""

from typing import Any

import torch
from torch import Tensor

from stepstack_grad_scaler import GradScaler


class DynamicGradScaler:
    """Takes the place of Megatron's DynamicGradScaler: its arguments, methods, rule and state dict, without a wait.

    The rule: an overflow uses up one of `hysteresis`, which only a growth makes whole again; the last one, and each
    after it, multiplies the scale by `backoff_factor`, down to `min_scale`. `growth_interval` clean steps in a row
    multiply it by `growth_factor`. Unlike Megatron's, a growth whose product is infinite does not happen.

    `device`: of the scale, "cuda" or "cpu". Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        *,
        device: str = "cuda",
    ) -> None:
        self._scaler = GradScaler(
            device,
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            preset="megatron",
            hysteresis=hysteresis,
            min_scale=min_scale,
        )

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied by, now: a new fp32 tensor of one element."""
        return self._scaler.scale_tensor.clone().reshape(1)

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale, rounded once: an fp32 tensor of one element."""
        return self.scale.double().reciprocal().float()

    def update(self, found_inf: Tensor | bool) -> None:
        """Adapt the scale to a step, skipped or not. A tensor has one element, is not read, and means skipped if not 0.

        All ranks that share the scale give the same.
        """
        self._scaler.update(found_inf=found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Megatron's: `scale`, `growth_tracker`, `hysteresis_tracker`. Waits for the device."""
        state = self._scaler.state_dict()
        return {
            "scale": self.scale,
            "growth_tracker": state["_growth_tracker"],
            "hysteresis_tracker": state["_hysteresis_tracker"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on Megatron's. The rule stays. ValueError for numbers that make no sense; nothing has changed then."""
        self._scaler.load_state_dict(
            {
                "scale": float(torch.as_tensor(state_dict["scale"])),
                "_growth_tracker": state_dict["growth_tracker"],
                "_hysteresis_tracker": state_dict["hysteresis_tracker"],
            }
        )
