"""Gradients that are not finite, huge, zero, edited by hand, or on one rank only."""

import copy
import math

import pytest
import torch

from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = [
    *(stock.Case(stage, dtype) for stage in range(4) for dtype in stock.DTYPES),
    *(stock.Case(stage, dtype, offload=True) for stage in (1, 2, 3) for dtype in stock.DTYPES),
    *(stock.Case(stage, "bf16", more=UNCHECKED) for stage in (0, 3)),  # where DeepSpeed checks all the same
    stock.Case(1, "bf16", more=FP32_GRADS),
    *(stock.Case(stage, "bf16", offload=True, more=FP32_GRADS) for stage in (1, 2)),
    stock.Case(2, zero={"compute_grad_norm": False}, clip="off"),
]


def launch(function, *arguments):
    """What the ranks say, who all say the same."""
    results = on_ranks(stock.RANKS, function, *arguments, timeout=stock.TIMEOUT)
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_everywhere(factor):
    for case, outcome in zip(CASES, launch(_spoil, factor), strict=True):
        assert outcome == {
            "applied": False,
            "skipped": 1,
            "norm": (torch.float32, (), False),
            "changed": [],
            "next one applied": True,
        }, case


def _spoil(rank, factor):
    stock.initialize(rank)
    outcomes = []
    for case in CASES:
        engine = stock.engine_of(case, lr_scheduler=_halving)
        with plug(engine):
            _step(engine, case, rank, 0)
            before = _all_of(engine)
            _step(engine, case, rank, 1, factor if rank == 1 else 1.0)
            after, norm = _all_of(engine), engine.get_global_grad_norm()
            outcomes.append(
                {
                    "applied": engine.was_step_applied(),
                    "skipped": engine.skipped_steps,
                    "norm": (norm.dtype, tuple(norm.shape), bool(norm.isfinite())),
                    "changed": [name for name in before if not _same(before[name], after[name])],
                }
            )
            _step(engine, case, rank, 2)
            outcomes[-1]["next one applied"] = engine.was_step_applied()
    return outcomes


def test_a_norm_whose_square_is_beyond_fp32_is_a_norm():
    for case, (norm, expected, distance, applied) in launch(_enormous):
        assert applied, case
        assert norm == pytest.approx(expected, rel=1e-5), case
        assert distance < 1e-6, case


def _enormous(rank):
    stock.initialize(rank)
    outcomes = []
    for case in (stock.Case(stage, offload=offload) for stage in range(4) for offload in (False, True)[: 1 + stage]):
        engine, reference = stock.engine_of(case), stock.Reference(case)
        with plug(engine):
            _step(engine, case, rank, 0, 1e20)
        norm = reference.step(0)
        # Clipped, what is left of 1e20 is what is left of 1.
        distance = stock.distance(engine, reference.weights)
        outcomes.append(
            (str(case), (float(engine.get_global_grad_norm()), 1e20 * norm, distance, engine.was_step_applied()))
        )
    return outcomes


def test_gradients_that_are_zero_have_a_norm_of_zero_and_leave_the_decay():
    for case, (norm, expected, weights) in launch(_vanish):
        assert norm == 0, case
        assert weights == pytest.approx(expected, abs=1e-6), case


def _vanish(rank):
    stock.initialize(rank)
    outcomes = []
    for case in CASES:
        engine = stock.engine_of(case)
        first = [param.detach().clone() for param in stock.Reference(case).weights]
        with plug(engine):
            _step(engine, case, rank, 0, 0.0)
        decay = [1 - stock.LR * 0.1 if weight.ndim > 1 else 1.0 for weight in first]
        expected = sum((weight * factor).sum().item() for weight, factor in zip(first, decay, strict=True))
        found = sum(weight.sum().item() for weight in stock.masters(engine))
        outcomes.append((str(case), (float(engine.get_global_grad_norm()), expected, found)))
    return outcomes


def test_gradients_that_were_edited_after_backward_count():
    for case, (norm, expected, distance) in launch(_edit):
        assert norm == pytest.approx(expected, rel=1e-6), case
        assert distance < 3e-7, case


def _edit(rank):
    stock.initialize(rank)
    outcomes = []
    for case in (stock.Case(stage, offload=offload) for stage in (1, 2, 3) for offload in (False, True)):
        engine, reference = stock.engine_of(case), stock.Reference(case)
        with plug(engine):
            for step in range(2):
                stock.backwards(engine, case, rank, step)
                for param in engine.module.parameters():
                    _triple_grad(param, case.stage)
                engine.step()
                expected = 3 * reference.step(step)  # clipped, it is the same
        outcomes.append(
            (str(case), (float(engine.get_global_grad_norm()), expected, stock.distance(engine, reference.weights)))
        )
    return outcomes


def _triple_grad(param, stage):
    """By whichever call there is for it; of a whole gradient, stage 3 can't set one that does not divide evenly."""
    utils = stock.deepspeed.utils
    if stage == 3 and param.ds_numel % stock.RANKS:
        utils.safe_set_local_grad(param, 3 * utils.safe_get_local_grad(param))
    else:
        utils.safe_set_full_grad(param, 3 * utils.safe_get_full_grad(param))


def test_a_rank_with_an_empty_partition_takes_part():
    for case, (norms, distance) in launch(_tiny):
        assert norms[0] == pytest.approx(norms[1], rel=1e-6), case
        assert distance < 3e-7, case


def _tiny(rank):
    stock.initialize(rank)
    outcomes = []
    for stage in range(4):
        for offload in (False, True)[: 1 + stage]:
            case = stock.Case(stage, offload=offload)
            small = torch.nn.Sequential(torch.nn.Linear(7, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
            for param in small.parameters():
                param.data.fill_(0.5)
            plain = copy.deepcopy(small)
            engine = stock.engine_of(case, module=small, optimizer=_one_by_one)
            optimizer = _one_by_one(plain)
            with plug(engine):
                for step in range(2):
                    stock.backwards(engine, case, rank, step)
                    engine.step()
                    plain.zero_grad()
                    for other in range(stock.RANKS):
                        (stock.loss_of(plain(stock.batch(other, step, 0))) / stock.RANKS).backward()
                    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.max_norm)
                    optimizer.step()
            distance = stock.distance(engine, plain.parameters())
            outcomes.append((str(case), ((float(engine.get_global_grad_norm()), float(norm)), distance)))
    return outcomes


def _one_by_one(module):
    return torch.optim.AdamW([{"params": [param]} for param in module.parameters()], lr=0.01, eps=1e-4)


def _halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def _step(engine, case, rank, step, factor=1.0):
    output = engine(stock.batch(rank, step, 0).to(stock.DTYPES[case.dtype]))
    engine.backward(stock.loss_of(output) * factor)
    engine.step()


def _all_of(engine):
    """Weights, the inner optimizer's states, learning rates."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = copy.deepcopy([dict(state) for state in inner.state.values()])
    found = {f"weight {number}": weight for number, weight in enumerate(stock.masters(engine))}
    found |= {f"model {number}": param.detach().clone() for number, param in enumerate(engine.module.parameters())}
    for number, state in enumerate(states):
        found |= {f"{name} {number}": value for name, value in state.items()}
    return found | {f"lr {number}": group["lr"] for number, group in enumerate(inner.param_groups)}


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
