"""Gradients divided by the loss scale, and what a scaler wants to know of it."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def unscale_(grads: Iterable[Tensor], inv_scale: Tensor) -> Tensor:
    """Multiply what this rank holds of gradients, in place; 1.0 if an element was not finite before, else 0.0."""
    lists: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local.numel():
            lists.setdefault(local.dtype, []).append(local)
    found_inf = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
    for of_one_dtype in lists.values():
        torch._amp_foreach_non_finite_check_and_unscale_(of_one_dtype, found_inf, inv_scale)
    return found_inf


def agree_on(found_inf: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    """The maximum over the ranks of all groups, left in it. Collective."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
    return found_inf


def inverse_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """1 / scale, rounded once, on the device. RuntimeError where the scaler has scaled nothing yet."""
    if scaler._scale is None:
        raise RuntimeError("unscale_grads needs a scaler that has scaled a loss: call scaler.scale(loss) before")
    return scaler._scale.double().reciprocal().to(device, torch.float32, non_blocking=device.type != "cpu")


def check_stage(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """RuntimeError where the scaler's part of this iteration is over, as its own `unscale_` has it."""
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage is not OptState.READY:
        raise RuntimeError(
            "unscale_grads() has already been called, or the optimizer has stepped, since the scaler's last update()"
        )


def tell_scaler(scaler: torch.amp.GradScaler, optimizer: Any, found_inf: Tensor) -> None:
    """Let the scaler know that this optimizer's gradients are unscaled, as its own `unscale_` notes it."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, {found_inf.device: found_inf}
