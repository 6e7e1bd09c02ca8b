"""The sums of squares by Apex's or Transformer Engine's multi-tensor kernels."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

# By backend: what to import; the last has the kernels.
_MODULES = {"apex": ("amp_C",), "transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch")}
_CHUNK = 2048 * 32  # the elements that one block of threads does, as both libraries call their kernels

Kernel = Callable[[int, Tensor, list[list[Tensor]], bool], tuple[Tensor, Tensor]]


@cache
def kernel(backend: str) -> Kernel | str:
    """The kernel, or why it is not here."""
    try:
        for name in _MODULES[backend]:
            module = import_module(name)
        found: Kernel = module.multi_tensor_l2norm
    except Exception as error:  # the import of a package that is only half there raises anything
        return f"{type(error).__name__}: {error}"
    return found


def loaded(backend: str) -> bool:
    """Whether the program has imported what a backend needs; that can take seconds."""
    return all(name in sys.modules for name in _MODULES[backend])


def missing(backend: str, device: torch.device) -> str | None:
    """Why a backend can't be used on a device here, or None."""
    if device.type != "cuda":
        return f"its kernels are for cuda, not for {device.type}"
    found = kernel(backend)
    return found if isinstance(found, str) else None


def refuses(dtype: torch.dtype) -> str | None:
    """Why the kernels do not take a dtype, or None."""
    return None if dtype in (torch.float32, torch.bfloat16, torch.float16) else f"its kernels do not take {dtype}"


def is_exact(dtype: torch.dtype) -> bool:
    """Whether it keeps what total_norm promises: it squares in fp32, which only fp16 numbers do not leave."""
    return dtype is torch.float16


def sums_of_squares(backend: str, tensors: list[Tensor]) -> Tensor:
    """What `_torch.sums_of_squares` says, squared and added up in fp32."""
    found = kernel(backend)
    assert not isinstance(found, str)
    flag = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
    # Contiguous and on one device, as the kernels demand; empty ones never come here.
    _, norms = found(_CHUNK, flag, [[tensor.contiguous() for tensor in tensors]], True)
    return norms.double().square_()
