"""The definition through `torch.compile` over flat runs, in one pass over memory: C++ for CPUs, Triton for GPUs."""

import os
import shutil
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.dlpack import from_dlpack

from stepstack_fused_adam import _torch
from stepstack_fused_adam._block8 import BLOCK
from stepstack_fused_adam._definition import Scalars, Stored, update_
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
        for whole, whole_grad in zip(runs, grads, strict=True)
        for run, grad in _in_blocks(whole, whole_grad)
        if run.numel < 2 or not _compiled_step_(run, grad, by)  # torch.compile would specialise for one element
    ]
    if left:
        _torch.step_([run for run, _ in left], [grad for _, grad in left], by)


def _in_blocks(run: Run, grad: Tensor) -> Iterator[tuple[Run, Tensor]]:
    """Whole blocks, and apart from them what is left over."""
    whole = run.numel - run.numel % BLOCK
    if run.floating or whole in (0, run.numel):
        yield run, grad
    else:
        yield from zip(run.cut(whole), flat(grad, run.numel).split_with_sizes([whole, run.numel - whole]), strict=True)


def _compiled_step_(run: Run, grad: Tensor, by: Hyperparameters) -> bool:
    case = (run.device, run.dtypes, grad.dtype, by.decoupled)
    if case in _broken or _get_current_dispatch_mode() is not None:  # torch.compile does nothing under a mode
        return False
    count = run.step if by.bias_correction else torch.full_like(run.step, torch.inf)
    scalars = by.scalars(arithmetic(run.stored.param.dtype), run.device)
    try:
        with warnings.catch_warnings():
            if case not in _working:
                warnings.simplefilter("ignore")  # of the compiler's insides, and no reason to do without it
            # Apart: torch.compile would make a case of every kind of view and of small offsets.
            _function(case)(run.apart, from_dlpack(flat(grad, run.numel)), count, scalars, by.decoupled)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _broken.add(case)
        warnings.warn(
            f"stepstack_fused_adam: torch.compile failed on {run.device}, so the torch backend does these steps: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    _working.add(case)
    return True


@cache
def _function(case: object) -> Callable[[Stored, Tensor, Tensor, Scalars, bool], None]:
    # torch.compile counts recompilations by code object: a case that has its own is compiled again for sizes only.
    own = types.FunctionType(_compiled_update_.__code__.replace(co_name="adam"), _compiled_update_.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def _compiled_update_(stored: Stored, grad: Tensor, t: Tensor, by: Scalars, decoupled: bool) -> None:
    if not torch.compiler.is_compiling():  # some failures are reported after the plain function has run: not this one
        raise RuntimeError("torch.compile did not compile it")
    update_(stored, grad, t, by, decoupled)
