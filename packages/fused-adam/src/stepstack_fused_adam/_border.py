"""What the border refuses, in sentences."""

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from stepstack_fused_adam._run import Run, is_dense, overlaps, same_order

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_MASTERS = ("master_weight", "remainder_high", "remainder_low")


def name_of(index: int, group: Mapping[str, Any], place: int) -> str:
    """How an error names a parameter of a group."""
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} of group {index}"


def check_numbers(group: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless torch.optim.AdamW's constructor takes the numbers of a group. Tensors are not read."""
    beta1, beta2 = group["betas"]
    for what, number, limit in (
        ("lr", group["lr"], inf),
        ("the first of betas", beta1, 1),
        ("the second of betas", beta2, 1),
        ("eps", group["eps"], inf),
        ("weight_decay", group["weight_decay"], inf),
    ):
        if isinstance(number, Tensor):
            if number.numel() != 1:
                raise ValueError(f"{what} of {name} has {number.numel()} elements, not one")
        elif not 0 <= number < limit:
            raise ValueError(f"{what} of {name} is {number}; it is at least 0 and less than {limit}")


def check_options(group: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if a group's options have become what no step can be made by. Tensors are not read."""
    beta1, beta2 = group["betas"]
    for what, number, limit in (
        ("lr", group["lr"], inf),
        ("beta1", beta1, 1),
        ("beta2", beta2, 1),
        ("eps", group["eps"], inf),
        ("weight_decay", group["weight_decay"], inf),
    ):
        if isinstance(number, Tensor):
            continue
        try:
            fits = -inf < number < limit  # not of nan; below 0 is followed, as torch does
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{what} of {name} is {number!r}; a step needs a number less than {limit}")
    if group.get("differentiable"):
        raise ValueError(f"{name} asks for a differentiable step, which torch.optim.Adam(W) has, and this one has not")


def check_param(param: Tensor, name: str) -> None:
    """Raise TypeError or ValueError unless it can be trained."""
    if param.dtype not in FLOATS or param.layout is not torch.strided:
        raise TypeError(f"{name} is {param.layout} of {param.dtype}; Adam takes strided fp32, bf16, fp16 and fp64")
    if overlaps(param):
        raise ValueError(
            f"elements of {name} share memory (shape {tuple(param.shape)}, strides {param.stride()}); clone it first"
        )
    if param.is_neg():
        raise ValueError(f"{name} is a view that stands for the negative of its memory; call resolve_neg() first")


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


def check_cast(state: Mapping[str, Any], wanted: Mapping[str, Any], param: Tensor, name: str) -> None:
    """Raise ValueError if a parameter was cast since its state was made, so that it needs another master weight."""
    held, needed = ([key for key in _MASTERS if key in names] for names in (state, wanted))
    if held != needed:
        raise ValueError(
            f"{name} is {param.dtype}, so beside it there should be {needed or 'no master weight'}, but its state has "
            f"{held or 'no master weight'}: it was cast after its first step. Cast it back; or make a new optimizer "
            "for it, which can load a state dict that was saved before"
        )


def check_complete(state: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if a state lacks something that the group's options ask for."""
    missing = [key for key in ("step", *wanted) if key not in state]
    if missing:
        raise ValueError(
            f"the state of {name} has no {' and no '.join(missing)}, only {sorted(state)}; add what is missing, or "
            "delete the state from `optimizer.state` to begin anew"
        )


def check_count(count: float, name: str) -> None:
    """Raise ValueError if a count is below 0, which would make the bias corrections 0 or worse."""
    if not count >= 0:
        raise ValueError(f"the step of {name} is {count}; it is the number of steps made, at least 0")


def check_states(run: Run, name: str) -> None:
    """Raise ValueError unless the states fit their parameter."""
    if not isinstance(run.step, Tensor):
        raise ValueError(f"the step of {name} is {run.step!r}; a step is a 0-d fp32 tensor")
    states = run.states
    floats = [dtype for dtype in FLOATS if dtype != torch.float64 or run.dtype == torch.float64]
    plain = (
        states.exp_avg.dtype in floats or states.exp_avg_scale is not None,
        states.exp_avg_sq.dtype in floats or states.exp_avg_sq_scale is not None,
        states.max_exp_avg_sq is None or states.max_exp_avg_sq.dtype in floats,
        states.master is None or (states.master.dtype == torch.float32 and run.dtype.itemsize == 2),
    )
    if not all(plain):
        dtypes = [tensor.dtype for tensor in states if tensor is not None]
        raise ValueError(
            f"the states of {name}, {run.dtype}, have dtypes {dtypes}; moments are fp32, bf16 or fp16, "
            "or fp64 where the parameter is; a master weight is fp32 and belongs to a parameter of 16 bits"
        )
    for kind, tensor in states._asdict().items():
        if tensor is None or kind.endswith("_scale"):
            continue
        if tensor.shape != run.shape.shape or tensor.device != run.device:
            raise ValueError(
                f"{kind} of {name} is {tuple(tensor.shape)} on {tensor.device}, "
                f"its parameter {tuple(run.shape.shape)} on {run.device}"
            )
        if not is_dense(tensor) or not same_order(run.shape, tensor):
            raise ValueError(
                f"{kind} of {name} has strides {tensor.stride()}; in the order of its parameter they are "
                f"{run.shape.stride()}. After a parameter has changed its memory format, a new optimizer can load the "
                "state dict that was saved before"
            )
    if run.step.shape != () or run.step.dtype != torch.float32 or run.step.device != run.device:
        raise ValueError(
            f"the step of {name} is {run.step.dtype} {tuple(run.step.shape)} on {run.step.device}; "
            f"a step is 0-d fp32 on the device of its parameter, {run.device}"
        )
