"""Adam(W) as a function of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepstack_fused_adam._backends import check_backend
from stepstack_fused_adam._border import check_grad, check_param, check_states
from stepstack_fused_adam._definition import States
from stepstack_fused_adam._hyperparameters import Hyperparameters, Number, contract
from stepstack_fused_adam._plan import Plan
from stepstack_fused_adam._run import run_of


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    masters: Sequence[Tensor] | None = None,
    lr: Number = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Number = 1e-2,
    maximize: bool = False,
    bias_correction: bool = True,
    grad_scale: Number | None = None,
    found_inf: Number | None = None,
    backend: str = "auto",
) -> None:
    """One step of AdamW on plain tensors, in place; for each parameter the same as

        step += 1
        grad = grad / grad_scale
        param *= 1 - lr * weight_decay
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.lerp_(grad**2, 1 - beta2)
        param -= lr / (1 - beta1**step) * exp_avg / ((exp_avg_sq / (1 - beta2**step)).sqrt() + eps)

    and nothing at all where `found_inf` is not 0. The lists are of one length. Tensors may be of any of fp32, bf16,
    fp16 and fp64, moments of fp64 only where the parameter is; the arithmetic is fp32, or fp64 where the parameter is.
    Moments have the shape of their parameter and its order in memory; a gradient may be laid out otherwise. `steps` are
    0-d fp32 on the device of the parameter; neighbours in memory that share one step tensor are done as one.

    With `masters`, fp32, the step is made on those and the parameters become their rounded copies. With
    `max_exp_avg_sqs` it is AMSGrad. Numbers are floats or one-element tensors; they are not read by the host. After a
    step with a `grad_scale` the contents of `grads` are unspecified. Backends: see `FusedAdamW`.

    Raises ValueError for lists, shapes, dtypes or devices that do not fit, saying which.
    """
    check_backend(backend)
    lists = [params, grads, exp_avgs, exp_avg_sqs, steps]
    optional = [[None] * len(params) if tensors is None else tensors for tensors in (max_exp_avg_sqs, masters)]
    if any(len(tensors) != len(params) for tensors in (*lists, *optional)):
        raise ValueError(f"adamw_ wants lists of one length, not {[len(tensors) for tensors in (*lists, *optional)]}")
    all_states = map(States, exp_avgs, exp_avg_sqs, *optional)
    members = [run_of(*tensors) for tensors in zip(params, steps, all_states, strict=True)]
    for index, (member, param, grad) in enumerate(zip(members, params, grads, strict=True)):
        check_param(param, f"parameter {index}")
        check_grad(grad, param, f"parameter {index}")
        check_states(member, f"parameter {index}")
    scale, skip = contract(grad_scale, found_inf)
    by = Hyperparameters(
        lr,
        *betas,
        eps,
        weight_decay,
        maximize=maximize,
        bias_correction=bias_correction,
        grad_scale=scale,
        skip=skip,
    )
    Plan(members, params, grads, backend).step_(params, grads, by)
    torch.autograd.graph.increment_version(params)  # not every backend tells autograd
