"""Which backends are here, and which of them takes which tensors."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stepstack_gradnorm import _multi_tensor, _native, _torch
from stepstack_gradnorm._torch import flat

SumsOfSquares = Callable[[list[list[Tensor]]], Tensor]

_KERNELS = ("transformer_engine", "apex")
_NAMES = ("torch", "native", *_KERNELS)
_WORTH_LOADING = 2**20  # elements; where the library is to be compiled first, half a second, once


def backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Of each backend of `total_norm`, None if it can be used on a device here, or why not.

    The default device is the accelerator if there is one, else the CPU. `backend="auto"` is "torch", but "native" for
    a million elements and more of fp32, bf16 or fp16 on the CPU, and for fp16 on cuda the kernels that the program has
    loaded: there, and only there, they are as exact.
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = torch.device(device)
    reasons = {"torch": None, "native": _native.missing(device)}
    return reasons | {name: _multi_tensor.missing(name, device) for name in _KERNELS}


def check_backend(backend: str, norm_type: float) -> None:
    """Raise ValueError unless there is one of this name, for this norm."""
    if backend not in ("auto", *_NAMES):
        raise ValueError(f"backend is one of auto, {', '.join(_NAMES)}, not {backend!r}")
    if backend not in ("auto", "torch") and norm_type != 2:
        raise ValueError(f"backend {backend!r} is for norm_type=2, not for {norm_type}; backend='auto' does any")
    if backend in _KERNELS and isinstance(reason := _multi_tensor.kernels(backend), str):
        raise ValueError(f"backend {backend!r} is not here: {reason}. backends() tells which are")


def sums_of_squares(backend: str, lists: list[list[Tensor]]) -> Tensor:
    """Σx² of each list, stacked, in fp64. The tensors are real, on one device, of one dtype, and none is empty."""
    first = flat(lists)[0]
    if backend == "auto":
        return _automatic(lists, first.device, first.dtype)(lists)
    if backend == "torch":
        return _torch.sums_of_squares(lists)
    check_takes(backend, first)
    if backend == "native":
        return _native.sums_of_squares(lists)
    return _multi_tensor.sums_of_squares(backend, lists)


def check_takes(backend: str, tensor: Tensor) -> None:
    """Raise ValueError if a backend that is asked for does not measure real tensors of this device and dtype."""
    if backend in ("auto", "torch"):
        return
    if backend == "native":
        reason = _native.missing(tensor.device) or _native.refuses(tensor.dtype) or _native.failure()
    else:
        reason = _multi_tensor.missing(backend, tensor.device) or _multi_tensor.refuses(tensor.dtype)
    if reason:
        raise ValueError(f"backend {backend!r} does not measure these gradients: {reason}; backend='auto' does")


def _automatic(lists: list[list[Tensor]], device: torch.device, dtype: torch.dtype) -> SumsOfSquares:
    if device.type == "cpu":
        if torch.compiler.is_compiling() or _native.refuses(dtype) or _native.missing(device):
            return _torch.sums_of_squares
        is_large = sum(map(Tensor.numel, flat(lists))) >= _WORTH_LOADING
        return _native.sums_of_squares if is_large and _native.is_here() else _torch.sums_of_squares
    if _multi_tensor.is_exact(dtype):
        for name in _KERNELS:
            if not _multi_tensor.missing(name, device, load=False):
                return partial(_multi_tensor.sums_of_squares, name)
    return _torch.sums_of_squares
