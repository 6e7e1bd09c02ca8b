"""From parameters to gradients, with the places of those that are missing."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def grads_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters, one for each, in their order.

    The gradient of a parameter is the first of `grad_shard` (so a sharded optimizer says where it is), `grad` and
    `decoupled_grad` (one of a dtype that `grad` may not have) that is there and not None. What `current_grad_shard()`
    of a parameter gives, if it has that, goes before its `grad_shard`: callers may have changed `grad` since. Without
    any of them stands an empty one: a DTensor over the mesh of the parameter, if that is a DTensor. So a rank without a
    gradient takes part in the same reductions as the others. TypeError for what is neither a parameter nor an iterable
    of them.
    """
    return [_grad_of(parameter) for parameter in ((parameters,) if isinstance(parameters, Tensor) else parameters)]


def _grad_of(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, Tensor):
        hint = " (named_parameters() gives names too: pass parameters())" if isinstance(parameter, tuple | str) else ""
        raise TypeError(f"a parameter is a Tensor, not {type(parameter).__name__}: {str(parameter)[:60]}{hint}")
    grad = _shard_of(parameter)
    if grad is None:
        grad = parameter.grad
    if grad is None:
        grad = getattr(parameter, "decoupled_grad", None)
    if grad is None:
        return _missing(parameter)
    if not isinstance(grad, Tensor):
        name = "grad_shard" if grad is getattr(parameter, "grad_shard", None) else "decoupled_grad"
        raise TypeError(f"{name} is a Tensor or DTensor, not {type(grad).__name__}")
    return grad


def _shard_of(parameter: Tensor) -> Any:
    current = getattr(parameter, "current_grad_shard", None)
    return getattr(parameter, "grad_shard", None) if current is None else current()


def _missing(parameter: Tensor) -> Tensor:
    """An empty gradient that takes part in the same reductions as one that is there."""
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            parameter.to_local().new_empty(0),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return parameter.new_empty(0)
