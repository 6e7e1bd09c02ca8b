"""DeepSpeed's schedules, as functions of the number of applied steps."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepstack_deepspeed._section import Section

Factor = Callable[[Tensor], Tensor]
"""From the position in a schedule, 0-d fp64 and at least 0, to a number."""


class Momentum(NamedTuple):
    """The first beta of each group by position, beside a second one that is the same for all."""

    start: Sequence[float]
    at: Callable[[Tensor], list[Tensor]]
    beta2: float


class Curve(NamedTuple):
    """A schedule as a function of the number of applied steps n, which is at position i = n − 1.

    From `low` to `high`: rate = low · fade(i) + (high − low) · factor(i), and `start` before the first step.
    """

    factor: Factor
    low: Sequence[float]
    high: Sequence[float]
    start: Sequence[float]
    """Each of them for each parameter group."""
    fade: Factor = torch.ones_like
    momentum: Momentum | None = None


MakesCurve = Callable[[Optimizer], Curve]
Given = list[float] | float | None
"""A rate, or one for each parameter group; None for those of the optimizer."""


def _warmup_lr(params: Section) -> MakesCurve:
    """Up to the rate, which stays."""
    low, high = _read_rates(params, "warmup_min_lr", 0.0), _read_rates(params, "warmup_max_lr", None)
    steps, rises = _read_warmup(params)
    return partial(_between, low, high, lambda i: torch.where(i < steps, rises(i), 1.0))


def _warmup_decay_lr(params: Section) -> MakesCurve:
    """Up to the rate, and down a line to 0."""
    low, high = _read_rates(params, "warmup_min_lr", 0.0), _read_rates(params, "warmup_max_lr", 0.001)
    steps, rises = _read_warmup(params)
    total = _read_total(params)

    def factor(i: Tensor) -> Tensor:
        falls = (total - i) / max(1, total - steps)
        return torch.where(i < steps, rises(i), falls.clamp(min=0))

    return partial(_between, low, high, factor)


def _warmup_cosine_lr(params: Section) -> MakesCurve:
    """Up to the optimizer's own rate, and down half a cosine to a part of it."""
    first = params.number("warmup_min_ratio", 0.0)
    last = params.number("cos_min_ratio", 0.0001)
    steps, rises = _read_warmup(params)
    total = _read_total(params)

    def factor(i: Tensor) -> Tensor:
        progress = ((i - steps + 1) / max(1, total - steps)).clamp(max=1)
        falls = last + (1 - last) * (1 + torch.cos(math.pi * progress)) / 2
        return torch.where(i < steps, first + (1 - first) * rises(i), falls.clamp(min=0))

    def curve(optimizer: Optimizer) -> Curve:
        zeros = [0.0 for _ in optimizer.param_groups]
        return Curve(factor, zeros, rates_of(optimizer), zeros)

    return curve


def _lr_range_test(params: Section) -> MakesCurve:
    """From the lowest rate up a line, or a staircase, without an end."""
    low = _read_rates(params, "lr_range_test_min_lr", 1e-3)
    size = params.whole("lr_range_test_step_size", 2000)
    rate = params.number("lr_range_test_step_rate", 1.0)
    staircase = params.flag("lr_range_test_staircase")
    _refuse_position(params)
    assert size is not None

    def factor(i: Tensor) -> Tensor:
        steps = (i + 1) / size
        return 1 + rate * (steps.floor() if staircase else steps)

    def curve(optimizer: Optimizer) -> Curve:
        lows = _for_groups(low, optimizer, params.name("lr_range_test_min_lr"))
        return Curve(factor, [0.0 for _ in lows], lows, lows)

    return curve


def _one_cycle(params: Section) -> MakesCurve:
    """From the lowest rate up to the highest and back, the momentum the other way round, and then a decay."""
    low, high = (_read_rates(params, key, None) for key in ("cycle_min_lr", "cycle_max_lr"))
    for key, given in (("cycle_min_lr", low), ("cycle_max_lr", high)):
        if given is None:
            raise ValueError(f"{params.name(key)} is missing: OneCycle goes from cycle_min_lr to cycle_max_lr and back")
    scale, total = _read_cycle(params)
    every = params.number("decay_step_size", 0, at_least=0)
    decay, momentum_decay = params.number("decay_lr_rate", 0.0), params.number("decay_mom_rate", 0.0)
    cycles_momentum = params.flag("cycle_momentum", True)
    least, most = _read_rates(params, "cycle_min_mom", 0.8), _read_rates(params, "cycle_max_mom", 0.9)
    _refuse_position(params)

    def factor(i: Tensor) -> Tensor:
        return torch.where(i < total, scale(i), 0.0)

    def beyond(i: Tensor, rate: float) -> Tensor:
        """How much has been decayed: 1 in the cycle and without a decay."""
        if not every or not rate:
            return torch.ones_like(i)
        return torch.where(i < total, 1.0, 1 + rate * ((i - total + 1) / every))

    def curve(optimizer: Optimizer) -> Curve:
        lows, highs = (
            _for_groups(given, optimizer, params.name(key))
            for key, given in (("cycle_min_lr", low), ("cycle_max_lr", high))
        )
        momentum = None
        if cycles_momentum and "betas" in optimizer.defaults:
            leasts, mosts = (
                _for_groups(given, optimizer, params.name(key))
                for key, given in (("cycle_min_mom", least), ("cycle_max_mom", most))
            )

            def betas(i: Tensor) -> list[Tensor]:
                up, grown = factor(i), beyond(i, momentum_decay)
                return [(top - (top - bottom) * up) * grown for bottom, top in zip(leasts, mosts, strict=True)]

            momentum = Momentum(leasts, betas, 0.99)
        return Curve(factor, lows, highs, lows, lambda i: 1 / beyond(i, decay), momentum)

    return curve


def _read_cycle(params: Section) -> tuple[Factor, float]:
    """How far up the cycle is, from 0 to 1 and back, and how many steps it has."""
    up = params.number("cycle_first_step_size", 2000, at_least=1e-9)
    down = params.number("cycle_second_step_size", up, at_least=0)
    stairs = params.whole("cycle_first_stair_count", 0, at_least=0)
    stairs_down = params.whole("cycle_second_stair_count", stairs, at_least=0)
    total = up + down
    ratio = up / total

    def in_stairs(n: Tensor, number: int, smooth: Tensor) -> Tensor:
        if not number:
            return smooth
        into = n.remainder(total)
        place = torch.where(into <= up, into * number / up, (total - into) * number / max(down, 1e-9))
        return place.floor() / number

    def scale(i: Tensor) -> Tensor:
        n = i + 1
        x = 1 + n / total - (1 + n / total).floor()
        rises = in_stairs(n, stairs or 0, x / ratio)
        falls = in_stairs(n, stairs_down or 0, (x - 1) / (ratio - 1) if down else torch.zeros_like(x))
        return torch.where(x <= ratio, rises, falls)

    return scale, total


def _read_warmup(params: Section) -> tuple[int, Factor]:
    """How many steps a warm-up takes, and how it rises from 0 to 1."""
    steps = params.whole("warmup_num_steps", 1000, at_least=0)
    kind = params.choice("warmup_type", "log", ("log", "linear"))
    _refuse_position(params)
    assert steps is not None
    steps = max(2, steps)
    if kind == "linear":
        return steps, lambda i: i / steps
    return steps, lambda i: torch.log(i + 1) / math.log(steps)


def _refuse_position(params: Section) -> None:
    params.refuse("last_batch_iteration", "load a checkpoint to go on from a step", unless=(-1,))


def _read_total(params: Section) -> int:
    total = params.whole("total_num_steps", None)
    if total is None:
        raise ValueError(f"{params.name('total_num_steps')} is missing: the number of steps to the end of the schedule")
    return total


def _read_rates(params: Section, key: str, default: float | None) -> Given:
    value = params.value(key, default)
    rates = value if isinstance(value, list | tuple) else [value]
    if value is not None and not all(map(_is_number, rates)):
        raise ValueError(f"{params.name(key)} must be a number, or a list with one for each group, got {value!r}")
    return list(value) if isinstance(value, tuple) else value


def _between(low: Given, high: Given, factor: Factor, optimizer: Optimizer) -> Curve:
    lows = _for_groups(low, optimizer, "scheduler.params.warmup_min_lr")
    return Curve(factor, lows, _for_groups(high, optimizer, "scheduler.params.warmup_max_lr"), lows)


def _for_groups(rates: Given, optimizer: Optimizer, name: str) -> list[float]:
    if rates is None:
        return rates_of(optimizer)
    groups = len(optimizer.param_groups)
    if not isinstance(rates, list):
        return [rates] * groups
    if len(rates) != groups:
        raise ValueError(f"{name} has {len(rates)} rates, for {groups} parameter groups")
    return rates


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group. Waits, if a schedule has made it a tensor."""
    return [float(group["lr"]) for group in optimizer.param_groups]


CURVES: dict[str, Callable[[Section], MakesCurve]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}
