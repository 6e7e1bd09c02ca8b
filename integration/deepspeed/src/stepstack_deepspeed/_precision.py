"""In which precision a model runs: what `fp16`, `bf16` and `data_types` of a config say."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepstack_deepspeed._section import Section
from stepstack_grad_scaler import GradScaler

_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "float32", "float", "torch.float32"),
        torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16"),
        torch.float16: ("fp16", "float16", "half", "torch.float16"),
    }.items()
    for name in names
}
_LARGEST_POWER = 127
_MASTERS = "master weights are fp32 here, cut into shares; leave it out"


@dataclass(frozen=True)
class LossScale:
    """The rule of a dynamic loss scale; `fixed` is the loss scale that stays, 0 for none."""

    fixed: float
    initial_power: int
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    smallest: float

    @classmethod
    def read(cls, fp16: Section, *, enabled: bool) -> "LossScale":
        power = fp16.whole("initial_scale_power", 16, at_least=0)
        window = fp16.whole("loss_scale_window", 1000)
        hysteresis = fp16.whole("hysteresis", 2)
        smallest = fp16.number("min_loss_scale", 1, at_least=2.0**-126)
        assert power is not None
        assert window is not None
        assert hysteresis is not None
        rule = cls(
            fixed=fp16.number("loss_scale", 0, at_least=0),
            initial_power=power,
            window=window,
            hysteresis=hysteresis,
            consecutive_hysteresis=fp16.flag("consecutive_hysteresis"),
            smallest=smallest,
        )
        if enabled and max(power, math.log2(rule.fixed or 1)) > _LARGEST_POWER:
            raise ValueError(
                f"fp16.initial_scale_power {power} or fp16.loss_scale {rule.fixed:g} is too large for fp32"
            )
        if enabled and not rule.fixed and 2.0**power < smallest:
            raise ValueError(
                f"fp16.initial_scale_power is {power}, a loss scale of {2**power}, below fp16.min_loss_scale {smallest}"
            )
        return rule

    def scaler(self, device_type: str) -> GradScaler:
        """What keeps it."""
        if self.fixed:
            return constant_scale(device_type, self.fixed)
        return GradScaler(
            device_type,
            2.0**self.initial_power,
            growth_interval=self.window,
            preset="deepspeed",
            hysteresis=self.hysteresis,
            refill_hysteresis="on_clean_step" if self.consecutive_hysteresis else "on_growth",
            min_scale=self.smallest,
        )


@dataclass(frozen=True)
class Precision:
    """`dtype` is that of the weights in forward and backward, whose masters are fp32 shares of each rank."""

    dtype: torch.dtype
    grad_dtype: torch.dtype | None
    """In which gradients are accumulated and reduced; None: in `dtype`."""
    loss_scale: LossScale | None
    casts_inputs: bool = False
    """Floating point inputs of forward become fp16."""

    @classmethod
    def read(cls, config: Section) -> "Precision":
        fp16 = config.section("fp16")
        half = fp16.flag("enabled")
        loss_scale = LossScale.read(fp16, enabled=half)
        casts_inputs = fp16.flag("auto_cast")
        fp16.refuse("fp16_master_weights_and_grads", _MASTERS)
        if "bf16" in config:
            config.refuse("bfloat16", "it is the old name of bf16, which is there too", unless=())
        bf16 = config.section("bfloat16" if "bfloat16" in config and "bf16" not in config else "bf16")
        brain = bf16.flag("enabled")
        bf16.refuse("bf16_master_weights_and_grads", _MASTERS)
        bf16.refuse("bf16_optimizer_states", "moments are fp32 here; leave it out")
        bf16.without_effect("immediate_grad_update")
        bf16.without_effect("check_grad_overflow", as_here=(True,))
        if half and brain:
            raise ValueError("fp16.enabled and bf16.enabled are both true: weights have one dtype")
        dtype = torch.float16 if half else torch.bfloat16 if brain else torch.float32

        types = config.section("data_types")
        grad_dtype = types.choice("grad_accum_dtype", None, list(_DTYPES))
        param_dtype = types.choice("param_dtype", None, list(_DTYPES))
        if param_dtype is not None and _DTYPES[param_dtype] != dtype:
            raise ValueError(
                f"data_types.param_dtype is {param_dtype!r}, but fp16.enabled and bf16.enabled say {_said(dtype)}"
            )
        types.refuse("buffer_dtype", "buffers keep the dtype that the model gives them", unless=())
        types.without_effect("keep_in_fp32_modules", as_here=("auto",))
        return cls(
            dtype,
            None if grad_dtype is None else _DTYPES[grad_dtype],
            loss_scale if half else None,
            casts_inputs and half,
        )

    @property
    def is_mixed(self) -> bool:
        """Whether weights have master copies."""
        return self.dtype != torch.float32

    def check_reduced_in(self, given: str | None) -> None:
        """ValueError if `communication_data_type` is another dtype than that of the gradients."""
        grad_dtype = self.grad_dtype or self.dtype
        if given is not None and _DTYPES[given.lower()] != grad_dtype:
            raise ValueError(
                f"communication_data_type is {given!r}, but gradients are reduced in the dtype that they are "
                f"accumulated in, here {_said(grad_dtype)}: say data_types.grad_accum_dtype"
            )


def constant_scale(device_type: str, scale: float) -> GradScaler:
    """A loss scale that never changes. Its scaler counts what is skipped all the same."""
    return GradScaler(device_type, scale, min_scale=scale, max_scale=scale)


def in_half(value: Any) -> Any:
    """Floating point tensors made fp16, in lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(in_half, value))
    if isinstance(value, list | tuple):
        return type(value)(map(in_half, value))
    if isinstance(value, dict):
        return {key: in_half(one) for key, one in value.items()}
    return value


def scaled(loss: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
    """The loss as backward is to see it."""
    return loss if scaler is None else scaler.scale(loss)


def _said(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
