"""What the next step is still to be told: by what to divide the gradients, and whether to be skipped."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Pending:
    """Two numbers on the device, always at the same addresses, that a step's `grad_scale` and `found_inf` are made of.

    A graph that captured the noting and the step replays both: nothing here is known to Python alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.divisor = torch.ones((), dtype=torch.float32, device=device)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._given: dict[str, Tensor | None] = {}  # what the caller has set for this step

    def of_steps(self, optimizer: Optimizer) -> None:
        """Tell each of this optimizer's steps from now on."""
        optimizer.register_step_pre_hook(lambda told, *_: self._tell(told))
        optimizer.register_step_post_hook(lambda told, *_: self._untell(told))

    def divide(self, by: Tensor) -> None:
        """Note that the next step is to divide by this too."""
        self.divisor.mul_(by)

    def skip_unless(self, fine: Tensor) -> None:
        """Note that the next step is to change nothing, unless this 0-d bool is true."""
        self._skip.copy_(torch.maximum(self._skip, (~fine).float()))

    def clear(self) -> None:
        """The gradients are gone, and with them what was noted."""
        self.divisor.fill_(1)
        self._skip.zero_()

    def take_back(self, optimizer: Any) -> None:
        """Remove from the optimizer what a step that raised has left there, lest it pass for the caller's."""
        for name in ("grad_scale", "found_inf"):
            if any(optimizer.__dict__.get(name) is ours for ours in (self.divisor, self._skip)):
                delattr(optimizer, name)

    def _tell(self, optimizer: Any) -> None:
        ours = (self.divisor, self._skip)  # still there after a step that raised
        self._given = {
            name: optimizer.__dict__[name]
            for name in ("grad_scale", "found_inf")
            if name in optimizer.__dict__ and not any(optimizer.__dict__[name] is one for one in ours)
        }
        scale, found = self._given.get("grad_scale"), self._given.get("found_inf")
        # The tensors themselves, not copies: a closure may clip, inside of the step.
        optimizer.grad_scale = self.divisor if scale is None else scale * self.divisor
        optimizer.found_inf = self._skip if found is None else torch.maximum(found.float(), self._skip)

    def _untell(self, optimizer: Any) -> None:
        found = self._given.get("found_inf")
        if found is not None:
            found.copy_(optimizer.found_inf)  # the step has left there what ranks agreed on
        for name in ("grad_scale", "found_inf"):
            delattr(optimizer, name)
            if name in self._given:
                setattr(optimizer, name, self._given[name])
        self._given = {}
        self.clear()
