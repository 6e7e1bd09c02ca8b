"""Compiling ahead of the first step, on stand-ins."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepstack_fused_adam import _compiled
from stepstack_fused_adam._backends import assign
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, local
from stepstack_fused_adam._state import Precision, create, neighbours, stored

_NUMEL = 256  # of a stand-in: what is compiled is good for any size


def compile_ahead(
    params: Sequence[Tensor], precision: Precision, amsgrad: bool, backend: str, by: Hyperparameters
) -> None:
    """Compile what a step of these parameters, with a gradient each, would compile."""
    here = [local(param.detach()) for param in params]
    on_device: dict[torch.device, list[tuple[Run, torch.dtype]]] = {}
    for stretch in neighbours(here, precision):
        param = here[stretch[0]]
        numel = sum(here[index].numel() for index in stretch)
        if numel:
            run = _stand_in(numel, param.dtype, torch.device("meta"), precision, amsgrad)
            on_device.setdefault(param.device, []).append((run, _grad_dtype(params[stretch[0]])))
    for device, cases in on_device.items():
        assigned = assign(backend, device, [run for run, _ in cases], [dtype for _, dtype in cases])
        for param_dtype, grad_dtype in {
            (cases[place][0].stored.param.dtype, cases[place][1]) for place in assigned.get(_compiled.step_, [])
        }:
            run = _stand_in(_NUMEL, param_dtype, device, precision, amsgrad)
            _compiled.step_([run], [torch.zeros(_NUMEL, dtype=grad_dtype, device=device)], by.on(device))


def _stand_in(numel: int, dtype: torch.dtype, device: torch.device, precision: Precision, amsgrad: bool) -> Run:
    param = torch.zeros(numel, dtype=dtype, device=device)
    (state,) = create([param], precision, amsgrad)
    return Run(state["step"], stored(param, state))


def _grad_dtype(param: Tensor) -> torch.dtype:
    for grad in (param.grad, getattr(param, "decoupled_grad", None)):
        if grad is not None:
            return grad.dtype
    return getattr(param, "grad_dtype", None) or param.dtype
