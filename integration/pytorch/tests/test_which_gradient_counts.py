"""Which gradient of a parameter counts is one rule for the norm, clipping, the loss scaler and FusedAdamW."""

import math

import pytest
import torch

from stepstack import OptimizerStep
from stepstack_clip import clip_grad_norm_, clip_grad_value_
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_gradnorm import grads_of, total_norm

GIVEN = {"grad": ("grad",), "decoupled_grad": ("decoupled_grad",), "both": ("grad", "decoupled_grad"), "none": ()}
each_case = pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)


def parameter_with(given, value=4.0):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for name in given:
        dtype = torch.bfloat16 if name == "grad" else torch.float32
        setattr(param, name, torch.full((3,), value if name == given[0] else 100.0, dtype=dtype))
    return param


def values(param, given):
    return [getattr(param, name).tolist() for name in given]


def expected(given, value):
    """The first of those that are given has this value now, another is as it was."""
    return [[value] * 3 if name == given[0] else [100.0] * 3 for name in given]


@each_case
def test_the_norm_reads_and_clipping_writes_the_gradient_that_counts(given):
    param = parameter_with(given)
    assert total_norm(grads_of(param)) == pytest.approx(48**0.5 if given else 0)
    clip_grad_value_(param, 2.0)
    assert values(param, given) == expected(given, 2.0)
    clip_grad_norm_(param, 12**0.5 / 2)
    assert values(param, given) == [pytest.approx(row, rel=1e-6) for row in expected(given, 1.0)]


@each_case
def test_the_scaler_reads_and_unscales_it(given):
    param, scaler = parameter_with(given), GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(FusedAdamW([param], master_weights="fp32"))
    assert values(param, given) == expected(given, 2.0)


@each_case
def test_fused_adamw_steps_by_it(given):
    param = parameter_with(given)
    optimizer = FusedAdamW([param], betas=(0.0, 0.0), master_weights="fp32")
    optimizer.step()
    assert [state["exp_avg"].tolist() for state in optimizer.state.values()] == [[4.0] * 3] * bool(given)


@pytest.mark.parametrize("name", ["grad", "decoupled_grad"])
def test_a_nan_in_it_skips_the_step(name):
    param = parameter_with([name], math.nan)
    result = OptimizerStep(FusedAdamW([param], lr=0.1, master_weights="fp32"), max_norm=1.0)()
    assert result.skipped == 1
    assert param.tolist() == [1, 1, 1]
    assert param.grad is None
    assert getattr(param, "decoupled_grad", None) is None


def test_a_sparse_decoupled_gradient_stays_where_it_is():
    param = torch.nn.Parameter(torch.ones(3))
    param.decoupled_grad = torch.sparse_coo_tensor(
        [[0, 0]], torch.tensor([1.0, 2.0]).half(), (3,), check_invariants=True
    )
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = FusedAdamW([param])
    optimizer.step = lambda: None  # as a fused step that reads it would
    scaler.step(optimizer)
    assert param.grad is None
    assert param.decoupled_grad.coalesce().values().tolist() == [3]
