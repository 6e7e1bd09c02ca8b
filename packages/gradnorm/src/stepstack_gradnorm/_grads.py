"""From parameters to gradients, with the places of those that are missing."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def grads_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters, one for each, in their order.

    A parameter with an attribute `grad_shard` that is not None, a Tensor or DTensor, has its gradient there (a sharded
    optimizer says so). Where there is no gradient stands an empty one: a DTensor over the mesh of the parameter, if
    that is a DTensor. So a rank without a gradient takes part in the same reductions as the others.
    """
    return [_grad_of(parameter) for parameter in ((parameters,) if isinstance(parameters, Tensor) else parameters)]


def _grad_of(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"a parameter is a Tensor, not {type(parameter).__name__}: {str(parameter)[:60]}")
    shard = getattr(parameter, "grad_shard", None)
    if shard is not None:
        if not isinstance(shard, Tensor):
            raise TypeError(f"grad_shard is a Tensor or DTensor, not {type(shard).__name__}")
        return shard
    if parameter.grad is not None:
        return parameter.grad
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
