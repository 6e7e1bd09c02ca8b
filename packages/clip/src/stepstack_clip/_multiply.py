"""What clipping does to gradients in place, without a host sync and without an operation for each tensor."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_gradnorm import Grads, local_runs


@torch.no_grad()
def multiply_(grads: Grads, factor: Tensor | float) -> None:
    """Multiply gradients in place by one number, as it is: on the device, in fp32 or wider, rounded once.

    `grads`: any mix of tensors, DTensors and Parts, as in `total_norm`; what is given twice is multiplied once, an
    expanded tensor element by element of what it is expanded from. `factor`: a number or a tensor of one element.
    A factor of exactly 1 changes no bit. Nothing is communicated. No host sync, unless a factor on another device has
    to come to a gradient on the CPU.
    """
    if isinstance(factor, DTensor):
        factor = factor.full_tensor()
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            raise ValueError(f"the factor is a number or a tensor of one element, not of shape {tuple(factor.shape)}")
        factor = factor.reshape(())
    for (device, dtype), runs in local_runs(grads).items():
        by = factor.to(device, non_blocking=device.type != "cpu") if isinstance(factor, Tensor) else factor
        if dtype.itemsize == 1:  # fp8 has no arithmetic of its own
            for run in runs:
                run.copy_(run.float().mul_(by))
        else:
            torch._foreach_mul_(runs, by)


@torch.no_grad()
def zero_where_(grads: Grads, condition: Tensor) -> None:
    """Make gradients zero, whatever is in them, if the 0-d condition holds."""
    for (device, dtype), runs in local_runs(grads).items():
        here = condition.to(device, non_blocking=device.type != "cpu")
        for run in runs:
            (run.view(torch.uint8) if dtype.itemsize == 1 else run).masked_fill_(here, 0)
