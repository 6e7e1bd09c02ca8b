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


def layers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and, if it is a trainer's wrapper, those inside. The last one steps, of the same parameters.

    A wrapper may have copies of its attributes, the flag among them, and what is set on it is read by nobody.
    """
    wrapped = [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer) and value is not optimizer and _ids(value) == _ids(optimizer)
    ]
    return [optimizer, *(layers(wrapped[0]) if wrapped else ())]


def has_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps the contract itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def step_by_contract(
    optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None, args: Any, kwargs: Any
) -> float | None:
    """`optimizer.step(*args, **kwargs)` under the contract, also for an optimizer that does not keep it itself.

    Of a wrapper, the optimizer inside is told, and the wrapper's step called.
    None means 1 for `grad_scale` and 0 for `found_inf`. An optimizer without the flag that must not step is not
    called, which takes one wait for the device; the result is None then.
    """
    step: Callable[..., float | None] = optimizer.step
    told: Any = layers(optimizer)[-1]
    if grad_scale is None and found_inf is None:
        return step(*args, **kwargs)
    if has_flag(told):
        told.grad_scale = grad_scale
        told.found_inf = torch.zeros_like(grad_scale) if found_inf is None else found_inf  # type: ignore[arg-type]
        try:
            return step(*args, **kwargs)
        finally:
            vars(told).pop("grad_scale", None)
            vars(told).pop("found_inf", None)
    if grad_scale is not None:
        multiply_and_check_(local_gradients(told), reciprocal(grad_scale))
    if found_inf is not None and found_inf.item():  # the wait: whether to call it is decided here
        return None
    return step(*args, **kwargs)


def take_contract(optimizer: Optimizer, device: torch.device | None) -> tuple[Tensor | None, Tensor | None]:
    """The `grad_scale` and `found_inf` that somebody set for the next step. They are gone from the optimizer then.

    Of a wrapper they may be on the optimizer inside; ValueError if both have one, and another.
    """
    found: dict[str, Tensor | None] = {}
    for name in ("grad_scale", "found_inf"):
        given = {id(value): value for one in layers(optimizer) if (value := vars(one).get(name)) is not None}
        if len(given) > 1:
            raise ValueError(
                f"{name} is set on a {type(optimizer).__name__} and, to something else, on the optimizer inside it: "
                "which one counts? Set it on one of them"
            )
        found[name] = scalar(next(iter(given.values())), device) if given else None
    for one in layers(optimizer):
        for name in found:
            vars(one).pop(name, None)
    return found["grad_scale"], found["found_inf"]


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


def _ids(optimizer: Optimizer) -> list[int]:
    # Not `param_groups` itself, of which a wrapper may have a copy, and which a load puts others into the place of.
    return [id(param) for group in optimizer.param_groups for param in group["params"]]
