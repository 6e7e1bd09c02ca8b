"""The backend for CPUs: adam.c, one pass over memory in every form that the definition has."""

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepstack_fused_adam import _library
from stepstack_fused_adam._definition import Scalars, States
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run
from stepstack_fused_adam._torch import Tensors

_SOURCE = Path(__file__).with_name("adam.c")
_NONE, _CODES, _REMAINDER = 0, 4, 5
_FORMS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_WORTH_A_THREAD = 2**18  # elements: to make a thread costs some ten microseconds, to step these a few hundred

_CPU = torch.device("cpu")

_Form = ctypes.c_int32 * 7
_Floats = ctypes.c_float * len(Scalars._fields)
_Scalars = ctypes.c_void_p * len(Scalars._fields)  # adam.c takes the last, the flag, by itself
_FLAG = Scalars._fields.index("skip")


class _Run(ctypes.Structure):
    """As adam.c has it: addresses, of which a step fills in the first two, and the number of elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")),
        *((name, ctypes.c_void_p) for name in ("remainder_high", "remainder_low", "exp_avg_scale", "exp_avg_sq_scale")),
        ("step", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
    )


def missing(device: torch.device) -> str | None:
    """Why it can't be used on a device here, or None. Compiles nothing."""
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    found = _loaded() if _loaded.cache_info().currsize else _library.missing(_SOURCE)
    return found if isinstance(found, str) else None


def refuses(run: Run, grad_dtype: torch.dtype) -> str | None:
    """What about a run it does not do, or None."""
    for what, dtype in (("parameters", run.dtype), ("gradients", grad_dtype)):
        if dtype not in _FORMS:
            return f"{what} of {dtype}"
    return None


def is_here() -> bool:
    """Whether the library could be loaded, after compiling it if need be. If not, there is a warning, once."""
    return not isinstance(_loaded(), str)


class NativeStep:
    """A step of runs of equal dtypes on the CPU, in one call of C."""

    def __init__(self, runs: Sequence[Run], grad_dtype: torch.dtype) -> None:
        library = _loaded()
        if isinstance(library, str):
            raise RuntimeError(f"adam.c is not here: {library}")
        self._library = library
        self._states = [run.flat.states for run in runs]  # to be kept as long as their addresses
        self._steps = [run.step for run in runs]
        self._runs = (_Run * len(runs))(*map(_run, self._states, runs))
        self._never = torch.full((), torch.inf)
        self._forms = {decoupled: _form(runs[0], grad_dtype, decoupled) for decoupled in (False, True)}
        self._params, self._grads = _Addresses(len(runs)), _Addresses(len(runs))
        self._scalars = _Addressed()
        self._count = ctypes.c_int64(len(runs))
        self._numel = sum(run.numel for run in runs)
        self._corrected: bool | None = None

    def __call__(self, params: Tensors, grads: Tensors, by: Hyperparameters) -> None:
        if by.bias_correction != self._corrected:
            for place, step in enumerate(self._steps):
                self._runs[place].step = (step if by.bias_correction else self._never).data_ptr()
            self._corrected = by.bias_correction
        scalars = self._scalars.of(by)
        failed = self._library.stepstack_adam(
            self._forms[by.decoupled],
            self._runs,
            self._params.of(params),
            self._grads.of(grads),
            self._count,
            scalars,
            ctypes.c_void_p(scalars[_FLAG]),
            ctypes.c_int(min(torch.get_num_threads(), max(1, self._numel // _WORTH_A_THREAD))),
        )
        if failed:
            raise MemoryError(f"no memory to list {self._count.value} runs of parameters")


class _Addresses:
    """Where tensors are, for C. Made anew when one of them has moved."""

    def __init__(self, number: int) -> None:
        self._made = ctypes.c_void_p * number
        self._found: list[int] = []

    def of(self, tensors: Tensors) -> Any:
        found = list(map(Tensor.data_ptr, tensors))
        if found != self._found:
            self._found, self._array = found, self._made(*found)
        return self._array


class _Addressed:
    """Where the numbers of a step are, for C: floats in an array of its own, tensors in their own memory."""

    def __init__(self) -> None:
        self._floats = _Floats()
        first = ctypes.addressof(self._floats)
        self._places = [first + ctypes.sizeof(ctypes.c_float) * place for place in range(len(self._floats))]
        self._array = _Scalars(*self._places)
        self._by: Hyperparameters | None = None

    def of(self, by: Hyperparameters) -> Any:
        """Good until the next call: C has read them when it returns."""
        if by is self._by:
            return self._array
        numbers = self._kept = by.numbers(torch.float32, _CPU)
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                self._array[place] = number.data_ptr()
            else:
                self._floats[place] = number
                self._array[place] = self._places[place]
        self._by = by if by.all_on_host else None  # a tensor may have been moved here from elsewhere: a copy of then
        return self._array


@cache
def _loaded() -> ctypes.CDLL | str:
    found = _library.load(_SOURCE)
    if isinstance(found, str):
        warnings.warn(
            f"stepstack_fused_adam: adam.c can't be used, so the slower torch backend steps on CPUs: {found}",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _run(states: States, run: Run) -> _Run:
    named = {name: None if tensor is None else tensor.data_ptr() for name, tensor in states._asdict().items()}
    return _Run(**named, step=run.step.data_ptr(), numel=run.numel)


def _form(run: Run, grad_dtype: torch.dtype, decoupled: bool) -> Any:
    states = run.states

    def of(tensor: Tensor | None, scale: Tensor | None = None) -> int:
        if scale is not None:
            return _CODES
        return _NONE if tensor is None else _FORMS[tensor.dtype]

    return _Form(
        _FORMS[run.dtype],
        _FORMS[grad_dtype],
        of(states.exp_avg, states.exp_avg_scale),
        of(states.exp_avg_sq, states.exp_avg_sq_scale),
        of(states.max_exp_avg_sq),
        _REMAINDER if states.remainder_high is not None else of(states.master),
        decoupled,
    )
