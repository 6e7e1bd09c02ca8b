"""Clipping by value: every element on its own."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_clip._parameters import listed
from stepstack_gradnorm import grads_of, local_runs


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Bring every element of the gradients into [-clip_value, clip_value], in place; NaN stays.

    Takes what `torch.nn.utils.clip_grad_value_` takes (`foreach` changes nothing), for any mix of tensors and DTensors,
    and follows `grad_shard` and `decoupled_grad`. No communication, no host sync. TypeError for a
    complex gradient; ValueError for a DTensor that is Partial (its elements are not known to any rank) and if
    `clip_value` is negative or NaN; nothing is touched then.
    """
    if math.isnan(clip_value) or clip_value < 0:
        raise ValueError(f"clip_value is 0 or more, not {clip_value}")
    grads = grads_of(listed(parameters))
    for grad in grads:
        if grad.is_complex():
            raise TypeError(f"complex numbers have no order to be clipped by: a gradient is {grad.dtype}")
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            raise ValueError(f"a gradient has placements {grad.placements}: redistribute it, its elements are partial")
    grads = [_coalesced(grad) for grad in grads]
    for (_, dtype), runs in local_runs(grads).items():
        if dtype.itemsize == 1:  # fp8 has no arithmetic of its own
            for run in runs:
                run.copy_(run.float().clamp_(-clip_value, clip_value))
        else:
            limit = clip_value if clip_value <= torch.finfo(dtype).max else math.inf  # fp16 may not have the number
            torch._foreach_clamp_min_(runs, -limit)
            torch._foreach_clamp_max_(runs, limit)


def _coalesced(grad: Tensor) -> Tensor:
    """The gradient itself, where an index of a sparse one occurs once: it is the sum that is to be clipped."""
    if grad.layout is torch.sparse_coo and not grad.is_coalesced():
        grad.copy_(grad.coalesce())
    return grad
