"""Adam's step, written once in plain torch. This is the definition: every backend agrees with it."""

from typing import NamedTuple

import torch
from torch import Tensor

from stepstack_fused_adam import _block8, _remainder


class States(NamedTuple):
    """What is kept for some parameters: tensors of their shape, but for the scales.

    The master is the fp32 weight of which the parameter is the rounded copy; with a remainder, that weight is the
    parameter and its remainder joined (`_remainder`). Moments with a scale are in codes (`_block8`).
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    master: Tensor | None = None
    remainder_high: Tensor | None = None
    remainder_low: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None


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


def update_(param: Tensor, grad: Tensor, states: States, t: Tensor, by: Scalars, decoupled: bool) -> None:
    """`adam` in place: read in any form, computed in the dtype of the scalars, rounded once.

    A skip is a select over every write, so the flag is never read by the host.
    """
    dtype = by.lr.dtype
    maximum = states.max_exp_avg_sq
    theta, m, v, v_max = adam(
        weight(param, states).to(dtype),
        grad.to(dtype),
        first_moment(states).to(dtype),
        second_moment(states).to(dtype),
        None if maximum is None else maximum.to(dtype),
        t.to(dtype),
        by,
        decoupled,
    )
    skip = by.skip != 0
    new_param, new_states = narrowed(states, theta, m, v, v_max)
    for old, new in zip((param, *states), (new_param, *new_states), strict=True):
        if old is not None and new is not None:
            # Chosen before it is rounded: rounding the old number again gives it back, and one dtype is vectorised.
            old.copy_(torch.where(skip, old.to(new.dtype), new))


def weight(param: Tensor, states: States) -> Tensor:
    """What the arithmetic moves: the master weight where there is one, else the parameter."""
    if states.remainder_high is not None and states.remainder_low is not None:
        return _remainder.join(param, states.remainder_high, states.remainder_low)
    return param if states.master is None else states.master


def first_moment(states: States) -> Tensor:
    """exp_avg in a floating dtype."""
    if states.exp_avg_scale is None:
        return states.exp_avg
    return _block8.decode_first(states.exp_avg, states.exp_avg_scale)


def second_moment(states: States) -> Tensor:
    """exp_avg_sq in a floating dtype."""
    if states.exp_avg_sq_scale is None:
        return states.exp_avg_sq
    return _block8.decode_second(states.exp_avg_sq, states.exp_avg_sq_scale)


def narrowed(states: States, theta: Tensor, m: Tensor, v: Tensor, v_max: Tensor | None) -> tuple[Tensor, States]:
    """The numbers that a parameter and `states` are to have, not yet rounded to their dtypes."""
    param, high, low = (theta, None, None) if states.remainder_high is None else _remainder.split(theta)
    exp_avg, exp_avg_scale = (m, None) if states.exp_avg_scale is None else _block8.encode_first(m)
    exp_avg_sq, exp_avg_sq_scale = (v, None) if states.exp_avg_sq_scale is None else _block8.encode_second(v)
    return param, States(exp_avg, exp_avg_sq, v_max, theta, high, low, exp_avg_scale, exp_avg_sq_scale)


def _correction(alpha: Tensor, t: Tensor) -> Tensor:
    # 1 − beta^t, without the cancellation: 1 − 0.999 is wrong in the fifth digit in fp32.
    return -torch.expm1(t * torch.log1p(-alpha))
