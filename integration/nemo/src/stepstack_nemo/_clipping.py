"""A trainer's hook for clipping, that counts what several ranks have once."""

from typing import Any

import torch
from torch import Tensor

from stepstack_clip import clip_coefficient, clip_grad_value_, multiply_
from stepstack_gradnorm import grads_of
from stepstack_megatron import model_norm, parallel_state
from stepstack_nemo._methods import ApexMethods


def configure_gradient_clipping(
    model: Any,
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> Tensor | None:
    """Lightning's hook of this name: clip to `gradient_clip_val`, by "norm" (the default) or "value".

        model.configure_gradient_clipping = types.MethodType(stepstack_nemo.configure_gradient_clipping, model)

    The norm, which it returns, is of the whole model: over tensor and pipeline parallel ranks, with duplicates and
    shared weights counted once, the same in fp16 and bf16. For a `DistributedFusedAdam` the coefficient waits for the
    step, for others it is multiplied into the gradients. Nothing waits for the device. Every rank of the model calls
    it, after unscaling. None or 0 as `gradient_clip_val` does nothing. Raises ValueError for another algorithm, and for
    "value" on fp16 gradients of a `DistributedFusedAdam`, which are unscaled in its step only.
    """
    if not gradient_clip_val:
        return None
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper has the optimizer itself there
    algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm or "norm"))
    if algorithm == "norm":
        return _clip_norm(optimizer, gradient_clip_val)
    if algorithm != "value":
        raise ValueError(f'gradient_clip_algorithm is {algorithm!r}; it must be "norm" or "value"')
    if isinstance(optimizer, ApexMethods) and any(grad.dtype == torch.float16 for grad in optimizer.grad_shards()):
        raise ValueError("fp16 gradients are unscaled in the step, so their values can't be clipped: clip the norm")
    clip_grad_value_([param for group in optimizer.param_groups for param in group["params"]], gradient_clip_val)
    return None


def _clip_norm(optimizer: Any, max_norm: float) -> Tensor:
    if isinstance(optimizer, ApexMethods):
        return optimizer.clip_grad_norm(max_norm)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = grads_of(params)
    norm = model_norm(list(zip(params, grads, strict=True)), None, 2.0, parallel_state())
    multiply_(grads, clip_coefficient(norm, max_norm))
    return norm
