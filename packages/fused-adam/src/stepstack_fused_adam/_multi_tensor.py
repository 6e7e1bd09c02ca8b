"""Apex's and Transformer Engine's multi-tensor kernels; only the capturable ones read flag and lr on the device."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, flat
from stepstack_fused_adam._torch import Tensors, TorchStep

# By backend: what to import, the last of which has the kernels, and the dtypes of moments that those take.
_MODULES = {"apex": ("amp_C",), "transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch")}
_MOMENTS = {"apex": (torch.float32,), "transformer_engine": (torch.float32, torch.bfloat16)}
_PARAMS = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK = 2048 * 32  # the elements that one block of threads does, as both libraries call their kernels

Kernel = Callable[..., None]


@cache
def kernels(backend: str) -> tuple[Kernel, Kernel] | str:
    """The kernels without and with master weights, or why they are not here."""
    try:
        for name in _MODULES[backend]:
            module = import_module(name)
    except Exception as error:  # the import of a package that is only half there raises anything
        return f"{type(error).__name__}: {error}"
    try:
        return module.multi_tensor_adam_capturable, module.multi_tensor_adam_capturable_master
    except AttributeError as error:
        return str(error)


def loaded(backend: str) -> bool:
    """Whether the program has imported what a backend needs; that can take seconds."""
    return all(name in sys.modules for name in _MODULES[backend])


def missing(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot be used on a device here, or None."""
    if device.type != "cuda":
        return f"its kernels are for cuda, not for {device.type}"
    found = kernels(backend)
    return found if isinstance(found, str) else None


def refuses(backend: str, run: Run, grad_dtype: torch.dtype) -> str | None:
    """What about a run the kernels of a backend do not do, or None."""
    states = run.states
    if states.max_exp_avg_sq is not None:
        return "amsgrad"
    if run.dtype not in _PARAMS:
        return f"parameters of {run.dtype}"
    if states.remainder_high is not None:
        return "master weights as remainders"
    if grad_dtype != run.dtype:
        return f"gradients of {grad_dtype} for parameters of {run.dtype}"
    if states.exp_avg.dtype != states.exp_avg_sq.dtype or states.exp_avg.dtype not in _MOMENTS[backend]:
        return f"moments of {states.exp_avg.dtype} and {states.exp_avg_sq.dtype}"
    return None


class KernelStep:
    """A step of runs of equal dtypes on one device, a call for each step tensor.

    Numbers in tensors, which the kernels do not read, go through torch.
    """

    def __init__(self, backend: str, runs: Sequence[Run], grad_dtype: torch.dtype) -> None:
        found = kernels(backend)
        if isinstance(found, str):
            raise RuntimeError(f"the kernels of {backend} are gone: {found}")
        names = ["exp_avg", "exp_avg_sq", "master"][: 2 if runs[0].states.master is None else 3]
        self._kernel = found[len(names) == 3]
        self._runs = runs
        self._through_torch = TorchStep(runs, grad_dtype)
        counted_alike: dict[int, list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            counted_alike[id(run.step)].append(index)
        self._calls = [
            (indices, [[getattr(runs[index].flat.states, name) for index in indices] for name in names])
            for indices in counted_alike.values()
        ]

    def __call__(self, params: Tensors, grads: Tensors, by: Hyperparameters) -> None:
        if by.any_tensors:
            self._through_torch(params, grads, by)
            return
        lr, skip, inverse_scale = _on_device(by, self._runs[0].device)
        for indices, states in self._calls:
            flats = [
                [flat(tensors[index], self._runs[index].numel) for index in indices] for tensors in (grads, params)
            ]
            self._kernel(
                _CHUNK,
                skip,
                [*flats, *states],
                lr,
                by.beta1,
                by.beta2,
                by.eps,
                self._runs[indices[0]].step.to(torch.int32).reshape(1),
                int(by.decoupled),
                int(by.bias_correction),
                by.weight_decay,
                inverse_scale,
            )


def _on_device(by: Hyperparameters, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """lr (fp32), the flag (int32, 1 to skip) and the factor of the gradients (fp32), one element each."""
    scalars = by.scalars(torch.float32, device)
    skip = scalars.skip.to(torch.int32).reshape(1)
    return scalars.lr.reshape(1), skip, scalars.divisor.double().reciprocal().float().reshape(1)
