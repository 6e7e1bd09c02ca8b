"""`Lion`, which a config may name and torch does not have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps by the sign of a mean of gradients (Chen et al. 2023, https://arxiv.org/abs/2302.06675), with DeepSpeed's
    arguments and defaults.

        update = sign(β1·m + (1 − β1)·g)
        p ← p·(1 − lr·weight_decay) − lr·update
        m ← β2·m + (1 − β2)·g
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each parameter that has a gradient; the loss of a closure is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            grads = [param.grad for param in params]
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            momenta = [self.state[param]["exp_avg"] for param in params]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_mul(momenta, beta1)
            torch._foreach_add_(updates, grads, alpha=1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(updates, group["lr"])
            torch._foreach_sub_(params, updates)
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
        return loss
