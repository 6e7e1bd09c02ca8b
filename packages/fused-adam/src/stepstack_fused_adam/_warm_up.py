"""Compiling ahead of the first step, on stand-ins."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepstack_fused_adam._backends import assign
from stepstack_fused_adam._compiled import CompiledStep
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, local, run_of
from stepstack_fused_adam._state import Precision, create, neighbours, states_here

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
            stand_in = torch.empty(numel, dtype=param.dtype, device="meta")
            case = (_run(stand_in, precision, amsgrad), _grad_dtype(params[stretch[0]]))
            on_device.setdefault(param.device, []).append(case)
    for device, cases in on_device.items():
        assigned = assign(backend, device, [run for run, _ in cases], [dtype for _, dtype in cases])
        compiled = [case for case, chosen in zip(cases, assigned, strict=True) if chosen is CompiledStep]
        for dtype, grad_dtype in {(run.dtype, grad_dtype) for run, grad_dtype in compiled}:
            param = torch.zeros(_NUMEL, dtype=dtype, device=device)
            step = CompiledStep([_run(param, precision, amsgrad)], grad_dtype)
            step([param], [torch.zeros(_NUMEL, dtype=grad_dtype, device=device)], by.on(device))


def _run(param: Tensor, precision: Precision, amsgrad: bool) -> Run:
    (state,) = create([param], precision, amsgrad)
    return run_of(param, state["step"], states_here(state))


def _grad_dtype(param: Tensor) -> torch.dtype:
    for grad in (param.grad, getattr(param, "decoupled_grad", None)):
        if grad is not None:
            return grad.dtype
    return getattr(param, "grad_dtype", None) or param.dtype
