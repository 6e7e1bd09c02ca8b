"""Our own engine beside DeepSpeed's, with the same config, the same optimizer and the same batches."""

from functools import cache
from itertools import product

import pytest
import torch
from plain import weights

from stepstack_deepspeed import Engine, initialize
from stepstack_deepspeed._config import read_config
from stepstack_deepspeed._elsewhere import ENGINE
from stepstack_deepspeed._schedules import ScheduledRates, of_config
from stepstack_deepspeed._section import Section
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

STEPS = 3
CASES = [
    stock.Case(stage, dtype, offload, clip, accumulation)
    for stage, dtype, offload, (clip, accumulation) in product(
        range(4), stock.DTYPES, (False, True), (("binding", 2), ("loose", 1), ("off", 1))
    )
    if (stage or not offload)
]
NORM = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 5e-4}
"""Of itself, for a model of few parameters, whose gradients two engines round in different places."""
WEIGHTS = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 5e-4}
"""Of weights that move by up to 0.06."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_engine_trains_as_deepspeeds_does(case):
    """In stage 0 and 16 bits as torch does: there DeepSpeed's makes a step of its own, and scales no loss."""
    ours, theirs = outcome(case)
    if theirs["norms"] is not None:
        torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=NORM[case.dtype], atol=0)
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=WEIGHTS[case.dtype])


def outcome(case):
    return _outcomes(case.stage)[CASES.index(case)]


@cache
def _outcomes(stage):
    cases = {index: case for index, case in enumerate(CASES) if case.stage == stage}
    return on_ranks(stock.RANKS, _compare, cases, timeout=60.0)[0]


def _compare(rank, cases):
    stock.initialize(rank)
    return {
        index: (
            _train(_engine_of(case), case, rank, weights),
            _train(stock.engine_of(case), case, rank, stock.masters)
            if case.stage or case.dtype == "fp32"
            else _reference(case),
        )
        for index, case in cases.items()
    }


def _engine_of(case):
    module = stock.model()
    engine, *_ = initialize(model=module, optimizer=stock.adamw(module), config=case.config())
    return engine


def _train(engine, case, rank, weights_of):
    norms = []
    for step in range(STEPS):
        stock.backwards(engine, case, rank, step)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    known = norms[-1] is not None
    return {
        "norms": torch.tensor([float(norm) for norm in norms], dtype=torch.float64) if known else None,
        "weights": weights_of(engine),
    }


def _reference(case):
    reference = stock.Reference(case)
    norms = torch.tensor([reference.step(step) for step in range(STEPS)], dtype=torch.float64)
    return {"norms": norms, "weights": [weight.detach() for weight in reference.weights]}


WARMUPS = [
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_min_lr": 0.01}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": [0.5, 0.25], "warmup_min_lr": [0.1, 0.2]}),
    ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 12, "warmup_max_lr": 0.2}),
    ("WarmupDecayLR", {"warmup_num_steps": 9, "total_num_steps": 6}),
    ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 13, "warmup_min_ratio": 0.2}),
    ("WarmupCosineLR", {"warmup_num_steps": 9, "total_num_steps": 6, "cos_min_ratio": 0.3}),
]
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": [0.5, 0.9], "cycle_first_step_size": 4}
DECAY = {"decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": -0.1}
SCHEDULES = [
    *((name, params | {"warmup_type": kind}) for name, params in WARMUPS for kind in ("log", "linear")),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 3}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_step_rate": 2, "lr_range_test_staircase": True}),
    ("OneCycle", CYCLE),
    ("OneCycle", CYCLE | DECAY),
    ("OneCycle", CYCLE | DECAY | {"cycle_second_step_size": 7, "cycle_min_mom": 0.6, "cycle_max_mom": [0.9, 0.95]}),
    ("OneCycle", CYCLE | {"cycle_first_step_size": 7, "cycle_second_step_size": 5, "cycle_first_stair_count": 3}),
    ("OneCycle", CYCLE | {"cycle_second_stair_count": 2, "cycle_first_stair_count": 4, "decay_lr_rate": 1}),
    ("OneCycle", CYCLE | {"cycle_second_step_size": 0, "cycle_momentum": False}),
]


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_a_schedule_says_the_rates_that_deepspeeds_says(name, params):
    """And the momentum, over more than the whole of it, and again from a state in the middle."""
    from deepspeed.runtime import lr_schedules

    ours, theirs, again = (
        torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.125)])
        for _ in range(3)
    )
    of_ours, of_again = (
        ScheduledRates(
            optimizer,
            of_config(Section({"scheduler": {"type": name, "params": params}}))(optimizer),
            torch.zeros(()),
            on_device=True,
        )
        for optimizer in (ours, again)
    )
    stocks = getattr(lr_schedules, name)(theirs, **params)
    for step in range(30):
        assert of_ours.get_last_lr() == pytest.approx([group["lr"] for group in theirs.param_groups], rel=1e-6)
        for group, stock_group in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert group["betas"] == pytest.approx(stock_group["betas"], rel=1e-12)
        assert of_ours.state_dict() == stocks.state_dict()
        if step == 9:
            of_again.load_state_dict(stocks.state_dict())
        if step >= 9:
            assert of_again.get_last_lr() == of_ours.get_last_lr()
        for schedule in (of_ours, of_again):
            schedule._applied_steps += 1
            schedule.move()
        stocks.step()


def test_what_deepspeeds_reader_takes_beside_comments_is_taken_with_its_package(tmp_path):
    hjson = pytest.importorskip("hjson")
    path = tmp_path / "config.json"
    path.write_text(hjson.dumps({"train_batch_size": 4, "gradient_clipping": 1.0, "communication_data_type": "fp32"}))
    assert '"' not in path.read_text()
    assert read_config(path, 1).batch.train == 4
    path.write_text("{train_batch_size: 4\n fp16: {enabled: true\n enabled: false}}")
    with pytest.raises(ValueError, match="a key twice in one object: enabled"):
        read_config(path, 1)


def test_each_public_name_of_deepspeeds_engine_is_here_or_says_what_to_write():
    from deepspeed.runtime.engine import DeepSpeedEngine

    theirs = {name for name in dir(DeepSpeedEngine) if not name.startswith("_")}
    assert sorted(theirs - {*dir(Engine)} - ENGINE.keys()) == []
