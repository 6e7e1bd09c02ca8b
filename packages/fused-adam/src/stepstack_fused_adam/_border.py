"""What the border refuses, in sentences."""

import torch
from torch import Tensor

from stepstack_fused_adam._run import Run, dense_like, is_dense, same_order

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_param(param: Tensor, name: str) -> None:
    """Raise TypeError or ValueError unless it can be trained."""
    if param.dtype not in FLOATS or param.layout is not torch.strided:
        raise TypeError(f"{name} is {param.layout} of {param.dtype}; Adam takes strided fp32, bf16, fp16 and fp64")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(f"{name} is expanded (strides {param.stride()}): its elements share memory; clone it first")


def check_grad(grad: Tensor, param: Tensor, name: str) -> None:
    """Raise ValueError or TypeError unless it is a gradient for a parameter of this shape and device."""
    if grad.layout is not torch.strided or grad.dtype not in FLOATS:
        raise TypeError(
            f"the gradient of {name} is {grad.layout} of {grad.dtype}; Adam takes strided floating ones "
            "(for sparse gradients there is torch.optim.SparseAdam)"
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"the gradient of {name} is {tuple(grad.shape)} on {grad.device}, "
            f"its parameter {tuple(param.shape)} on {param.device}"
        )


def check_states(run: Run, name: str) -> None:
    """Raise ValueError unless the states fit their parameter."""
    stored = run.stored
    expected = dense_like(stored.param)
    plain = (
        stored.exp_avg.dtype in FLOATS or stored.exp_avg_scale is not None,
        stored.exp_avg_sq.dtype in FLOATS or stored.exp_avg_sq_scale is not None,
        stored.max_exp_avg_sq is None or stored.max_exp_avg_sq.dtype in FLOATS,
        stored.master is None or (stored.master.dtype == torch.float32 and stored.param.dtype.itemsize == 2),
    )
    if not all(plain):
        dtypes = [tensor.dtype for tensor in stored[1:] if tensor is not None]
        raise ValueError(
            f"the states of {name}, {stored.param.dtype}, have dtypes {dtypes}; moments "
            "are fp32, bf16, fp16 or fp64, a master weight is fp32 and belongs to a parameter of 16 bits"
        )
    for kind, tensor in zip(stored._fields[1:7], stored[1:7], strict=True):
        if tensor is None:
            continue
        if tensor.shape != expected.shape or tensor.device != stored.param.device:
            raise ValueError(
                f"{kind} of {name} is {tuple(tensor.shape)} on {tensor.device}, "
                f"its parameter {tuple(expected.shape)} on {stored.param.device}"
            )
        if not is_dense(tensor) or not same_order(expected, tensor):
            raise ValueError(
                f"{kind} of {name} has strides {tensor.stride()}; in the order of its parameter they are "
                f"{expected.stride()}"
            )
    if run.step.shape != () or run.step.dtype != torch.float32 or run.step.device != stored.param.device:
        raise ValueError(
            f"the step of {name} is {run.step.dtype} {tuple(run.step.shape)} on {run.step.device}; "
            f"a step is 0-d fp32 on the device of its parameter, {stored.param.device}"
        )
