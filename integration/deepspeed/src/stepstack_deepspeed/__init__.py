"""Norm, clip, loss scale and Adam for DeepSpeed engines and DeepSpeed configs."""

from typing import NoReturn

from stepstack_deepspeed._elsewhere import PACKAGE, explained
from stepstack_deepspeed._engine import Engine
from stepstack_deepspeed._initialize import initialize
from stepstack_deepspeed._plug import Plug, plug
from stepstack_deepspeed._tensors import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "Engine",
    "Plug",
    "initialize",
    "plug",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(explained("stepstack_deepspeed has no", name, PACKAGE))
