"""Presets: the rules of well-known engines, by their names."""

from dataclasses import replace
from typing import Any

from stepstack_grad_scaler._rule import Rule

# The scale to start with, and the rule.
_PRESETS = {
    "torch": (2.0**16, Rule()),
    "megatron": (2.0**32, Rule(growth_interval=1000, hysteresis=2, min_scale=1.0)),
    "apex": (2.0**16, Rule(hysteresis=2, refill_hysteresis="on_clean_step")),
    "deepspeed": (2.0**16, Rule(growth_interval=1000, growth_restart=-1, hysteresis=2, min_scale=1.0)),
}


def scale_and_rule(preset: str, init_scale: float | None, **given: Any) -> tuple[float, Rule]:
    """The scale to start with and the rule: what is given, and the preset's where that is None."""
    if preset not in _PRESETS:
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(_PRESETS)}")
    scale, rule = _PRESETS[preset]
    rule = replace(rule, **{name: value for name, value in given.items() if value is not None})
    scale = scale if init_scale is None else float(init_scale)
    if not rule.min_scale <= scale <= rule.max_scale:
        raise ValueError(
            f"init_scale is {scale!r}; it must be in [min_scale, max_scale] = [{rule.min_scale}, {rule.max_scale}]"
        )
    return scale, rule
