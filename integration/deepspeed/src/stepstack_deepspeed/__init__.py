"""Norm, clip, loss scale and Adam for DeepSpeed engines and DeepSpeed configs."""

from stepstack_deepspeed._plug import Plug, plug

__all__ = ["Plug", "plug"]
