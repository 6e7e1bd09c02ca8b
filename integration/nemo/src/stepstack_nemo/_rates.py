"""Learning rates as tensors at addresses that a captured graph knows, whatever a scheduler writes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LearningRates:
    """The `lr` of each parameter group as a 0-d fp32 tensor, the same one for ever.

    A scheduler that replaces it by a number is followed at the next step; a replay sees what is filled in, as torch's
    schedulers do.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], device: torch.device) -> None:
        self._device = device
        self._tensors: list[Tensor] = []
        self.follow(groups)

    def of_steps(self, optimizer: Optimizer) -> None:
        """Follow before each of this optimizer's steps."""
        optimizer.register_step_pre_hook(lambda told, *_: self.follow(told.param_groups))

    def follow(self, groups: Sequence[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            if number == len(self._tensors):
                self._tensors.append(torch.zeros((), dtype=torch.float32, device=self._device))
            kept, lr = self._tensors[number], group["lr"]
            if lr is not kept:
                kept.copy_(lr) if isinstance(lr, Tensor) else kept.fill_(lr)
                group["lr"] = kept
