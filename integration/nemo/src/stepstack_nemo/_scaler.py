"""The loss scaler of a NeMo trainer."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import stepstack_grad_scaler
from stepstack_megatron import parallel_state
from stepstack_nemo._methods import ApexMethods
from stepstack_nemo._unscale import agree_on


class GradScaler(stepstack_grad_scaler.GradScaler):
    """NeMo's GradScaler, with its arguments in their order and its rule: hysteresis is whole again after a clean step.

        trainer = Trainer(plugins=[MixedPrecision("16-mixed", device="cuda", scaler=GradScaler(hysteresis=2))])

    - All of it is on the device, so that a CUDA graph may capture an fp16 step of a `DistributedFusedAdam`; NeMo's own
      reads the flag on the host. Other optimizers without torch's flag cost one wait, as ever.
    - A skip is agreed over `groups`, by default the model-parallel group, if Megatron has set one up when it is needed.
    - A checkpoint keeps what is left of the hysteresis; NeMo's own loses it, and is read as well.
    - `optimizer_update_skipped` is a 0-d bool on the device, or None once it was set to None, as NeMo's models do.

    device: where the first loss is; None: "cuda" if there is one, else "cpu".
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        hysteresis: int = 1,
        *,
        device: str | None = None,
        groups: tuple[ProcessGroup, ...] | None = None,
    ) -> None:
        super().__init__(
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            preset="apex",
            hysteresis=hysteresis,
            groups=groups or (),
        )
        self._looks_for_groups = groups is None
        self._is_forgotten = True

    @property
    def optimizer_update_skipped(self) -> Tensor | None:
        """Whether the last update was of a skipped step; None before the first, and after it was set to None."""
        return None if self._is_forgotten else self.last_step_skipped

    @optimizer_update_skipped.setter
    def optimizer_update_skipped(self, value: None) -> None:
        if value is not None:
            raise ValueError(f"optimizer_update_skipped is found out by update(); it can be set to None, not {value!r}")
        self._is_forgotten = True

    def unscale_(self, optimizer: Optimizer) -> None:
        self._find_groups()
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._find_groups()
        if not isinstance(optimizer, ApexMethods):
            return super().step(optimizer, *args, **kwargs)
        optimizer._pending.take_back(optimizer)
        # It takes the flag on the device. It says otherwise only so that trainers unscale before they clip.
        optimizer._step_supports_amp_scaling = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer._step_supports_amp_scaling

    def update(self, new_scale: float | Tensor | None = None, *, found_inf: Tensor | bool | None = None) -> None:
        self._find_groups()
        super().update(new_scale, found_inf=found_inf)
        self._is_forgotten = not self.is_enabled()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, ApexMethods):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = optimizer.unscale_grads(inv_scale, found_inf, allow_fp16)
        return {device: agree_on(flag, self.groups) for device, flag in found.items()}

    def _find_groups(self) -> None:
        """Megatron's groups are often set up after the trainer, and with it the scaler, was made."""
        if self._looks_for_groups:
            model = parallel_state().model
            self.groups = () if model is None else (model,)
