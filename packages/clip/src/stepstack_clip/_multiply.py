"""What clipping does to gradients in place, without a host sync and without an operation for each tensor."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_clip._scale import check_backend, scale_for
from stepstack_gradnorm import Grads, local_runs


@torch.no_grad()
def multiply_(grads: Grads, factor: Tensor | float, *, backend: str = "auto") -> None:
    """Multiply gradients in place by one number, as it is: on the device, in fp32 or wider, rounded once.

    `grads`: any mix of tensors, DTensors and Parts, as in `total_norm`; what is given twice is multiplied once, and of
    an expanded tensor each element that exists. `factor`: a number or a tensor of one element; 1 changes no bit.
    `backend`: "torch", or "apex" or "transformer_engine" for their multi-tensor kernels (on cuda, for fp32, bf16 and
    fp16; Apex has them for a factor that is a number only). "auto" takes kernels that the program has loaded.

    Nothing is communicated. No host sync, unless a factor on another device has to come to a gradient on the CPU.
    """
    check_backend(backend)
    if isinstance(factor, DTensor):
        factor = factor.full_tensor()
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            raise ValueError(f"the factor is a number or a tensor of one element, not of shape {tuple(factor.shape)}")
        factor = factor.detach().reshape(())
    places = local_runs(grads)
    scales = [scale_for(backend, device, dtype, factor) for device, dtype in places]
    for (device, dtype), runs, scale_ in zip(places, places.values(), scales, strict=True):
        by = factor
        if isinstance(by, Tensor):
            if device.type != "cpu" and dtype.itemsize <= 4:  # torch has one kernel there for factors of no wider dtype
                by = by.float()
            by = by.to(device, non_blocking=device.type != "cpu")
        scale_(runs, by)


@torch.no_grad()
def zero_where_(grads: Grads, condition: Tensor) -> None:
    """Make gradients zero, whatever is in them, if the 0-d condition holds."""
    for (device, dtype), runs in local_runs(grads).items():
        here = condition.to(device, non_blocking=device.type != "cpu")
        for run in runs:
            (run.view(torch.uint8) if dtype.itemsize == 1 else run).masked_fill_(here, 0)
