"""Tensors of one device and dtype times one number: by torch, or by Apex's or Transformer Engine's kernels."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from stepstack_gradnorm import kernels

Scale: TypeAlias = Callable[[list[Tensor], Tensor | float], None]

_KERNELS = ("transformer_engine", "apex")
_CHUNK = 2048 * 32  # the elements that one block of threads does, as both libraries call their kernels


def check_backend(backend: str) -> None:
    """Raise ValueError unless there is one of this name."""
    if backend not in ("auto", "torch", *_KERNELS):
        raise ValueError(f"backend is one of auto, torch, {', '.join(_KERNELS)}, not {backend!r}")


def scale_for(backend: str, device: torch.device, dtype: torch.dtype, factor: Tensor | float) -> Scale:
    """What multiplies such tensors by such a factor; ValueError if the backend that is asked for does not."""
    for name in _KERNELS:
        if backend in ("auto", name):
            kernel = _kernel(name, device, dtype, factor, load=backend == name)
            if not isinstance(kernel, str):
                return partial(_by_kernel_, kernel)
            if backend == name:
                raise ValueError(f"backend {name!r} does not multiply these: {kernel}; backend='auto' does")
    return _by_torch_


def _kernel(
    name: str, device: torch.device, dtype: torch.dtype, factor: Tensor | float, *, load: bool
) -> Callable[..., None] | str:
    """The kernel, or why there is none."""
    if device.type != "cuda":
        return f"its kernels are for cuda, not for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels do not take {dtype}"
    module = kernels(name, load=load)
    if isinstance(module, str):
        return module
    wanted = "multi_tensor_scale_tensor" if isinstance(factor, Tensor) else "multi_tensor_scale"
    return getattr(module, wanted, f"{module.__name__} has no {wanted}")


def _by_kernel_(kernel: Callable[..., None], runs: list[Tensor], factor: Tensor | float) -> None:
    contiguous = [run for run in runs if run.is_contiguous()]
    if contiguous:
        flag = torch.zeros(1, dtype=torch.int32, device=contiguous[0].device)
        by = factor.float().reshape(1) if isinstance(factor, Tensor) else float(factor)
        kernel(_CHUNK, flag, [contiguous, contiguous], by)
    if len(contiguous) < len(runs):
        _by_torch_([run for run in runs if not run.is_contiguous()], factor)


def _by_torch_(runs: list[Tensor], factor: Tensor | float) -> None:
    dtype = runs[0].dtype
    if runs[0].device.type == "cpu" and not isinstance(factor, Tensor):
        factor = torch.tensor(factor, dtype=torch.float64)  # a number would first be rounded to bf16 or fp16
    if dtype.is_complex:  # as pairs, since a complex product with inf or NaN spoils the other half, and loses -0
        torch._foreach_mul_([torch.view_as_real(run.conj() if run.is_conj() else run) for run in runs], factor)
    elif dtype.itemsize == 1:  # fp8 has no arithmetic of its own
        for run in runs:
            run.copy_(run.float().mul_(factor))
    elif isinstance(factor, Tensor) and factor.is_cuda and dtype in (torch.bfloat16, torch.float16):
        # _foreach_mul_ is one kernel only for a factor of the same dtype, which would round it.
        unused = torch.zeros((), device=factor.device)
        torch._amp_foreach_non_finite_check_and_unscale_(runs, unused, factor.float())
    else:
        torch._foreach_mul_(runs, factor)
