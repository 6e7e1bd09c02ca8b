"""The scale that multiplied the loss is the one that divides the gradients."""

import pytest
import torch

from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

GROWING = {"fp16": {"enabled": True, "initial_scale_power": stock.SCALE_POWER, "loss_scale_window": 1}}
CASES = [
    stock.Case(stage, "fp16", offload, clip, more=GROWING)
    for stage in range(4)
    for offload in (False, True)
    for clip in ("binding", "off")
    if stage or not offload
]


@pytest.fixture(scope="module")
def outcomes():
    """By case, how far norms (relative) and weights are from torch's: of the engine as it is, and of a plugged one."""
    results = on_ranks(stock.RANKS, _distances, timeout=stock.TIMEOUT)[0]
    return dict(zip(map(str, CASES), results, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_in_which_the_scale_grows_is_right(outcomes, case):
    _, (norm, weights, scale) = outcomes[str(case)]
    assert scale > 2.0**stock.SCALE_POWER
    assert norm < 5e-4
    assert weights < 2e-4


@pytest.mark.parametrize("case", [case for case in CASES if case.clip == "off"], ids=str)
def test_without_it_is_wrong(outcomes, case):
    (_, weights, _), _ = outcomes[str(case)]
    assert weights > 2e-3


def test_a_scale_that_changes_between_the_backwards_of_a_step_is_refused():
    assert (
        "the loss scale was 256.0 in an earlier backward of this step and is 8.0 now"
        in on_ranks(stock.RANKS, _change_the_scale, timeout=stock.TIMEOUT)[0]
    )


def _distances(rank):
    stock.initialize(rank)
    return [(_distance(case, rank, lambda engine: None), _distance(case, rank, plug)) for case in CASES]


def _distance(case, rank, change):
    engine, reference = stock.engine_of(case), stock.Reference(case)
    change(engine)
    norm = 0.0
    for step in range(4):
        stock.backwards(engine, case, rank, step)
        engine.step()
        expected = reference.step(step)
        norm = max(norm, abs(float(engine.get_global_grad_norm()) / expected - 1))
    return norm, stock.distance(engine, reference.weights), engine.optimizer.loss_scale


def _change_the_scale(rank):
    stock.initialize(rank)
    case = stock.Case(2, "fp16", accumulation=2)
    engine = stock.engine_of(case)
    with plug(engine):
        engine.backward(stock.loss_of(engine(stock.batch(rank, 0, 0).to(torch.float16))))
        engine.step()
        engine.optimizer.override_loss_scale(8.0)
        with pytest.raises(RuntimeError) as caught:
            engine.backward(stock.loss_of(engine(stock.batch(rank, 0, 1).to(torch.float16))))
    return str(caught.value)
