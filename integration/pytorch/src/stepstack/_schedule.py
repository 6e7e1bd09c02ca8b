"""Learning rates that stay where they are when a step is skipped, decided on the device or a step later on the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def schedule_of(
    lr_scheduler: LRScheduler | Callable[[Tensor], Tensor] | None, optimizer: Optimizer, applied_steps: Tensor
) -> "Schedule":
    """The schedule that a caller means, checked."""
    if lr_scheduler is None:
        return Schedule()
    if isinstance(lr_scheduler, LRScheduler):
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            raise TypeError("lr_scheduler is a ReduceLROnPlateau, which moves on a metric: step it in the loop instead")
        if lr_scheduler.optimizer is not optimizer:
            raise ValueError("lr_scheduler was made for another optimizer than the one it is given with")
        return HostSchedule(lr_scheduler)
    kinds = "lr_scheduler must be a torch scheduler, or a function from the number of applied steps to a factor"
    if not callable(lr_scheduler):
        raise TypeError(f"{kinds}; got {type(lr_scheduler).__name__}")
    factor = lr_scheduler(applied_steps)
    if not (isinstance(factor, Tensor) and factor.ndim == 0):
        raise TypeError(f"{kinds}, both 0-d tensors; for {applied_steps!r} it gave {factor!r}")
    return DeviceSchedule(optimizer, lr_scheduler)


def check_kind(scheduler: LRScheduler, state_dict: dict[str, Any]) -> None:
    """ValueError for the state of another kind of scheduler, which torch's take without a word."""
    ours, theirs = (_public(state) for state in (scheduler.state_dict(), state_dict))
    if ours != theirs:
        more, less = (", ".join(sorted(names)) or "nothing" for names in (theirs - ours, ours - theirs))
        raise ValueError(
            f"the state is of another kind of scheduler than this {type(scheduler).__name__}: it has {more} more, and "
            f"lacks {less}"
        )


class Schedule:
    """None: the learning rates are the caller's. The others say what they do before an update and after it."""

    def before_update(self, applied_steps: Tensor) -> None:
        pass

    def after_update(self, found_inf: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() != self.state_dict().keys():
            raise ValueError(
                f"this state dict is of another kind of lr_scheduler: it has {sorted(state_dict)}, "
                f"not {sorted(self.state_dict())}"
            )


class DeviceSchedule(Schedule):
    """lr ← initial_lr · factor(applied steps), each a tensor that is written in place."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[Tensor], Tensor]) -> None:
        self._optimizer = optimizer
        self._factor = factor

    def before_update(self, applied_steps: Tensor) -> None:
        groups = self._optimizer.param_groups
        for group in groups:  # all of them before one is written: they may share a tensor
            lr = group["lr"]
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr)
        factor = self._factor(applied_steps)
        for group in groups:
            if not isinstance(group["lr"], Tensor) or group["lr"].device != factor.device:
                group["lr"] = torch.empty_like(factor)
            group["lr"].copy_(factor * group["initial_lr"])


class HostSchedule(Schedule):
    """A torch scheduler, moved once the host has heard that the last update was made."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._skipped: Tensor | None = None  # on the host, as soon as `_arrived`; None before the first step
        self._arrived: Any = None

    def before_update(self, applied_steps: Tensor) -> None:
        skipped = self._wait()  # for the end of the last step, a forward and a backward ago
        if skipped is not None and not skipped.item():
            self._scheduler.step()

    def after_update(self, found_inf: Tensor) -> None:
        device = torch.get_device_module(found_inf.device)
        self._skipped = found_inf.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        self._arrived = device.Event()
        self._arrived.record(device.current_stream(found_inf.device))

    def state_dict(self) -> dict[str, Any]:
        """As of the last update, like the optimizer's; `skipped` says whether to move before the next one."""
        return {"scheduler": self._scheduler.state_dict(), "skipped": self._wait()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        check_kind(self._scheduler, state_dict["scheduler"])
        self._scheduler.load_state_dict(state_dict["scheduler"])
        self._skipped, self._arrived = state_dict["skipped"], None

    def _wait(self) -> Tensor | None:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._skipped


def _public(state: dict[str, Any]) -> set[str]:
    """What tells kinds apart. The rest differs between versions of torch."""
    return {name for name in state if not name.startswith("_") and name != "verbose"}
