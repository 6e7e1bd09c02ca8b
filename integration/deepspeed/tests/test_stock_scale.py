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


def test_gradients_that_are_discarded_take_their_scale_with_them(tmp_path):
    for case, scales, norms in on_ranks(stock.RANKS, _resume, str(tmp_path), timeout=stock.TIMEOUT)[0]:
        assert scales[0] != scales[1], case
        assert norms[0] == norms[1], case


def test_in_stage_0_gradients_of_a_loss_without_the_scale_are_refused():
    assert on_ranks(stock.RANKS, _plug_after_backward, timeout=stock.TIMEOUT)[0] == {
        "fp16": "plug does not handle this FP16_UnfusedOptimizer: gradients of a loss that DeepSpeed did not multiply "
        "by its scale; plug before a step's first backward",
        "bf16": None,
    }


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


def _resume(rank, folder):
    """Steps, and the same from a checkpoint, after a backward at another scale that no step followed."""
    stock.initialize(rank)
    outcomes = []
    for case in [stock.Case(stage, "fp16", offload=stage == 3, more=GROWING) for stage in (0, 1, 3)]:
        engine, scales, norms = stock.engine_of(case), [], []
        with plug(engine):
            engine.save_checkpoint(folder, tag=str(case))
            for _ in range(2):
                scales.append(engine.optimizer.loss_scale)
                engine.load_checkpoint(folder, tag=str(case))
                for step in range(2):
                    stock.backwards(engine, case, rank, step)
                    engine.step()
                norms.append(float(engine.get_global_grad_norm()))
                stock.backwards(engine, case, rank, 2)
                engine.optimizer.zero_grad()
        outcomes.append((str(case), scales, norms))
    return outcomes


def _plug_after_backward(rank):
    stock.initialize(rank)
    refusals = {}
    for dtype in ("fp16", "bf16"):
        case = stock.Case(0, dtype)
        engine = stock.engine_of(case)
        stock.backwards(engine, case, rank, 0)
        try:
            plug(engine)
            refusals[dtype] = None
        except ValueError as error:
            refusals[dtype] = str(error)
    return refusals
