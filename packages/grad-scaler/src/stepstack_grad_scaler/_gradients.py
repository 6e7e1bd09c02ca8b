"""The gradients of an optimizer on this rank, ready for torch's multi-tensor kernels."""

from collections import defaultdict
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stepstack_grad_scaler._devices import moved

LocalGradients = dict[torch.device, list[list[Tensor]]]


@torch.no_grad()
def local_gradients(optimizer: Optimizer, *, allow_fp16: bool = True) -> LocalGradients:
    """What this rank holds of each gradient, by device; the tensors of one list have one dtype.

    DTensors give their local tensor, complex gradients their real view, sparse ones their values; sparse fp16 ones are
    coalesced first, since adding up duplicates may overflow. Raises ValueError for an fp16 gradient unless allowed,
    and for one that the optimizer does not look for.
    """
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for number, parameter in enumerate(parameters_of(optimizer)):
        # A gradient of a dtype that its parameter does not allow is in `decoupled_grad`.
        place = "grad" if parameter.grad is not None else "decoupled_grad"
        gradient = getattr(parameter, place, None)
        if gradient is None:
            continue
        if place == "decoupled_grad" and type(optimizer).step.__module__.startswith("torch.optim."):
            raise ValueError(
                f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, has its gradient in "
                f"`decoupled_grad`, and {type(optimizer).__name__} reads `grad` alone: the step would leave it out"
            )
        if gradient.dtype == torch.float16 and not allow_fp16:
            raise ValueError(
                f"Attempting to unscale FP16 gradients: parameter {number} of the optimizer, of shape "
                f"{tuple(parameter.shape)}, has one, and unscaled it may underflow. Keep the parameter in fp32 under "
                "autocast, or leave the unscaling to the step of an optimizer with `_step_supports_amp_scaling`."
            )
        if gradient.is_sparse:
            if gradient.dtype == torch.float16:
                gradient = gradient.coalesce()
                setattr(parameter, place, gradient)
            gradient = gradient._values()
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        # Of a lazy conjugate or negative, the memory beneath: it is as finite, and is multiplied as well.
        if local.is_complex():
            local = torch.view_as_real(local.conj() if local.is_conj() else local)
        if local.is_neg():
            local = torch._neg_view(local)
        lists[local.device, local.dtype].append(local)
    by_device: LocalGradients = defaultdict(list)
    for (device, _), gradients in lists.items():
        by_device[device].append(gradients)
    return by_device


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def multiply_and_check_(gradients: LocalGradients, factor: Tensor) -> Tensor:
    """Multiplies all gradients by the 0-d fp32 `factor`; gives 1.0 if one was not finite before, else 0.0.

    Products are rounded once, whatever the dtype. Gradients may be on any devices; what is given is where `factor` is.
    One operation for each device and dtype, as many as there are.
    """
    found = []
    for device, lists in gradients.items():
        found_here = torch.zeros((), dtype=torch.float32, device=device)
        factor_here = moved(factor, device)
        for gradients_of_one_dtype in lists:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients_of_one_dtype, found_here, factor_here)
        found.append(moved(found_here, factor.device))
    return reduce(torch.maximum, found or [torch.zeros_like(factor)])
