"""Adam with Apex's arguments."""

from typing import Any

import torch

from stepstack_fused_adam._hyperparameters import Number
from stepstack_fused_adam._optimizer import FusedAdamW


class FusedAdam(FusedAdamW):
    """`FusedAdamW` with the arguments of Apex's FusedAdam, in their order: the third is `bias_correction`.

    `adam_w_mode=False` adds the decay to the gradient (L2), as `torch.optim.Adam` does; the default decays weights as
    AdamW does; it wins over a state dict, with a warning where that says otherwise. `weight_decay` is 0 by default.
    `master_weights=True` is "fp32". `set_grad_none` is what `zero_grad()` does without an argument. `capturable`
    changes nothing: the step always is.
    """

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool | str | None = False,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype | str | None = None,
        exp_avg_sq_dtype: torch.dtype | str | None = None,
        backend: str = "auto",
    ) -> None:
        if not isinstance(bias_correction, bool | int):
            raise TypeError(
                f"the third argument of FusedAdam is bias_correction, as Apex has it, not {bias_correction!r}; "
                "pass betas by name"
            )
        self._decoupled = bool(adam_w_mode)
        self._set_grad_none = set_grad_none
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            capturable=capturable,
            bias_correction=bool(bias_correction),
            master_weights=master_weights if isinstance(master_weights, str) else "fp32" if master_weights else None,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            backend=backend,
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Without an argument, what `set_grad_none` of the constructor says."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_set_grad_none": self._set_grad_none}
