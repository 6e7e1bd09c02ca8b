"""Where the gradients of parameters are."""

from collections import Counter

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
    here = stepped = [param for param, _ in found]
    grads = [grad for _, grad in found]
    if not set(map(type, stepped)) <= {Tensor, torch.nn.Parameter}:
        here, grads = list(map(local, stepped)), list(map(_gradient_here, stepped, grads))
    if any(map(Tensor.is_neg, grads)):  # a lazy minus, as autograd leaves it below `complex(…).conj()`
        grads = list(map(Tensor.resolve_neg, grads))
    return stepped, here, grads


def zero_decoupled(params: list[Tensor], set_to_none: bool) -> None:
    """What `zero_grad` does, of each `decoupled_grad`."""
    for param in params:
        if (grad := getattr(param, "decoupled_grad", None)) is not None:
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                grad.zero_()


def turns(params: list[Tensor]) -> list[list[Tensor]]:
    """The parameters, each once; then those that are there again. A group that names one twice steps it twice."""
    if len(set(map(id, params))) == len(params):
        return [params]
    seen: Counter[int] = Counter()
    found: list[list[Tensor]] = []
    for param in params:
        if seen[id(param)] == len(found):
            found.append([])
        found[seen[id(param)]].append(param)
        seen[id(param)] += 1
    return found


def _gradient_here(param: Tensor, grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)
