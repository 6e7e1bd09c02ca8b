"""Where the gradients of parameters are."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam._run import local


def with_gradients(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The parameters that have a gradient, what this rank holds of them, and of their gradients.

    A gradient is `grad`, or else `decoupled_grad`.
    """
    found = [
        (param, grad)
        for param in params
        if (grad := param.grad) is not None or (grad := getattr(param, "decoupled_grad", None)) is not None
    ]
    stepped, grads = [param for param, _ in found], [grad for _, grad in found]
    if set(map(type, stepped)) <= {Tensor, torch.nn.Parameter}:
        return stepped, stepped, grads
    return stepped, list(map(local, stepped)), list(map(_gradient_here, stepped, grads))


def _gradient_here(param: Tensor, grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)
