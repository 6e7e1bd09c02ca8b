"""torch's contract for a step that is decided on the device: `grad_scale` and `found_inf`, set on the optimizer.

Both are 0-d fp32 tensors. Gradients are divided by `grad_scale`, and nothing changes if `found_inf` is 1. An optimizer
with the flag `_step_supports_amp_scaling` does that in its own kernels.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stepstack_grad_scaler._devices import moved
from stepstack_grad_scaler._gradients import local_gradients, multiply_and_check_


def has_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps the contract itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def step_by_contract(
    optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None, args: Any, kwargs: Any
) -> float | None:
    """`optimizer.step(*args, **kwargs)` under the contract, also for an optimizer that does not keep it itself.

    None means 1 for `grad_scale` and 0 for `found_inf`. An optimizer without the flag that must not step is not
    called, which takes one wait for the device; the result is None then.
    """
    step: Callable[..., float | None] = optimizer.step
    if grad_scale is None and found_inf is None:
        return step(*args, **kwargs)
    if has_flag(optimizer):
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros_like(grad_scale) if found_inf is None else found_inf  # type: ignore
        try:
            return step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    if grad_scale is not None:
        multiply_and_check_(local_gradients(optimizer), reciprocal(grad_scale))
    if found_inf is not None and found_inf.item():  # the wait: whether to call it is decided here
        return None
    return step(*args, **kwargs)


def take_contract(optimizer: Optimizer, device: torch.device | None) -> tuple[Tensor | None, Tensor | None]:
    """The `grad_scale` and `found_inf` that somebody set for the next step. They are gone from the optimizer then."""
    given = [optimizer.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")]
    grad_scale, found_inf = (None if value is None else scalar(value, device) for value in given)
    return grad_scale, found_inf


def cannot_divide(grad_scale: Tensor) -> Tensor:
    """Whether the 0-d tensor is 0 or not finite, so that quotients by it are worth nothing; a 0-d bool."""
    return grad_scale / grad_scale != 1


def any_set(flags: Iterable[Tensor | bool], device: torch.device) -> Tensor:
    """Whether one of these scalars, at least one, is not 0 (NaN is not): a 0-d bool on the device."""
    return reduce(torch.logical_or, [scalar(flag, device) != 0 for flag in flags])


def scalar(value: Tensor | float, device: torch.device | None) -> Tensor:
    """A number, or a tensor of one element, as a 0-d fp32 tensor on the device; None leaves a tensor where it is."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    if value.numel() != 1:
        raise ValueError(f"expected a number or a tensor of one element, got one of shape {tuple(value.shape)}")
    if isinstance(value, DTensor):
        value = value.full_tensor()
    value = value.detach().reshape(()).float()
    return value if device is None else moved(value, device)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, rounded once."""
    # As torch does it: fp32 division is not exact under every compiler. Apple's GPUs have no fp64.
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
