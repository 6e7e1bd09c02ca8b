"""An engine before, during and after: attributes, states, checkpoints, schedules, and each part by itself."""

import warnings

import pytest
import torch

from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

CASES = [
    *(stock.Case(0, dtype) for dtype in stock.DTYPES),
    *(stock.Case(stage, "bf16", offload) for stage in (1, 2, 3) for offload in (False, True)),
    stock.Case(1, "bf16", more={"data_types": {"grad_accum_dtype": "fp32"}}),
]
OPTIMIZERS = ("AdamW", "Adam", "DeepSpeedCPUAdam", "FusedAdam")


def adam(name):
    def optimizer_of(module):
        groups = stock.groups(module)
        if name == "DeepSpeedCPUAdam":
            return stock.deepspeed.ops.adam.DeepSpeedCPUAdam(groups, eps=1e-4)
        if name == "FusedAdam":
            return stock.deepspeed.ops.adam.FusedAdam(groups, eps=1e-4)
        return getattr(torch.optim, name)(groups, eps=1e-4)

    return optimizer_of


def test_remove_puts_every_attribute_back():
    for case, changed in on_ranks(stock.RANKS, _remove, timeout=stock.TIMEOUT)[0]:
        assert changed == [], case


def _remove(rank):
    stock.initialize(rank)
    outcomes = []
    for case in CASES:
        engine = stock.engine_of(case)
        owners = (engine, engine.optimizer, getattr(engine.optimizer, "optimizer", engine.optimizer))
        before = [dict(vars(owner)) for owner in owners]
        with plug(engine):
            pass
        changed = [
            f"{type(owner).__name__}.{name}"
            for owner, attributes in zip(owners, before, strict=True)
            for name in vars(owner).keys() | attributes.keys()
            if vars(owner).get(name, stock) is not attributes.get(name, stock)
        ]
        outcomes.append((str(case), changed))
    return outcomes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_goes_on_in_either_direction(name):
    for case, distances in on_ranks(stock.RANKS, _switch, name, timeout=stock.TIMEOUT)[0]:
        assert max(distances) < 3e-7, case


def _switch(rank, name):
    stock.initialize(rank)
    outcomes = []
    for case in [
        stock.Case(0),
        stock.Case(2),
        stock.Case(2, "bf16", offload=True),
        stock.Case(3, "bf16", offload=True),
    ]:
        # DeepSpeed's FusedAdam counts one step for several parameters, which only stage 0 hands it.
        if (name == "DeepSpeedCPUAdam" and not case.offload) or (name == "FusedAdam" and not case.stage):
            continue
        engine, distances = stock.engine_of(case, optimizer=adam(name)), []
        reference = stock.Reference(case, decoupled=name != "Adam")
        for step in range(5):
            if step in (1, 4):
                plugged = plug(engine)
            if step == 3:
                plugged.remove()
            stock.backwards(engine, case, rank, step)
            engine.step()
            reference.step(step)
            distances.append(stock.distance(engine, reference.weights))
        outcomes.append((str(case), distances))
    return outcomes


def test_plugging_and_removing_between_the_micro_batches_of_a_step_is_right():
    for case, distances in on_ranks(stock.RANKS, _switch_midway, timeout=stock.TIMEOUT)[0]:
        assert max(distances) < 3e-7, case


def _switch_midway(rank):
    stock.initialize(rank)
    outcomes = []
    for case in [
        stock.Case(0, accumulation=2),
        stock.Case(2, "fp16", accumulation=2),
        stock.Case(3, "bf16", offload=True, accumulation=2),
    ]:
        engine, reference, distances = stock.engine_of(case), stock.Reference(case), []
        for step in range(3):
            for micro in range(2):
                engine.backward(stock.loss_of(engine(stock.batch(rank, step, micro).to(stock.DTYPES[case.dtype]))))
                if not micro and step == 0:
                    plugged = plug(engine)
                if not micro and step == 1:
                    plugged.remove()
                engine.step()
            reference.step(step)
            distances.append(stock.distance(engine, reference.weights))
        outcomes.append((str(case), distances))
    return outcomes


@pytest.mark.parametrize("parts", [{"norm"}, {"clip"}, {"optimizer"}, {"norm", "clip"}, {"norm", "optimizer"}], ids=str)
def test_each_part_by_itself_is_right(parts):
    for case, (norm, expected, distance) in on_ranks(stock.RANKS, _in_part, parts, timeout=stock.TIMEOUT)[0]:
        assert norm == pytest.approx(expected, rel=1e-6), case
        assert distance < 3e-7, case


def _in_part(rank, parts):
    stock.initialize(rank)
    cases = [stock.Case(stage, "bf16", offload) for stage in (1, 2, 3) for offload in (False, True)]
    return [_outcome(case, rank, **{part: part in parts for part in ("norm", "clip", "optimizer")}) for case in cases]


def test_without_our_adam_stage_0_and_bf16_optimizer_are_right_too():
    for case, (norm, expected, distance) in on_ranks(stock.RANKS, _without_adam, timeout=stock.TIMEOUT)[0]:
        assert norm == pytest.approx(expected, rel=1e-6), case
        assert distance < 3e-7, case


def _without_adam(rank):
    stock.initialize(rank)
    cases = [stock.Case(0), stock.Case(1, "bf16", more={"data_types": {"grad_accum_dtype": "fp32"}})]
    return [_outcome(case, rank, optimizer=False) for case in cases]


def _outcome(case, rank, **parts):
    """After three steps with these parts plugged: the last norm, torch's, and how far the weights are from torch's."""
    engine, reference = stock.engine_of(case), stock.Reference(case)
    with plug(engine, **parts):
        for step in range(3):
            stock.backwards(engine, case, rank, step)
            engine.step()
            norm = reference.step(step)
    found = float(engine.get_global_grad_norm())
    return str(case), (found, norm, stock.distance(engine, reference.weights))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_deepspeeds_fused_optimizer_of_stage_0_trains_as_torch_does(dtype):
    for norm, expected, distance in on_ranks(stock.RANKS, _fused, dtype, timeout=stock.TIMEOUT):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert distance < 3e-7


def _fused(rank, dtype):
    stock.initialize(rank)
    case = stock.Case(0, dtype)
    engine, reference = stock.engine_of(case, optimizer=adam("FusedAdam")), stock.Reference(case)
    assert type(engine.optimizer).__name__ == "FP16_Optimizer"
    with plug(engine):
        for step in range(3):
            stock.backwards(engine, case, rank, step)
            engine.step()
            norm = reference.step(step)
    return float(engine.get_global_grad_norm()), norm, stock.distance(engine, reference.weights)


def test_a_checkpoint_of_a_plugged_engine_is_deepspeeds(tmp_path):
    for case, (distance, moments) in on_ranks(stock.RANKS, _save, str(tmp_path), timeout=stock.TIMEOUT)[0]:
        assert distance < 3e-7, case
        assert moments, case


def _save(rank, folder):
    stock.initialize(rank)
    outcomes = []
    for number, case in enumerate([stock.Case(2, "bf16"), stock.Case(2, "bf16", offload=True), stock.Case(3, "bf16")]):
        name = "DeepSpeedCPUAdam" if case.offload else "AdamW"
        first, second = (stock.engine_of(case, optimizer=adam(name)) for _ in range(2))
        reference = stock.Reference(case)
        with plug(first):
            for step in range(2):
                stock.backwards(first, case, rank, step)
                first.step()
                reference.step(step)
            first.save_checkpoint(folder, tag=str(number))
        second.load_checkpoint(folder, tag=str(number))
        stock.backwards(second, case, rank, 2)
        second.step()
        reference.step(2)
        states = second.optimizer.optimizer.state.values()
        outcomes.append(
            (str(case), (stock.distance(second, reference.weights), all(state["step"] == 3 for state in states)))
        )
    return outcomes


def test_schedules_see_the_steps():
    for warned, rates in on_ranks(stock.RANKS, _schedule, timeout=stock.TIMEOUT):
        assert warned == []
        assert rates == [stock.LR / 2, stock.LR / 4, stock.LR / 8]


def _schedule(rank):
    stock.initialize(rank)
    case, rates = stock.Case(2), []
    engine = stock.engine_of(case, lr_scheduler=lambda inner: torch.optim.lr_scheduler.ExponentialLR(inner, 0.5))
    with plug(engine), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            stock.backwards(engine, case, rank, step)
            engine.step()
            rates.append(engine.get_lr()[0])
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)], rates


def test_what_is_not_handled_is_refused_by_name():
    refusals = on_ranks(stock.RANKS, _refuse, timeout=stock.TIMEOUT)[0]
    assert "can't be stepped by FusedAdamW" in refusals["sgd"]
    assert "plugged already" in refusals["twice"]
    assert "measures and clips within one step" in refusals["half of a step"]
    assert "would replace nothing" in refusals["nothing"]


def _refuse(rank):
    stock.initialize(rank)
    engine = stock.engine_of(stock.Case(2))
    refusals = {"sgd": _refusal(stock.engine_of(stock.Case(2), optimizer=_sgd))}
    with plug(engine):
        refusals["twice"] = _refusal(engine)
    refusals["half of a step"] = _refusal(stock.engine_of(stock.Case(0)), norm=False)
    refusals["nothing"] = _refusal(engine, norm=False, clip=False, optimizer=False)
    return refusals


def _refusal(engine, **parts):
    before = dict(vars(engine.optimizer))
    with pytest.raises((TypeError, ValueError)) as caught:
        plug(engine, **parts)
    assert all(vars(engine.optimizer)[name] is value for name, value in before.items())
    return str(caught.value)


def _sgd(module):
    return torch.optim.SGD(stock.groups(module), lr=0.1)
