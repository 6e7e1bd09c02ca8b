"""Norm, clip, loss scale and Adam for DeepSpeed engines and DeepSpeed configs."""

from stepstack_deepspeed._engine import Engine
from stepstack_deepspeed._initialize import initialize
from stepstack_deepspeed._plug import Plug, plug

__all__ = ["Engine", "Plug", "initialize", "plug"]
