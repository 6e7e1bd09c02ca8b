"""How a loss scale follows overflows: one rule, as a plain function of tensors."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max
_REFILLS = ("on_growth", "on_clean_step")


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule; `adapted` says what they do. Raises ValueError for numbers that make no sense.

    `growth_restart` is what an overflow sets the growth tracker to: with -1 the first clean step after an overflow
    does not count towards growth.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_restart: int = 0
    hysteresis: int = 1
    refill_hysteresis: Literal["on_growth", "on_clean_step"] = "on_growth"
    min_scale: float = _SMALLEST_NORMAL
    max_scale: float = LARGEST

    def __post_init__(self) -> None:
        whole = ("growth_interval", "growth_restart", "hysteresis")
        for name in ("growth_factor", "backoff_factor", *whole, "min_scale", "max_scale"):
            kind, wanted = (Integral, "a whole number") if name in whole else (Real, "a number")
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")
        for name, fine, wanted in (
            ("growth_factor", 1 <= self.growth_factor < float("inf"), "at least 1, and finite"),
            ("backoff_factor", 0 < self.backoff_factor <= 1, "above 0 and at most 1"),
            ("growth_interval", 1 <= self.growth_interval < 2**31, "at least 1, and an int32"),
            ("growth_restart", -(2**31) <= self.growth_restart <= 0, "at most 0, and an int32"),
            ("hysteresis", 1 <= self.hysteresis < 2**31, "at least 1, and an int32"),
            ("refill_hysteresis", self.refill_hysteresis in _REFILLS, " or ".join(_REFILLS)),
            ("min_scale", self.min_scale >= _SMALLEST_NORMAL, "at least 2**-126, or its reciprocal is not finite"),
            ("max_scale", self.min_scale <= self.max_scale <= LARGEST, "at least min_scale, and finite in fp32"),
        ):
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")


class ScaleState(NamedTuple):
    """0-d tensors of one device: the scale (fp32), clean steps in a row, overflows that are left until it backs off."""

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor


def adapted(state: ScaleState, rule: Rule, *, overflow: Tensor, clean: Tensor) -> ScaleState:
    """The state after a step. `overflow` and `clean` are 0-d bools, at most one is true; with neither nothing changes.

    An overflow uses up one of `hysteresis`; the last one, and each after it, multiplies the scale by `backoff_factor`,
    down to `min_scale`. `growth_interval` clean steps in a row multiply it by `growth_factor`, up to `max_scale`,
    unless the product is infinite. Hysteresis is whole again after that, or after any clean step.

    With `hysteresis=1` this is `torch._amp_update_scale_`, except that the scale stops at `min_scale`, and that an
    interval made shorter than the steps counted already ends with the next one.
    """
    clean_steps = state.growth_tracker + clean
    grows = clean & (clean_steps >= rule.growth_interval)
    hysteresis_left = (state.hysteresis_tracker - overflow.int()).clamp_(min=0)
    backs_off = overflow & (hysteresis_left == 0)
    refills = clean if rule.refill_hysteresis == "on_clean_step" else grows

    # In fp64, as torch does: an fp32 product would round the factor first. Apple's GPUs have no fp64.
    wide = torch.float32 if state.scale.device.type == "mps" else torch.float64
    factor = torch.ones_like(state.scale, dtype=wide)
    factor.masked_fill_(grows, rule.growth_factor).masked_fill_(backs_off, rule.backoff_factor)
    product = (state.scale * factor).float()
    scale = torch.where(product < torch.inf, product, state.scale).clamp_(rule.min_scale, rule.max_scale)
    return ScaleState(
        scale=scale,
        growth_tracker=clean_steps.masked_fill_(grows, 0).masked_fill_(overflow, rule.growth_restart),
        hysteresis_tracker=hysteresis_left.masked_fill_(refills, rule.hysteresis),
    )
