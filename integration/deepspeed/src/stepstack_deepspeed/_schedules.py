"""Learning rates that follow the applied steps: the warm-up schedules of a config, and torch's schedulers.

Each is moved at the end of a step, and stays where it is if that was skipped. Rates are computed, or picked, on the
device, from the number of applied steps; only for an optimizer that can't be told there to skip, the host decides.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stepstack_deepspeed._section import Section, check_arguments
from stepstack_grad_scaler import AppliedStepsLR, GradScaler

Factor = Callable[[Tensor], Tensor]
"""From the position in a schedule, 0-d fp64 and at least 0, to a number that is 1 at the end of the warm-up."""


class Warmup(NamedTuple):
    """A warm-up schedule as a function of the number of applied steps n, which is at position i = n − 1.

    From `low` to `high`: rate = low + (high − low) · factor(i), and `start` before the first step.
    """

    factor: Factor
    low: Sequence[float]
    high: Sequence[float]
    start: Sequence[float]
    """Each of them for each parameter group."""


class ScheduledRates:
    """The learning rates of an optimizer by a `Warmup`. What `initialize` gives back as the scheduler.

    Nothing is to be called in a loop: the engine moves it. `applied_steps` is the engine's count, 0-d fp32.
    """

    def __init__(self, optimizer: Optimizer, warmup: Warmup, applied_steps: Tensor, *, on_device: bool) -> None:
        self._optimizer, self._applied_steps, self._on_device = optimizer, applied_steps, on_device
        wide = torch.float32 if applied_steps.device.type == "mps" else torch.float64
        self._factor = warmup.factor
        self._low, self._high, self._start = (
            torch.tensor(rates, dtype=wide, device=applied_steps.device)
            for rates in (warmup.low, warmup.high, warmup.start)
        )
        self.move()

    @torch.no_grad()
    def move(self) -> None:
        """Set the rates to those of the next step."""
        position = (self._applied_steps.to(self._low.dtype) - 1).clamp_(min=0)
        rates = self._low + (self._high - self._low) * self._factor(position)
        rates = torch.where(self._applied_steps > 0, rates, self._start)
        groups = self._optimizer.param_groups
        if not self._on_device:
            for group, number in zip(groups, rates.tolist(), strict=True):  # the host has waited in the step
                group["lr"] = number
            return
        for group, rate in zip(groups, rates.float().unbind(), strict=True):
            if isinstance(group["lr"], Tensor) and group["lr"].device == rate.device:
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate.clone()

    def get_last_lr(self) -> list[float]:
        """The rate of each group, for the next step. Waits for the device."""
        return _rates_of(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """`last_batch_iteration`, as DeepSpeed's schedulers have it. Waits for the device."""
        return {"last_batch_iteration": int(self._applied_steps) - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._applied_steps.fill_(state_dict["last_batch_iteration"] + 1)
        self.move()


class SteppedScheduler:
    """A torch scheduler, moved by the engine. What `initialize` gives back as the scheduler.

    `scaler` has the flag of the last step. On the device the rates are tensors; then the scheduler may change `lr`
    only, and runs ahead of the applied steps by those that were skipped (see `AppliedStepsLR`).
    """

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer, scaler: GradScaler, *, on_device: bool) -> None:
        self.scheduler = scheduler
        self._optimizer, self._scaler = optimizer, scaler
        self._ahead = AppliedStepsLR(scheduler, scaler) if on_device else None
        self._shown: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        self._show()

    def move(self) -> None:
        """Set the rates to those of the next step."""
        if self._ahead is not None:
            self._ahead.step()
        elif not self._scaler.last_step_skipped:  # the host has waited in the step
            self.scheduler.step()
        self._show()

    def get_last_lr(self) -> list[float]:
        """The rate of each group, for the next step. Waits for the device."""
        return _rates_of(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and what it has said ahead. Waits for the device."""
        return (self._ahead or self.scheduler).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        (self._ahead or self.scheduler).load_state_dict(state_dict)
        self._show()

    def _show(self) -> None:
        """What it has changed in parameter groups that it knows, it has changed in the optimizer's."""
        groups = zip(self._optimizer.param_groups, self.scheduler.optimizer.param_groups, self._shown, strict=True)
        for ours, theirs, shown in groups:
            changed = {key: value for key, value in theirs.items() if value is not shown.get(key)}
            shown |= changed
            ours |= {key: value for key, value in changed.items() if key not in ("params", "param_names")}


def of_config(config: Section) -> "Callable[[Optimizer], Warmup | LRScheduler] | None":
    """What makes the schedule that the config names, for an optimizer; None if it names none."""
    scheduler = config.section("scheduler")
    name = scheduler.name_of_type()
    params = scheduler.section("params")
    if name is None:
        return None
    if name in _WARMUPS:
        return _WARMUPS[name](params)
    if name in ("LRRangeTest", "OneCycle"):
        raise ValueError(
            f"scheduler.type is {name!r}: there are {', '.join(_WARMUPS)}, and torch's, such as OneCycleLR"
        )
    scheduler_class = getattr(torch.optim.lr_scheduler, name, None)
    if (
        not (isinstance(scheduler_class, type) and issubclass(scheduler_class, LRScheduler))
        or scheduler_class is LRScheduler
    ):
        raise ValueError(
            f"scheduler.type is {name!r}: it must be one of {', '.join(_WARMUPS)}, or of torch.optim.lr_scheduler, "
            "spelled as there"
        )
    options = params.rest()
    check_arguments(scheduler_class, options, params, module="torch.optim.lr_scheduler")
    return partial(_of_torch, scheduler_class, options)


def of_caller(lr_scheduler: Any, optimizer: Optimizer, given: Optimizer | None) -> LRScheduler:
    """The caller's scheduler, or what a function made of the optimizer; `given` is the optimizer that the caller has.

    TypeError or ValueError for something else, or one that follows another optimizer.
    """
    if not isinstance(lr_scheduler, LRScheduler):
        if not callable(lr_scheduler):
            raise TypeError(
                "lr_scheduler must be a scheduler of torch.optim.lr_scheduler or a function that makes one of an "
                f"optimizer; got {type(lr_scheduler).__name__}"
            )
        lr_scheduler, given = lr_scheduler(optimizer), optimizer
        if not isinstance(lr_scheduler, LRScheduler):
            raise TypeError(f"the function given as lr_scheduler must make a torch scheduler; it made {lr_scheduler!r}")
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        raise TypeError("lr_scheduler is a ReduceLROnPlateau, which moves on a metric: step it in the loop instead")
    if lr_scheduler.optimizer is not given:
        raise ValueError("lr_scheduler was made for another optimizer than the one that is given to initialize")
    return lr_scheduler


def _of_torch(scheduler_class: type[LRScheduler], params: dict[str, Any], optimizer: Optimizer) -> LRScheduler:
    return of_caller(lambda optimizer: scheduler_class(optimizer, **params), optimizer, None)


def _warmup_lr(params: Section) -> Callable[[Optimizer], Warmup]:
    """Up to the rate, which stays."""
    low, high = _read_rates(params, "warmup_min_lr", 0.0), _read_rates(params, "warmup_max_lr", None)
    steps, rises = _read_warmup(params)
    return partial(_between, low, high, lambda i: torch.where(i < steps, rises(i), 1.0))


def _warmup_decay_lr(params: Section) -> Callable[[Optimizer], Warmup]:
    """Up to the rate, and down a line to 0."""
    low, high = _read_rates(params, "warmup_min_lr", 0.0), _read_rates(params, "warmup_max_lr", 0.001)
    steps, rises = _read_warmup(params)
    total = _read_total(params)

    def factor(i: Tensor) -> Tensor:
        falls = (total - i) / max(1, total - steps)
        return torch.where(i < steps, rises(i), falls.clamp(min=0))

    return partial(_between, low, high, factor)


def _warmup_cosine_lr(params: Section) -> Callable[[Optimizer], Warmup]:
    """Up to the optimizer's own rate, and down half a cosine to a part of it."""
    first = params.number("warmup_min_ratio", 0.0)
    last = params.number("cos_min_ratio", 0.0001)
    steps, rises = _read_warmup(params)
    total = _read_total(params)

    def factor(i: Tensor) -> Tensor:
        progress = ((i - steps + 1) / max(1, total - steps)).clamp(max=1)
        falls = last + (1 - last) * (1 + torch.cos(math.pi * progress)) / 2
        return torch.where(i < steps, first + (1 - first) * rises(i), falls.clamp(min=0))

    def warmup(optimizer: Optimizer) -> Warmup:
        zeros = [0.0 for _ in optimizer.param_groups]
        return Warmup(factor, zeros, _rates_of(optimizer), zeros)

    return warmup


def _read_warmup(params: Section) -> tuple[int, Factor]:
    """How many steps a warm-up takes, and how it rises from 0 to 1."""
    steps = params.whole("warmup_num_steps", 1000)
    kind = params.choice("warmup_type", "log", ("log", "linear"))
    params.refuse("last_batch_iteration", "load a checkpoint to go on from a step", unless=(-1,))
    assert steps is not None
    steps = max(2, steps)
    if kind == "linear":
        return steps, lambda i: i / steps
    return steps, lambda i: torch.log(i + 1) / math.log(steps)


def _read_total(params: Section) -> int:
    total = params.whole("total_num_steps", None)
    if total is None:
        raise ValueError(f"{params.name('total_num_steps')} is missing: the number of steps to the end of the schedule")
    return total


def _read_rates(params: Section, key: str, default: float | None) -> list[float] | float | None:
    """A rate, or one for each parameter group; None for those of the optimizer."""
    value = params.value(key, default)
    rates = value if isinstance(value, list | tuple) else [value]
    if value is not None and not all(map(_is_number, rates)):
        raise ValueError(f"{params.name(key)} must be a number, or a list with one for each group, got {value!r}")
    return list(value) if isinstance(value, tuple) else value


def _between(
    low: list[float] | float | None, high: list[float] | float | None, factor: Factor, optimizer: Optimizer
) -> Warmup:
    lows = _for_groups(low, optimizer, "scheduler.params.warmup_min_lr")
    return Warmup(factor, lows, _for_groups(high, optimizer, "scheduler.params.warmup_max_lr"), lows)


def _for_groups(rates: list[float] | float | None, optimizer: Optimizer, name: str) -> list[float]:
    if rates is None:
        return _rates_of(optimizer)
    groups = len(optimizer.param_groups)
    if not isinstance(rates, list):
        return [rates] * groups
    if len(rates) != groups:
        raise ValueError(f"{name} has {len(rates)} rates, for {groups} parameter groups")
    return rates


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


_WARMUPS = {"WarmupLR": _warmup_lr, "WarmupDecayLR": _warmup_decay_lr, "WarmupCosineLR": _warmup_cosine_lr}
