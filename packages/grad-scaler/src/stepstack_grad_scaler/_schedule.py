"""A learning rate schedule that stands still on skipped steps."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from stepstack_grad_scaler._scaler import GradScaler


class AppliedStepsLR:
    """A learning rate that follows a scheduler by applied steps, without waiting to learn which were skipped.

        schedule = AppliedStepsLR(torch.optim.lr_scheduler.LinearLR(optimizer), scaler)
        ...
        scaler.step(optimizer)
        scaler.update()
        schedule.step()  # as `if not scaler.last_step_skipped: scheduler.step()`

    The scheduler runs ahead on the host, a step for each call. What it says is kept on the device, where the count of
    applied steps picks the rate. So `lr` of each parameter group becomes a 0-d fp32 tensor, the same one for ever, and
    the optimizer must be one that takes it without waiting (capturable, or fused on a GPU). This costs 4 bytes for each
    step and parameter group, since the last `state_dict()`. A rate that is set by hand is overwritten.

    With several optimizers, a step that one of them skipped is a skipped one for all their schedules.

    Make it before a state dict is loaded into the optimizer. Raises ValueError if an `lr` is a tensor already, and
    RuntimeError in `step` for a scheduler that changes more than `lr`, as OneCycleLR does by default, and for parameter
    groups that were added.
    """

    def __init__(self, scheduler: LRScheduler, scaler: GradScaler) -> None:
        self._scheduler = scheduler
        self._scaler = scaler
        self._ahead = self._lrs_of_groups()  # what the scheduler said last
        for number, lr in enumerate(self._ahead):
            if isinstance(lr, Tensor):
                raise ValueError(
                    f"lr of parameter group {number} is a tensor; it must be a number when the schedule is made, so "
                    "that the scheduler need not wait for the device. Load state dicts after that."
                )
        device = scaler.scale_tensor.device
        self._lrs = [torch.full((), lr, dtype=torch.float32, device=device) for lr in self._ahead]
        self._begin([self._ahead])

    @torch.no_grad()
    def step(self) -> None:
        """Once after each `scaler.update()`, instead of the scheduler's own `step()`."""
        groups = self._scheduler.optimizer.param_groups
        if len(groups) != len(self._lrs):
            raise RuntimeError(
                f"the optimizer has {len(groups)} parameter groups, and had {len(self._lrs)} when the schedule was "
                "made; after add_param_group, set each lr to a number and make the scheduler and the schedule anew"
            )
        for group, lr in zip(groups, self._ahead, strict=True):
            group["lr"] = lr
        before = [dict(group) for group in groups]
        self._scheduler.step()
        _refuse_other_changes(before, groups)
        self._ahead = self._lrs_of_groups()
        self._append(self._ahead)
        self._applied.add_(~self._scaler.last_step_skipped)
        self._set_lrs()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and the rates it said beyond the applied steps. Waits for the device."""
        pending = self._table[:, int(self._applied) : self._said].T.tolist()
        self._begin(pending)
        return {"scheduler": self._scheduler.state_dict(), "ahead": list(self._ahead), "pending": pending}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes on what `state_dict` gave; the optimizer's rates are set in place. ValueError for other groups."""
        if len(state_dict["ahead"]) != len(self._lrs):
            raise ValueError(
                f"the state dict is of a schedule of {len(state_dict['ahead'])} parameter groups; this optimizer has "
                f"{len(self._lrs)}"
            )
        self._scheduler.load_state_dict(state_dict["scheduler"])
        self._ahead = list(state_dict["ahead"])
        self._begin(state_dict["pending"])

    def _begin(self, pending: list[list[float]]) -> None:
        """Counts applied steps from here; `pending` are the rates of now and of the steps said already, by step."""
        device = self._scaler.scale_tensor.device
        self._said = len(pending)
        self._table = torch.tensor(pending, dtype=torch.float32).T.contiguous().to(device)
        self._applied = torch.zeros(1, dtype=torch.int64, device=device)
        self._set_lrs()

    def _append(self, lrs: list[float]) -> None:
        if self._said == self._table.shape[1]:
            self._table = torch.cat([self._table, torch.zeros_like(self._table)], dim=1)
        for kept, lr in zip(self._table[:, self._said].unbind(), lrs, strict=True):
            kept.fill_(lr)
        self._said += 1

    def _set_lrs(self) -> None:
        torch._foreach_copy_(self._lrs, list(self._table.index_select(1, self._applied)[:, 0].unbind()))
        for group, lr in zip(self._scheduler.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr

    def _lrs_of_groups(self) -> list[Any]:
        return [group["lr"] for group in self._scheduler.optimizer.param_groups]


def _refuse_other_changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = [name for name in new if name != "lr" and new[name] is not old.get(name)]
        if changed:
            raise RuntimeError(
                f"the scheduler changes {', '.join(changed)} of parameter group {number}; only lr can stand still on "
                "skipped steps without waiting for the device (OneCycleLR and CyclicLR: cycle_momentum=False)"
            )
