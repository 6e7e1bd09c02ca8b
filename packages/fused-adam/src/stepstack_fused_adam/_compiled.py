"""The definition through `torch.compile` over flat runs, in one pass over memory: C++ for CPUs, Triton for GPUs."""

import os
import shutil
import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.dlpack import from_dlpack

from stepstack_fused_adam._block8 import BLOCK
from stepstack_fused_adam._definition import Scalars, States, update_
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, arithmetic, flat
from stepstack_fused_adam._torch import Tensors, TorchStep

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


class CompiledStep:
    """A step of runs of equal dtypes on one device, a call for each run. What does not compile goes through torch."""

    def __init__(self, runs: Sequence[Run], grad_dtype: torch.dtype) -> None:
        self._parts = [_compilable_parts(run) for run in runs]
        self._runs = list(chain.from_iterable(self._parts))
        self._grad_dtype = grad_dtype
        self._through_torch: dict[tuple[int, ...], TorchStep] = {}

    def __call__(self, params: Tensors, grads: Tensors, by: Hyperparameters) -> None:
        params, grads = self._cut(params), self._cut(grads)
        pieces = enumerate(zip(self._runs, params, grads, strict=True))
        left = tuple(place for place, piece in pieces if not _compiled_step_(*piece, by))
        if left:
            if left not in self._through_torch:
                self._through_torch[left] = TorchStep([self._runs[place] for place in left], self._grad_dtype)
            self._through_torch[left]([params[place] for place in left], [grads[place] for place in left], by)

    def _cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As the runs are cut."""
        cut: list[Tensor] = []
        for tensor, parts in zip(tensors, self._parts, strict=True):
            whole = flat(tensor, sum(part.numel for part in parts))
            cut += [whole] if len(parts) == 1 else whole.split_with_sizes([part.numel for part in parts])
        return cut


def _compilable_parts(run: Run) -> list[Run]:
    """All of it; or, if it is in blocks, the whole ones and what is left over."""
    whole = run.numel - run.numel % BLOCK
    return [run.flat] if run.floating or whole in (0, run.numel) else run.cut(whole)


def _compiled_step_(run: Run, param: Tensor, grad: Tensor, by: Hyperparameters) -> bool:
    case = (run.device, run.dtypes, grad.dtype, by.decoupled)
    # torch.compile would make a case of a single element, and does nothing at all under a mode.
    if case in _broken or run.numel < 2 or _get_current_dispatch_mode() is not None:
        return False
    count = run.step if by.bias_correction else torch.full_like(run.step, torch.inf)
    scalars = by.scalars(arithmetic(run.dtype), run.device)
    try:
        with warnings.catch_warnings():
            if case not in _working:
                warnings.simplefilter("ignore")  # of the compiler's insides, and no reason to do without it
            # Apart: torch.compile would make a case of every kind of view and of small offsets.
            _function(case)(from_dlpack(param), from_dlpack(grad), run.apart, count, scalars, by.decoupled)
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
def _function(case: object) -> Callable[[Tensor, Tensor, States, Tensor, Scalars, bool], None]:
    # torch.compile counts recompilations by code object: a case that has its own is compiled again for sizes only.
    own = types.FunctionType(_compiled_update_.__code__.replace(co_name="adam"), _compiled_update_.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def _compiled_update_(param: Tensor, grad: Tensor, states: States, t: Tensor, by: Scalars, decoupled: bool) -> None:
    if not torch.compiler.is_compiling():  # some failures are reported after the plain function has run: not this one
        raise RuntimeError("torch.compile did not compile it")
    update_(param, grad, states, t, by, decoupled)
