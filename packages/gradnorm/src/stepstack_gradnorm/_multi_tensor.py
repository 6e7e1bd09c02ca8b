"""The sums of squares by Apex's or Transformer Engine's multi-tensor kernels."""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from stepstack_gradnorm._torch import flat, summed

CHUNK = 2048 * 32  # the elements that one block of threads does, as both libraries call their kernels

# By backend: what to import; the last has the kernels.
_MODULES = {"transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch"), "apex": ("amp_C",)}


def kernels(backend: str, *, load: bool = True) -> ModuleType | str:
    """The module with the multi-tensor kernels of "apex" or "transformer_engine", or why it is not here.

    With `load=False` only if the program has imported it: an import can take seconds.
    """
    if not load and any(name not in sys.modules for name in _MODULES[backend]):
        return "the program has not imported it"
    return _imported(backend)


@cache
def _imported(backend: str) -> ModuleType | str:
    try:
        return [import_module(name) for name in _MODULES[backend]][-1]
    except Exception as error:  # the import of a package that is only half there raises anything
        return f"{type(error).__name__}: {error}"


def missing(backend: str, device: torch.device, *, load: bool = True) -> str | None:
    """Why a backend can't be used on a device here, or None."""
    if device.type != "cuda":
        return f"its kernels are for cuda, not for {device.type}"
    module = kernels(backend, load=load)
    if isinstance(module, str):
        return module
    return None if hasattr(module, "multi_tensor_l2norm") else f"{module.__name__} has no multi_tensor_l2norm"


def refuses(dtype: torch.dtype) -> str | None:
    """Why the kernels do not take a dtype, or None."""
    return None if dtype in (torch.float32, torch.bfloat16, torch.float16) else f"its kernels do not take {dtype}"


def is_exact(dtype: torch.dtype) -> bool:
    """Whether they keep the promises of `total_norm`: they square in fp32, whose range only squares of fp16 keep to."""
    return dtype is torch.float16


def sums_of_squares(backend: str, lists: list[list[Tensor]]) -> Tensor:
    """What `_torch.sums_of_squares` says, squared and added up in fp32."""
    tensors = [tensor.contiguous() for tensor in flat(lists)]
    flag = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
    _, norms = kernels(backend).multi_tensor_l2norm(CHUNK, flag, [tensors], True)  # type: ignore[union-attr]
    return summed(norms.double().square_(), [*map(len, lists)])
