"""Megatron's functions of gradients, by its names and with its arguments, without a host sync."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_clip import clip_coefficient, multiply_
from stepstack_gradnorm import Part, grads_of, total_norm
from stepstack_megatron._parallel import counts_once
from stepstack_megatron._zeros import zeros_in


def get_grad_norm_fp32(
    grads_for_norm: Tensor | Iterable[Tensor],
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The norm of gradients of which the ranks of a group hold different pieces: a 0-d fp32 tensor.

    `grads_for_norm`: gradients in any dtype, which count as given; a DTensor is added up over its mesh as well.
    `norm_type`: 0 (the number of non-zero elements), any positive number, or `math.inf`.
    `grad_stats_parallel_group`: None is the whole world, as in Megatron.

    All ranks of the group call it, those without gradients too. It adds up squares in fp64, so it is infinite only if
    an element is or if fp32 can't hold it, where Megatron's overflows from 1.8e19 on.
    """
    return total_norm(
        Part([grad.detach() for grad in _listed(grads_for_norm)], group_or_world(grad_stats_parallel_group)), norm_type
    )


def clip_grad_by_total_norm_fp32(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor | float,
    use_decoupled_grad: bool = False,
) -> None:
    """Scale gradients in place so that a norm of `total_norm` becomes at most `max_norm`. Communicates nothing.

    `use_decoupled_grad`: whether a gradient is `decoupled_grad` of its parameter, or `grad`; of any floating dtype.
    At or below `max_norm`, and where the norm is not finite, no bit changes: that such a step must not be made is for
    the caller to say (Megatron's makes NaN of an infinite gradient, and 0 of all others).
    ValueError if `max_norm` is negative or NaN.
    """
    multiply_(_grads(_listed(parameters), use_decoupled_grad), clip_coefficient(torch.as_tensor(total_norm), max_norm))


def count_zeros_fp32(
    parameters: Tensor | Iterable[Tensor],
    grad_stats_parallel_group: dist.ProcessGroup | None,
    use_decoupled_grad: bool = False,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """How many elements of the gradients are zero, over all ranks of a group: a 0-d int64 tensor.

    Left out are parameters without a gradient, those with an attribute `shared` that is true, and those that each rank
    of `tp_group` holds the same (without a true `tensor_model_parallel`), except on its first rank.

    `grad_stats_parallel_group`: None is the whole world. `tp_group`: None is Megatron's own tensor-parallel group;
    RuntimeError where Megatron is not loaded. A DTensor is added up over its mesh as well.
    All ranks of the group call it. Counts are integers, where Megatron's are fp32 and inexact from 2²⁴ on.
    """
    tensor_rank = _tensor_rank(tp_group)
    counted = [param for param in _listed(parameters) if counts_once(param, tensor_rank)]
    return zeros_in([Part(_grads(counted, use_decoupled_grad), group_or_world(grad_stats_parallel_group))])


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group; the whole world where Megatron has None."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("a group of None is the whole world, and torch.distributed is not initialized here")
    return group


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _grads(params: list[Tensor], decoupled: bool) -> list[Tensor]:
    """One for each parameter, an empty one where there is none."""
    if any(getattr(param, "__fsdp_param__", False) for param in params):
        raise TypeError(
            "a parameter belongs to Megatron-FSDP, whose gradients don't say which ranks hold other pieces: pass the "
            "local ones to get_grad_norm_fp32, and clip and count with Megatron's own functions"
        )
    if not decoupled:
        return grads_of(params)
    grads = [getattr(param, "decoupled_grad", None) for param in params]
    return [param.detach().new_empty(0) if grad is None else grad for param, grad in zip(params, grads, strict=True)]


def _tensor_rank(tp_group: dist.ProcessGroup | None) -> int:
    """This rank's place in its tensor-parallel group; duplicates count on the first."""
    if tp_group is not None:
        return tp_group.rank()
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None:
        raise RuntimeError(
            "tp_group=None is Megatron's own tensor-parallel group, and megatron.core is not loaded here: pass tp_group"
        )
    return int(parallel_state.get_tensor_model_parallel_rank())
