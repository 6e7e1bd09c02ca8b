"""The definition through `torch.compile` over flat runs, in one pass over memory: C++ for CPUs, Triton for GPUs."""

import os
import shutil
import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.dlpack import from_dlpack

from stepstack_fused_adam import _torch
from stepstack_fused_adam._definition import update_
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, arithmetic, flat

_broken: set[object] = set()
_working: set[object] = set()


def missing(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device here, or None."""
    if device.type == "cpu":
        compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
        return None if any(name and shutil.which(name) for name in compilers) else "no C++ compiler is on the PATH"
    if device.type == "cuda":
        return None if find_spec("triton") else "triton is not installed"
    return f"it compiles for cpu and cuda, not for {device.type}"


def step_(runs: Sequence[Run], grads: Sequence[Tensor], by: Hyperparameters) -> None:
    """One step of runs on one device. What does not compile goes to torch, with one warning."""
    left = [
        (run, grad)
        for run, grad in zip(runs, grads, strict=True)
        if run.numel < 2 or not _compiled_step_(run, grad, by)  # torch.compile would specialise for one element
    ]
    if left:
        _torch.step_([run for run, _ in left], [grad for _, grad in left], by)


def _compiled_step_(run: Run, grad: Tensor, by: Hyperparameters) -> bool:
    tensors = (run.param, grad, run.exp_avg, run.exp_avg_sq, run.max_exp_avg_sq, run.master)
    device = run.param.device
    case = (device, by.decoupled, *(None if tensor is None else tensor.dtype for tensor in tensors))
    if case in _broken or _get_current_dispatch_mode() is not None:  # torch.compile does nothing under a mode
        return False
    apart = [None if tensor is None else _apart(flat(tensor, run.numel)) for tensor in tensors]
    scalars = by.scalars(arithmetic(run.weight.dtype), device)
    try:
        with warnings.catch_warnings():
            if case not in _working:
                warnings.simplefilter("ignore")  # of the compiler's insides, and no reason to do without it
            _function(case)(*apart, run.step, scalars, by.decoupled)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _broken.add(case)
        warnings.warn(
            f"stepstack_fused_adam: torch.compile failed on {device}, so the torch backend does these steps: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    _working.add(case)
    return True


def _apart(tensor: Tensor) -> Tensor:
    # The same memory as a tensor that is no view: torch.compile makes a case of every kind of view and offset.
    return from_dlpack(tensor)


@cache
def _function(case: object) -> Callable[..., None]:
    # torch.compile counts recompilations by code object: a case that has its own is compiled again for sizes only.
    own = types.FunctionType(_compiled_update_.__code__.replace(co_name="adam"), _compiled_update_.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def _compiled_update_(*arguments: Any) -> None:
    if not torch.compiler.is_compiling():  # some failures are reported after the plain function has run: not this one
        raise RuntimeError("torch.compile did not compile it")
    update_(*arguments)
