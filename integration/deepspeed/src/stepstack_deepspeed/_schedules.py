"""Learning rates that follow the applied steps: DeepSpeed's schedules, and torch's schedulers.

Each is moved at the end of a step, and stays where it is if that was skipped. Rates are computed, or picked, on the
device, from the number of applied steps; only for an optimizer that can't be told there to skip, the host decides.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stepstack_deepspeed._curves import CURVES, Curve, rates_of
from stepstack_deepspeed._section import Section, check_arguments
from stepstack_grad_scaler import AppliedStepsLR, GradScaler

_MOVED_BY_ENGINE = (
    "engine.step() moves the schedule that initialize got, once for each applied step: leave this call out. To move it "
    "yourself, leave it out of initialize and of the config"
)


class ScheduledRates:
    """The learning rates of an optimizer by a `Curve`. What `initialize` gives back as the scheduler.

    Nothing is to be called in a loop: the engine moves it. `applied_steps` is the engine's count, 0-d fp32. A curve
    with a momentum sets `betas` too, which are Python's numbers: then each move waits for the device.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve, applied_steps: Tensor, *, on_device: bool) -> None:
        self.optimizer, self._applied_steps = optimizer, applied_steps
        self._on_device = on_device and curve.momentum is None
        wide = torch.float32 if applied_steps.device.type == "mps" else torch.float64
        self._curve = curve
        self._low, self._high, self._start = (
            torch.tensor(rates, dtype=wide, device=applied_steps.device)
            for rates in (curve.low, curve.high, curve.start)
        )
        self.move()

    @torch.no_grad()
    def move(self) -> None:
        """Set the rates to those of the next step."""
        position = (self._applied_steps.to(self._low.dtype) - 1).clamp_(min=0)
        rates = self._low * self._curve.fade(position) + (self._high - self._low) * self._curve.factor(position)
        rates = torch.where(self._applied_steps > 0, rates, self._start)
        groups = self.optimizer.param_groups
        if not self._on_device:
            for group, number in zip(groups, rates.tolist(), strict=True):  # the host has waited in the step
                group["lr"] = number
            self._move_betas(position)
            return
        for group, rate in zip(groups, rates.float().unbind(), strict=True):
            if isinstance(group["lr"], Tensor) and group["lr"].device == rate.device:
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate.clone()

    def _move_betas(self, position: Tensor) -> None:
        momentum = self._curve.momentum
        if momentum is None:
            return
        betas = [float(beta) for beta in momentum.at(position)] if self._applied_steps > 0 else momentum.start
        for group, beta in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = (beta, momentum.beta2)

    def get_last_lr(self) -> list[float]:
        """The rate of each group, for the next step. Waits for the device."""
        return rates_of(self.optimizer)

    get_lr = get_last_lr

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, for the next step; None for a schedule of rates only."""
        return None if self._curve.momentum is None else [group["betas"] for group in self.optimizer.param_groups]

    def step(self, *_: Any) -> NoReturn:
        """RuntimeError: the engine moves it."""
        raise RuntimeError(_MOVED_BY_ENGINE)

    @property
    def last_batch_iteration(self) -> int:
        """The number of applied steps, less one. Waits for the device."""
        return int(self._applied_steps) - 1

    def state_dict(self) -> dict[str, Any]:
        """`last_batch_iteration`, as DeepSpeed's schedulers have it. Waits for the device."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._applied_steps.fill_(state_dict["last_batch_iteration"] + 1)
        self.move()


class SteppedScheduler:
    """Moves a torch scheduler of the optimizer's groups, for the engine.

    `scaler` has the flag of the last step. On the device the rates are tensors; then the scheduler may change `lr`
    only, and runs ahead of the applied steps by those that were skipped (see `AppliedStepsLR`). The scheduler's own
    `get_last_lr`, `state_dict` and `load_state_dict` speak of the applied steps from here on, and its `step` raises.
    """

    def __init__(self, scheduler: LRScheduler, scaler: GradScaler, *, on_device: bool) -> None:
        self.scheduler = scheduler
        self._scaler = scaler
        self._ahead = AppliedStepsLR(scheduler, scaler) if on_device else None
        self._at_work = False
        _show(self)

    def move(self) -> None:
        """Set the rates to those of the next step."""
        if self._ahead is not None:
            self._within(self._ahead.step)
        elif not self._scaler.last_step_skipped:  # the host has waited in the step
            self._within(self.scheduler.step)

    def get_last_lr(self) -> list[float]:
        """The rate of each group, for the next step. Waits for the device."""
        return rates_of(self.scheduler.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and what it has said ahead. Waits for the device."""
        state: dict[str, Any] = self._within((self._ahead or self.scheduler).state_dict)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._within(partial((self._ahead or self.scheduler).load_state_dict, state_dict))

    def _within(self, work: Callable[[], Any]) -> Any:
        """The scheduler's methods do in here what they do without us."""
        self._at_work = True
        try:
            return work()
        finally:
            self._at_work = False


def _show(ours: SteppedScheduler) -> None:
    """Whoever holds the scheduler, the caller perhaps, sees the applied steps."""
    kind = type(ours.scheduler)

    class Moved(kind):  # type: ignore[misc, valid-type]
        def step(self, *epoch: Any) -> None:
            if not ours._at_work:
                raise RuntimeError(_MOVED_BY_ENGINE)
            super().step(*epoch)

        def get_last_lr(self) -> list[float]:
            lrs: list[float] = super().get_last_lr() if ours._at_work else ours.get_last_lr()
            return lrs

        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = super().state_dict() if ours._at_work else ours.state_dict()
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if ours._at_work:
                super().load_state_dict(state_dict)
            else:
                ours.load_state_dict(state_dict)

    Moved.__name__, Moved.__qualname__, Moved.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    ours.scheduler.__class__ = Moved


def of_config(config: Section) -> "Callable[[Optimizer], Curve | LRScheduler] | None":
    """What makes the schedule that the config names, for an optimizer; None if it names none."""
    scheduler = config.section("scheduler")
    name = scheduler.name_of_type()
    params = scheduler.section("params")
    if name is None:
        return None
    if name in CURVES:
        return CURVES[name](params)
    scheduler_class = getattr(torch.optim.lr_scheduler, name, None)
    if (
        not (isinstance(scheduler_class, type) and issubclass(scheduler_class, LRScheduler))
        or scheduler_class is LRScheduler
    ):
        raise ValueError(
            f"scheduler.type is {name!r}: it must be one of {', '.join(CURVES)}, or of torch.optim.lr_scheduler, "
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
