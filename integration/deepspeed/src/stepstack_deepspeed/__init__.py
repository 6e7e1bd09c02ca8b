"""Norm, clip, loss scale and Adam for DeepSpeed engines and DeepSpeed configs."""

from typing import NoReturn

from stepstack_deepspeed._elsewhere import PACKAGE, explained
from stepstack_deepspeed._engine import Engine
from stepstack_deepspeed._initialize import initialize
from stepstack_deepspeed._plug import Plug, plug

__all__ = ["Engine", "Plug", "initialize", "plug"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(explained("stepstack_deepspeed has no", name, PACKAGE))
