"""The gradients of an optimizer on this rank, ready for torch's multi-tensor kernels."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LocalGradients = dict[torch.device, list[list[Tensor]]]


def local_gradients(optimizer: torch.optim.Optimizer, *, allow_fp16: bool = True) -> LocalGradients:
    """What this rank holds of each gradient, by device; the tensors of one list have one dtype. Call under no_grad.

    DTensors give their local tensor, sparse gradients their values (fp16 ones are coalesced first: adding up
    duplicates may overflow). Raises ValueError for an fp16 gradient unless allowed.
    """
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters_of(optimizer):
        # A gradient whose dtype its parameter does not allow lives in `decoupled_grad`.
        gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "decoupled_grad", None)
        if gradient is None:
            continue
        if gradient.dtype == torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if gradient.is_sparse:
            if gradient.dtype == torch.float16:
                parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        lists[local.device, local.dtype].append(local)
    by_device: LocalGradients = defaultdict(list)
    for (device, _), gradients in lists.items():
        by_device[device].append(gradients)
    return by_device


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def multiply_and_check_(gradients: LocalGradients, factor: Tensor) -> Tensor:
    """Multiplies all gradients by the 0-d fp32 `factor`; 1.0 on the factor's device if one was not finite, else 0.0.

    Gradients on `factor`'s device, or on another one: each device gets its copy. The product is rounded once, from
    fp32, whatever the dtype of the gradients.
    """
    found = [torch.zeros_like(factor)]
    for device, lists in gradients.items():
        found_here = torch.zeros((), device=device)
        factor_here = factor.to(device, non_blocking=True)
        for gradients_of_one_dtype in lists:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients_of_one_dtype, found_here, factor_here)
        found.append(found_here.to(factor.device, non_blocking=True))
    return torch.stack(found).amax()
