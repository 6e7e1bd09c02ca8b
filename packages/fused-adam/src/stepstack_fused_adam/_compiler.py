"""The definition compiled for a case: dtypes and a device, but any sizes. And what happens where that fails."""

import os
import shutil
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stepstack_fused_adam._block8 import BLOCK
from stepstack_fused_adam._definition import Scalars, States, update_
from stepstack_fused_adam._run import arithmetic, state_sizes

SMALLEST = 2 * BLOCK  # elements: torch.compile would make cases of a single one, a single block, and a part of one


class Case(NamedTuple):
    """What a compiled function is good for: so many runs of these dtypes."""

    runs: int
    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]  # of parameter and states
    grad_dtype: torch.dtype
    decoupled: bool


_functions: dict[Case, Callable[..., None] | None] = {}


def missing(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device here, or None."""
    if device.type == "cpu":
        compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
        return None if any(name and shutil.which(name) for name in compilers) else "no C++ compiler is on the PATH"
    if device.type == "cuda":
        return None if find_spec("triton") else "triton is not installed"
    return f"it compiles for cpu and cuda, not for {device.type}"


def is_compiled(case: Case) -> bool:
    """Whether `call` would work, after compiling it if need be. If that fails there is a warning, once for a case."""
    if _get_current_dispatch_mode() is not None:  # torch.compile does nothing under a mode
        return False
    if case not in _functions:
        _attempt(case, _compile, case)
    return _functions[case] is not None


def call(
    case: Case,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[States],
    counts: Sequence[Tensor],
    by: Scalars,
) -> bool:
    """`update_` of flat tensors that are nobody's views, of at least SMALLEST elements. False if nothing was done."""
    function = _functions[case]
    return function is not None and _attempt(case, function, params, grads, states, counts, by, case.decoupled)


def _attempt(case: Case, function: Callable[..., None], *arguments: Any) -> bool:
    try:
        function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _functions[case] = None
        warnings.warn(
            f"stepstack_fused_adam: torch.compile failed on {case.device}, so the torch backend does these steps: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _compile(case: Case) -> None:
    with _quiet():
        function = _compiled(case)
        function(*_stand_ins(case))
    _functions[case] = function


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings about the compiler's insides are no reason to do without it, even where they are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _compiled(case: Case) -> Callable[..., None]:
    # torch.compile counts recompilations by code object: a case that has its own is compiled again for sizes only.
    own = types.FunctionType(_update_all_.__code__.replace(co_name="adam"), _update_all_.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def _update_all_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[States],
    counts: Sequence[Tensor],
    by: Scalars,
    decoupled: bool,
) -> None:
    if not torch.compiler.is_compiling():  # some failures are reported after the plain function has run: not this one
        raise RuntimeError("torch.compile did not compile it")
    for param, grad, its_states, count in zip(params, grads, states, counts, strict=True):
        update_(param, grad, its_states, count, by, decoupled)


def _stand_ins(case: Case) -> tuple[Any, ...]:
    """Arguments to compile for. Their sizes all differ, or it would be compiled for runs of equal size."""
    params, grads, states = [], [], []
    param_dtype, *state_dtypes = case.dtypes
    for place in range(case.runs):
        numel = SMALLEST + (place + 1) * BLOCK
        params.append(torch.zeros(numel, dtype=param_dtype, device=case.device))
        grads.append(torch.zeros(numel, dtype=case.grad_dtype, device=case.device))
        sized = zip(state_dtypes, state_sizes(numel), strict=True)
        zeros = (None if dtype is None else torch.zeros(size, dtype=dtype, device=case.device) for dtype, size in sized)
        states.append(States(*zeros))  # type: ignore[arg-type]  # None where it is in the case
    assert param_dtype is not None
    one = torch.ones((), dtype=arithmetic(param_dtype), device=case.device)
    counts = [torch.ones((), dtype=torch.float32, device=case.device) for _ in params]
    return params, grads, states, counts, Scalars(*[one.clone() for _ in Scalars._fields]), case.decoupled
