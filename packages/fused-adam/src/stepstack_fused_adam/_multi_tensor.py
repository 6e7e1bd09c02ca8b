"""Apex's and Transformer Engine's multi-tensor kernels; only the capturable ones read flag and lr on the device."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

from stepstack_fused_adam import _torch
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, flat

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
    stored = run.stored
    if stored.max_exp_avg_sq is not None:
        return "amsgrad"
    if stored.param.dtype not in _PARAMS:
        return f"parameters of {stored.param.dtype}"
    if stored.remainder_high is not None:
        return "master weights as remainders"
    if grad_dtype != stored.param.dtype:
        return f"gradients of {grad_dtype} for parameters of {stored.param.dtype}"
    if stored.exp_avg.dtype != stored.exp_avg_sq.dtype or stored.exp_avg.dtype not in _MOMENTS[backend]:
        return f"moments of {stored.exp_avg.dtype} and {stored.exp_avg_sq.dtype}"
    return None


def step_of(backend: str) -> Callable[[Sequence[Run], Sequence[Tensor], Hyperparameters], None]:
    """One step of runs on one device: a call for each step tensor and set of dtypes."""
    return _APEX if backend == "apex" else _TRANSFORMER_ENGINE


def _step_(backend: str, runs: Sequence[Run], grads: Sequence[Tensor], by: Hyperparameters) -> None:
    found = kernels(backend)
    if isinstance(found, str):
        raise RuntimeError(f"the kernels of {backend} are gone: {found}")
    if any(isinstance(number, Tensor) for number in (by.beta1, by.beta2, by.weight_decay)):
        _torch.step_(runs, grads, by)  # the kernels take those as floats, for which the host would have to wait
        return
    alike: dict[object, list[tuple[Run, Tensor]]] = defaultdict(list)
    for run, grad in zip(runs, grads, strict=True):
        alike[id(run.step), run.dtypes].append((run, grad))
    device = runs[0].device
    lr, skip, inverse_scale = _on_device(by, device)
    for batch in alike.values():
        lists = [[flat(grad, run.numel) for run, grad in batch]]
        for name in ("param", "exp_avg", "exp_avg_sq", "master"):
            column = [getattr(run.flat.stored, name) for run, _ in batch]
            if column[0] is not None:
                lists.append(column)
        kernel = found[len(lists) == 5]
        step = batch[0][0].step.to(torch.int32).reshape(1)
        kernel(
            _CHUNK,
            skip,
            lists,
            lr,
            by.beta1,
            by.beta2,
            by.eps,
            step,
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


_APEX = partial(_step_, "apex")
_TRANSFORMER_ENGINE = partial(_step_, "transformer_engine")
