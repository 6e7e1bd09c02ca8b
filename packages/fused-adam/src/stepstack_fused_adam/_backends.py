"""Which backends are here, and which of them takes which run."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepstack_fused_adam import _compiled, _multi_tensor, _torch
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run

Step = Callable[[Sequence[Run], Sequence[Tensor], Hyperparameters], None]

_KERNELS = ("transformer_engine", "apex")
_NAMES = ("torch", "compiled", *_KERNELS)

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
    reasons = {"torch": None, "compiled": _compiled.missing(device)}
    return reasons | {name: _multi_tensor.missing(name, device) for name in _KERNELS}


def check_backend(backend: str) -> None:
    """Raise ValueError unless there is one of this name."""
    if backend not in ("auto", *_NAMES):
        raise ValueError(f"backend must be one of auto, {', '.join(_NAMES)}, not {backend!r}")
    if backend in _KERNELS and isinstance(reason := _multi_tensor.kernels(backend), str):
        raise ValueError(f"backend {backend!r} is not here: {reason}. backends() tells which are")


def assign(
    backend: str, device: torch.device, runs: Sequence[Run], grad_dtypes: Sequence[torch.dtype]
) -> dict[Step, list[int]]:
    """The indices of the runs, all on one device, that each backend's step takes."""
    compiles = _is_worth_compiling(device, runs, grad_dtypes) if backend == "auto" else backend == "compiled"
    assigned: dict[Step, list[int]] = {}
    for index, (run, dtype) in enumerate(zip(runs, grad_dtypes, strict=True)):
        if backend == "auto":
            step = _automatic(device, run, dtype, compiles)
        elif backend in _KERNELS:
            step = _kernels(backend, device, run, dtype)
        else:
            step = _compiled.step_ if compiles else _torch.step_
        assigned.setdefault(step, []).append(index)
    return assigned


def _automatic(device: torch.device, run: Run, grad_dtype: torch.dtype, compiles: bool) -> Step:
    if compiles and _is_for_compiler(run, grad_dtype):
        return _compiled.step_
    if not _torch.takes(run, grad_dtype):
        for name in _KERNELS:
            if _multi_tensor.loaded(name) and not _unfit(name, device, run, grad_dtype):
                return _multi_tensor.step_of(name)
    return _torch.step_


def _kernels(backend: str, device: torch.device, run: Run, grad_dtype: torch.dtype) -> Step:
    if reason := _unfit(backend, device, run, grad_dtype):
        raise ValueError(f"backend {backend!r} does not do this step: {reason}; backend='auto' does")
    return _multi_tensor.step_of(backend)


def _unfit(backend: str, device: torch.device, run: Run, grad_dtype: torch.dtype) -> str | None:
    return _multi_tensor.missing(backend, device) or _multi_tensor.refuses(backend, run, grad_dtype)


def _is_worth_compiling(device: torch.device, runs: Sequence[Run], grad_dtypes: Sequence[torch.dtype]) -> bool:
    large = [run for run, dtype in zip(runs, grad_dtypes, strict=True) if _is_for_compiler(run, dtype)]
    return sum(run.numel for run in large) >= _WORTH_COMPILING and _compiled.missing(device) is None


def _is_for_compiler(run: Run, grad_dtype: torch.dtype) -> bool:
    return run.numel >= _WORTH_CALLING and not _torch.takes(run, grad_dtype)
