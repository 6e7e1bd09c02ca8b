"""Presets: the rules of well-known engines, by their names."""

from stepstack_grad_scaler._rule import Rule

# The scale to start with, and the rule.
PRESETS: dict[str, tuple[float, Rule]] = {
    "torch": (2.0**16, Rule()),
    "megatron": (2.0**32, Rule(growth_interval=1000, hysteresis=2, min_scale=1.0)),
    "apex": (2.0**16, Rule(hysteresis=2, refill_hysteresis="on_clean_step")),
    "deepspeed": (2.0**16, Rule(growth_interval=1000, growth_restart=-1, hysteresis=2, min_scale=1.0)),
}
