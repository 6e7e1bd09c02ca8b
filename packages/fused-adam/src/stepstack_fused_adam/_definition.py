"""Adam's step, written once in plain torch. This is the definition: every backend agrees with it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scalars(NamedTuple):
    """The numbers of a step, 0-d tensors in the dtype of the arithmetic, on the device of the parameters.

    alpha is 1 − beta: fp32 holds 1 − 0.999 to 6e-8 of its value, but 0.999 to 6e-5 of what is missing to 1.
    The divisor of the gradients is negative to maximize. A skip that is not 0 lets the step change nothing.
    """

    lr: Tensor
    alpha1: Tensor
    alpha2: Tensor
    eps: Tensor
    weight_decay: Tensor
    divisor: Tensor
    skip: Tensor


def adam(
    theta: Tensor, g: Tensor, m: Tensor, v: Tensor, v_max: Tensor | None, t: Tensor, by: Scalars, decoupled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new theta, m, v and v_max after step t; t = inf is Adam without bias correction.

    Adam (Kingma & Ba 2015, algorithm 1) with the decay added to the gradient, or AdamW (Loshchilov & Hutter 2019,
    algorithm 2) where it is `decoupled`; with v_max, AMSGrad (Reddi et al. 2018) as torch has it.
    """
    g = g / by.divisor
    if decoupled:
        theta = theta * (1 - by.lr * by.weight_decay)
    else:
        g = g + by.weight_decay * theta
    m = torch.lerp(m, g, by.alpha1)
    v = (1 - by.alpha2) * v + by.alpha2 * g * g
    v_max = None if v_max is None else torch.maximum(v_max, v)
    v_hat = v if v_max is None else v_max
    # Both bias corrections are taken out of the elements: they are one number each.
    theta = theta - (by.lr / _correction(by.alpha1, t)) * m / (v_hat.sqrt() / _correction(by.alpha2, t).sqrt() + by.eps)
    return theta, m, v, v_max


def update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    master: Tensor | None,
    t: Tensor,
    by: Scalars,
    decoupled: bool,
) -> None:
    """`adam` on tensors of any floating dtypes, in place: read, computed in the dtype of the scalars, rounded once.

    A skip is a select over every write, so the flag is never read by the host.
    """
    dtype = by.lr.dtype
    theta, m, v, v_max = adam(
        (param if master is None else master).to(dtype),
        grad.to(dtype),
        exp_avg.to(dtype),
        exp_avg_sq.to(dtype),
        None if max_exp_avg_sq is None else max_exp_avg_sq.to(dtype),
        t.to(dtype),
        by,
        decoupled,
    )
    skip = by.skip != 0
    writes = ((param, theta), (exp_avg, m), (exp_avg_sq, v), (max_exp_avg_sq, v_max), (master, theta))
    for old, new in writes:
        if old is not None and new is not None:
            old.copy_(torch.where(skip, old, new.to(old.dtype)))


def _correction(alpha: Tensor, t: Tensor) -> Tensor:
    # 1 − beta^t, without the cancellation: 1 − 0.999 is wrong in the fifth digit in fp32.
    return -torch.expm1(t * torch.log1p(-alpha))
