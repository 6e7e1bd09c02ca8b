"""Compiling ahead of the first step."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from stepstack_fused_adam._backends import steps_of
from stepstack_fused_adam._compiled import CompiledStep
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, local
from stepstack_fused_adam._state import Precision, create, neighbours, states_here


def compile_ahead(
    params: Sequence[Tensor], precision: Precision, amsgrad: bool, backend: str, by: Hyperparameters
) -> None:
    """Compile what a step of these parameters, with a gradient each, would compile; on stand-ins without memory."""
    here = [local(param.detach()) for param in params]
    on_device: dict[torch.device, list[tuple[Run, torch.dtype]]] = defaultdict(list)
    for stretch in neighbours(here, precision):
        first = here[stretch[0]]
        shape = torch.empty(sum(here[index].numel() for index in stretch), dtype=first.dtype, device="meta")
        (state,) = create([shape], precision, amsgrad)
        run = Run(shape, first.device, state["step"], states_here(state))
        if run.numel:
            on_device[first.device].append((run, _grad_dtype(params[stretch[0]])))
    for cases in on_device.values():
        for step, _ in steps_of(backend, [run for run, _ in cases], [dtype for _, dtype in cases]):
            if isinstance(step, CompiledStep):
                step.compile(by)


def _grad_dtype(param: Tensor) -> torch.dtype:
    for grad in (param.grad, getattr(param, "decoupled_grad", None)):
        if grad is not None:
            return grad.dtype
    return getattr(param, "grad_dtype", None) or param.dtype
