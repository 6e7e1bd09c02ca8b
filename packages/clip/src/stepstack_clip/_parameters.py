"""What is given to be clipped: a warning where that clips nothing, by whatever mistake."""

import types
import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from stepstack_gradnorm import Part


def listed(parameters: Tensor | Iterable[Tensor], parts: Iterable[Part] = ()) -> list[Tensor]:
    """The parameters as a list. TypeError for a module; UserWarning if nothing of them, or of Parts, can be clipped."""
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters are Tensors, and a {type(parameters).__name__} was given: pass its .parameters()")
    several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if parts:
        return several
    if isinstance(parameters, types.GeneratorType) and not several:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=4)
    elif several and not any(map(_may_have_gradient, several)):
        warnings.warn(
            f"none of the {len(several)} tensors given as parameters is a Parameter, requires a gradient or has one, "
            "so nothing is clipped. If they are gradients, give the parameters, or clip by total_norm and multiply_",
            stacklevel=4,
        )
    return several


def _may_have_gradient(tensor: Tensor) -> bool:
    if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return True
    return any(getattr(tensor, name, None) is not None for name in ("grad", "grad_shard", "decoupled_grad"))
