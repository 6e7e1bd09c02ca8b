"""What a step makes the host wait for, and what the ranks say to each other: counted."""

from collections import Counter

import pytest

from stepstack_deepspeed import plug
from stepstack_testing import HostSyncs, Operations, on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = [
    *(stock.Case(0, dtype) for dtype in stock.DTYPES),
    *(stock.Case(stage, dtype, offload) for stage in (1, 2, 3) for offload in (False, True) for dtype in stock.DTYPES),
    stock.Case(1, "bf16", more=FP32_GRADS),
    stock.Case(3, "bf16", True, zero={"sub_group_size": 8}),
]


@pytest.fixture(scope="module")
def costs():
    """By case (host syncs, all-reduces) of a step on the first rank, of the engine as it is and of the plugged one."""
    return on_ranks(stock.RANKS, _count, timeout=stock.TIMEOUT)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plugged_step_waits_once_to_know_whether_it_is_one(costs, case):
    """The engine asks: it counts skipped steps and holds the schedule."""
    (_, _), (waits, _) = costs[str(case)]
    assert sum(waits.values()) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plugged_step_reduces_one_norm_and_nothing_else(costs, case):
    (_, _), (_, reductions) = costs[str(case)]
    assert reductions == (1 if case.stage else 0)


@pytest.mark.parametrize("case", [case for case in CASES if case.stage or case.dtype != "fp32"], ids=str)
def test_without_it_a_step_waits_and_reduces_at_least_as_often(costs, case):
    (stock_waits, stock_reductions), (waits, reductions) = costs[str(case)]
    assert sum(stock_waits.values()) >= sum(waits.values())
    if case.more != FP32_GRADS:  # whose norm is of the whole gradient on every rank
        assert stock_reductions >= reductions


@pytest.mark.parametrize("case", [case for case in CASES if case.offload and case.stage < 3], ids=str)
def test_without_it_offloading_waits_for_every_parameter(costs, case):
    (stock_waits, _), _ = costs[str(case)]
    assert sum(stock_waits.values()) > 4


def test_a_backward_of_a_plugged_engine_that_offloads_waits_for_nothing():
    """Without, it looks at each gradient for overflow."""
    assert on_ranks(stock.RANKS, _backward, timeout=stock.TIMEOUT) == [[], []]


def _count(rank):
    stock.initialize(rank)
    return {str(case): (_cost(case, rank, lambda engine: None), _cost(case, rank, plug)) for case in CASES}


def _cost(case, rank, change):
    engine = stock.engine_of(case, optimizer=_capturable)
    change(engine)
    for step in range(2):  # the first one compares norms
        stock.backwards(engine, case, rank, step)
        with HostSyncs() as syncs, Operations() as operations:
            engine.step()
    return Counter(syncs), operations["c10d.allreduce_"]


def _backward(rank):
    stock.initialize(rank)
    waits = []
    for stage in (1, 2):  # stage 3 compares its trace of parameters between ranks while it is new
        case = stock.Case(stage, "bf16", offload=True)
        with plug(stock.engine_of(case)) as plugged, HostSyncs() as syncs:
            stock.backwards(plugged.engine, case, rank, 0)
        waits += syncs
    return waits


def _capturable(module):
    """An AdamW that reads no step count; torch's for the CPU does, once for each parameter."""
    optimizer = stock.adamw(module)
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer
