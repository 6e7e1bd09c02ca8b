"""Which backends are here, and which of them takes which run."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from stepstack_fused_adam import _compiler, _multi_tensor, _native
from stepstack_fused_adam._compiled import CompiledStep
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._multi_tensor import KernelStep
from stepstack_fused_adam._native import NativeStep
from stepstack_fused_adam._run import Run
from stepstack_fused_adam._torch import TorchStep, takes

# What a backend is: made once for runs of equal dtypes on one device (and the dtype of their gradients), called with
# the parameters, gradients and numbers of each step.
Step = Callable[[list[Tensor], list[Tensor], Hyperparameters], None]
Backend = Callable[[Sequence[Run], torch.dtype], Step]

_KERNELS: dict[str, Backend] = {name: partial(KernelStep, name) for name in ("transformer_engine", "apex")}
_NAMES = ("torch", "native", "compiled", *_KERNELS)

# In elements. A compilation takes seconds: below the first it is not worth them, below the second the call is not.
_WORTH_COMPILING = 2**24
_WORTH_CALLING = 2**17


def backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Of each backend, None if it can be used on a device here, or why not.

    The default device is the accelerator if there is one, else the CPU.
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = torch.device(device)
    reasons = {"torch": None, "native": _native.missing(device), "compiled": _compiler.missing(device)}
    return reasons | {name: _multi_tensor.missing(name, device) for name in _KERNELS}


def check_backend(backend: str) -> None:
    """Raise ValueError unless there is one of this name."""
    if backend not in ("auto", *_NAMES):
        raise ValueError(f"backend must be one of auto, {', '.join(_NAMES)}, not {backend!r}")
    if backend in _KERNELS and isinstance(reason := _multi_tensor.kernels(backend), str):
        raise ValueError(f"backend {backend!r} is not here: {reason}. backends() tells which are")


def steps_of(backend: str, runs: Sequence[Run], grad_dtypes: Sequence[torch.dtype]) -> list[tuple[Step, list[int]]]:
    """What does a step of these runs, all on one device: steps, with the indices of the runs that each takes."""
    alike: dict[tuple[Backend, object], list[int]] = {}
    for index, chosen in enumerate(assign(backend, runs, grad_dtypes)):
        alike.setdefault((chosen, (runs[index].dtypes, grad_dtypes[index])), []).append(index)
    return [
        (chosen([runs[index] for index in indices], grad_dtypes[indices[0]]), indices)
        for (chosen, _), indices in alike.items()
    ]


def assign(backend: str, runs: Sequence[Run], grad_dtypes: Sequence[torch.dtype]) -> list[Backend]:
    """Which backend does each of the runs, all on one device."""
    cases = list(zip(runs, grad_dtypes, strict=True))
    if backend == "torch" or not runs:
        return [TorchStep] * len(runs)
    if backend == "compiled":
        return [CompiledStep] * len(runs)
    if backend in _KERNELS:
        return [_kernels(backend, *case) for case in cases]
    if backend == "native":
        return [_natively(*case) for case in cases]
    if runs[0].device.type == "cpu" and _native.is_here():
        # Where torch's kernel is one pass too, it is the faster one: its vectors are as wide as the CPU has them.
        return [TorchStep if takes(*case) or _native.refuses(*case) else NativeStep for case in cases]
    numel = sum(run.numel for run, dtype in cases if _is_for_compiler(run, dtype))
    compiles = numel >= _WORTH_COMPILING and _compiler.missing(runs[0].device) is None
    return [_automatic(*case, compiles) for case in cases]


def _automatic(run: Run, grad_dtype: torch.dtype, compiles: bool) -> Backend:
    if takes(run, grad_dtype):
        return TorchStep
    if compiles and _is_for_compiler(run, grad_dtype):
        return CompiledStep
    for name in _KERNELS:
        if _multi_tensor.loaded(name) and not _unfit(name, run, grad_dtype):
            return _KERNELS[name]
    return TorchStep


def _natively(run: Run, grad_dtype: torch.dtype) -> Backend:
    if reason := _native.missing(run.device) or _native.refuses(run, grad_dtype):
        raise ValueError(f"backend 'native' does not do this step: {reason}; backend='auto' does")
    return NativeStep


def _kernels(backend: str, run: Run, grad_dtype: torch.dtype) -> Backend:
    if reason := _unfit(backend, run, grad_dtype):
        raise ValueError(f"backend {backend!r} does not do this step: {reason}; backend='auto' does")
    return _KERNELS[backend]


def _unfit(backend: str, run: Run, grad_dtype: torch.dtype) -> str | None:
    return _multi_tensor.missing(backend, run.device) or _multi_tensor.refuses(backend, run, grad_dtype)


def _is_for_compiler(run: Run, grad_dtype: torch.dtype) -> bool:
    return run.numel >= _WORTH_CALLING and not takes(run, grad_dtype)
