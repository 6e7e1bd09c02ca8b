"""Norm, clip, loss scale and Adam for Megatron-core optimizers."""

from stepstack_megatron._border import VERSIONS
from stepstack_megatron._clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32, get_grad_norm_fp32
from stepstack_megatron._model_norm import model_norm
from stepstack_megatron._parallel import ParallelState, is_expert, parallel_state
from stepstack_megatron._plug import Plug, plug
from stepstack_megatron._scaler import DynamicGradScaler

__all__ = [
    "VERSIONS",
    "DynamicGradScaler",
    "ParallelState",
    "Plug",
    "clip_grad_by_total_norm_fp32",
    "count_zeros_fp32",
    "get_grad_norm_fp32",
    "is_expert",
    "model_norm",
    "parallel_state",
    "plug",
]
