"""Plugged engines against DeepSpeed as it is, and against plain torch on the batches of all ranks."""

from functools import cache
from itertools import product

import pytest
import torch

from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

STEPS = 3
CASES = [
    stock.Case(stage, dtype, offload, clip, accumulation)
    for stage, dtype, offload, clip, accumulation in product(
        range(4), stock.DTYPES, (False, True), stock.MAX_NORM, (1, 2)
    )
    if stage or not offload
]
CASES += [
    stock.Case(1, "bf16", clip=clip, accumulation=accumulation, more={"data_types": {"grad_accum_dtype": "fp32"}})
    for clip, accumulation in product(stock.MAX_NORM, (1, 2))
]
NORM, WEIGHTS = 1e-6, 3e-7  # relative; absolute, of weights that move by up to 0.06


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plugged_engine_measures_and_trains_as_torch_does(case):
    plugged, reference = outcome(case)["plugged"], outcome(case)["reference"]
    torch.testing.assert_close(plugged["norms"], reference["norms"], rtol=NORM, atol=0)
    torch.testing.assert_close(plugged["weights"], reference["weights"], rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize("case", [case for case in CASES if case.stage or case.dtype == "fp32"], ids=str)
def test_a_plugged_engine_trains_as_the_same_engine_without(case):
    plugged, without = outcome(case)["plugged"], outcome(case)["stock"]
    if case.stage:  # stage 0 in fp32 has no norm to tell
        torch.testing.assert_close(plugged["norms"], without["norms"], rtol=NORM, atol=0)
    torch.testing.assert_close(plugged["weights"], without["weights"], rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize("case", [case for case in CASES if not case.stage and case.dtype != "fp32"], ids=str)
def test_stage_0_in_16_bits_is_wrong_without(case):
    """It makes a step when it is built, and in fp16 divides by a loss scale that it has not multiplied by."""
    without, reference = outcome(case)["stock"], outcome(case)["reference"]
    assert max((a - b).abs().max() for a, b in zip(without["weights"], reference["weights"], strict=True)) > 1e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_norm_is_a_scalar_in_fp32_on_the_cpu_of_an_offloading_engine(case):
    assert outcome(case)["plugged"]["kind"] == (torch.float32, (), "cpu")


def outcome(case):
    return _outcomes(case.stage)[CASES.index(case)]


@cache
def _outcomes(stage):
    """Of all cases of a stage in one launch: an engine takes less time than starting ranks for it."""
    cases = {index: case for index, case in enumerate(CASES) if case.stage == stage}
    return on_ranks(stock.RANKS, _compare, cases, timeout=stock.TIMEOUT)[0]


def _compare(rank, cases):
    stock.initialize(rank)
    return {
        index: {"stock": _train(case, rank), "plugged": _train(case, rank, plug), "reference": _reference(case)}
        for index, case in cases.items()
    }


def _train(case, rank, change=lambda engine: None):
    engine = stock.engine_of(case)
    change(engine)
    norms = []
    for step in range(STEPS):
        stock.backwards(engine, case, rank, step)
        engine.step()
        assert engine.was_step_applied()
        norms.append(engine.get_global_grad_norm())
    norm = norms[-1]
    return {
        "norms": None if norm is None else torch.tensor([float(norm) for norm in norms], dtype=torch.float64),
        "kind": (norm.dtype, tuple(norm.shape), norm.device.type) if isinstance(norm, torch.Tensor) else type(norm),
        "weights": stock.masters(engine),
    }


def _reference(case):
    reference = stock.Reference(case)
    norms = [reference.step(step) for step in range(STEPS)]
    return {
        "norms": torch.tensor(norms, dtype=torch.float64),
        "weights": [weight.detach() for weight in reference.weights],
    }
