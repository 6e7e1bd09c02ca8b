"""Clipping by the norm: one number, handed to the optimizer or multiplied into the gradients."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_clip._multiply import multiply_, zero_where_
from stepstack_clip._parameters import listed
from stepstack_gradnorm import Part, grads_of, total_norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are multiplied by so that it is at most `max_norm`. Stays on the device.

        torch.where(norm > max_norm, max_norm / (norm + 1e-6), 1)

    Above `max_norm` that is what `torch.nn.utils.clip_grad_norm_` multiplies by; at or below it is exactly 1, and where
    the norm is not finite too: that such a step is to be skipped is said by a flag, not by a coefficient. `norm` has
    any shape; the result has it too, in fp32 or wider. To clip without a pass over the gradients, hand the optimizer
    `grad_scale = scale / clip_coefficient(norm, max_norm)`. ValueError if `max_norm` is negative or NaN.
    """
    max_norm = _checked(max_norm)
    norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
    return torch.where((norm > max_norm) & norm.isfinite(), max_norm / (norm + 1e-6), 1)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parts: Part | Iterable[Part] = (),
    nonfinite: Literal["keep", "zero", "raise"] | None = None,
    agree_over: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of parameters in place so that their norm is at most `max_norm`; return the norm before.

    Takes what `torch.nn.utils.clip_grad_norm_` takes, and gives the same for the gradients of one process. `foreach`
    is there for that and changes nothing. The norm is `stepstack_gradnorm.total_norm` of the gradients: a plain 0-d
    tensor, fp32 (fp64 if a gradient is), also for DTensors, the same on every rank of their mesh.

    `parameters`: a tensor or an iterable; one without a gradient is skipped, one whose gradient is in `grad_shard` (in
    the hands of a sharded optimizer) or in `decoupled_grad` is followed there, one that occurs twice is scaled once.
    `parts`: a Part or Parts of *parameters*, for those that ranks hold different pieces of. One that `parameters` has
    too counts in its Part.
    `nonfinite`: what happens if the norm is not finite. "keep" (default) leaves the gradients as they are, "zero" makes
    all of them zero, "raise" raises RuntimeError, on all ranks alike since it comes after the reduction; to do so the
    host reads the norm, the one sync here. `error_if_nonfinite=True` is "raise".
    `agree_over`: as in `total_norm`.

    At or below `max_norm` no bit of a gradient changes. All ranks that share a reduction call it. ValueError if
    `max_norm` is negative or NaN, before anything is touched; TypeError for a module, or named parameters. UserWarning
    for an empty generator, and for tensors of which none could have a gradient, as gradients.
    """
    max_norm = _checked(max_norm)
    policy = _policy(nonfinite, error_if_nonfinite)
    parts = [_checked_part(part) for part in ((parts,) if isinstance(parts, Part) else parts)]
    in_parts = {id(parameter) for part in parts for parameter in part.tensors}
    grads: list[Tensor | Part] = [_of_grads(part) for part in parts]
    grads += grads_of(parameter for parameter in listed(parameters, parts) if id(parameter) not in in_parts)
    norm = total_norm(grads, norm_type, agree_over=agree_over)
    if policy == "raise" and not norm.isfinite():  # waits for the device: the host can raise only what it knows
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            f'be clipped: it is {norm.item()}. The gradients are untouched; nonfinite="keep" goes on with them as they '
            'are, nonfinite="zero" with zeros'
        )
    if policy == "zero":
        zero_where_(grads, ~norm.isfinite())
    multiply_(grads, clip_coefficient(norm, max_norm))
    return norm


def _checked_part(part: Part) -> Part:
    if not isinstance(part, Part):
        raise TypeError(f"parts is an iterable of Parts, not of {type(part).__name__}: {str(part)[:60]}")
    return part


def _of_grads(part: Part) -> Part:
    # One that is empty says all there is to say, also on a rank outside of its groups.
    return Part(grads_of(part.tensors), part.sharded_over) if part.tensors else part


def _checked(max_norm: float) -> float:
    if isinstance(max_norm, Tensor):
        raise TypeError("max_norm is a number: a tensor would have to be read to be checked")
    max_norm = float(max_norm)
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm is 0 or more, not {max_norm}")
    return max_norm


def _policy(nonfinite: str | None, error_if_nonfinite: bool) -> str:
    if nonfinite not in (None, "keep", "zero", "raise"):
        raise ValueError(f'nonfinite is "keep", "zero" or "raise", not {nonfinite!r}')
    if error_if_nonfinite and nonfinite not in (None, "raise"):
        raise ValueError(f'error_if_nonfinite=True is nonfinite="raise", but nonfinite={nonfinite!r} was given too')
    return nonfinite or ("raise" if error_if_nonfinite else "keep")
