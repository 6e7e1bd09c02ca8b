"""What users and DeepSpeed's own methods ask of a plugged engine, at any time, beside what a stock one says."""

import pytest
import torch
from test_stock_unused import Heads, adamw

from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

ASKED = [stock.Case(2, "bf16"), *(stock.Case(stage, "bf16", offload=True) for stage in (1, 2, 3)), stock.Case(3)]
UNMANAGED = [stock.Case(stage, offload=offload, clip="loose") for stage in (1, 2, 3) for offload in (False, True)]


@pytest.fixture(scope="module")
def outcomes():
    return on_ranks(stock.RANKS, _ask_everything, timeout=stock.TIMEOUT)


@pytest.mark.parametrize("case", ASKED, ids=str)
def test_between_backward_and_step_the_answers_are_those_of_deepspeed(outcomes, case):
    for rank in outcomes:
        plain, plugged = rank["answers"][str(case)]
        assert plain.keys() == plugged.keys()
        for name in plain:
            torch.testing.assert_close(plugged[name], plain[name], rtol=1e-6, atol=1e-7, check_dtype=False, msg=name)
        assert bool(plugged["overflow with NaN"])


@pytest.mark.parametrize("case", ASKED, ids=str)
def test_a_plug_removed_between_backward_and_step_leaves_norms_to_clip_by(outcomes, case):
    for rank in outcomes:
        assert rank["removed"][str(case)] < 3e-7


def test_unused_parameters_are_an_error_on_all_ranks_where_the_config_forbids_them(outcomes):
    for rank in outcomes:
        assert "ignore_unused_parameters: false forbids" in rank["unused"]
    assert any("second.weight" in rank["unused"] for rank in outcomes)


def test_an_elastic_checkpoint_of_a_plugged_engine_loads_into_any(outcomes):
    for rank in outcomes:
        assert rank["elastic"] == pytest.approx([0.0] * 4, abs=3e-7)


@pytest.mark.parametrize("case", UNMANAGED, ids=str)
def test_a_parameter_unused_for_a_window_is_zero_however_windows_are_managed(outcomes, case):
    for rank in outcomes:
        assert rank["managed"][str(case)] < 3e-7


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_that_is_not_to_be_checked_is_made_as_deepspeed_makes_it(outcomes, offload):
    for rank in outcomes:
        (plain, plain_applied), (plugged, plugged_applied) = rank["unchecked"][offload]
        assert plain_applied
        assert plugged_applied
        torch.testing.assert_close(plugged, plain, rtol=1e-6, atol=3e-7, equal_nan=True)


def test_clipping_by_hand_in_stage_0_clips(outcomes):
    for rank in outcomes:
        assert rank["by hand"] == pytest.approx(stock.MAX_NORM["binding"], rel=1e-4)


def _ask_everything(rank):
    stock.initialize(rank)
    return {
        "answers": {str(case): [_answers(case, rank, change) for change in (_leave, plug)] for case in ASKED},
        "removed": {str(case): _removed(case, rank) for case in ASKED},
        "unused": _unused(rank),
        "elastic": _elastic(rank),
        "managed": {str(case): _managed(case, rank) for case in UNMANAGED},
        "unchecked": {offload: [_unchecked(offload, rank, change) for change in (_leave, plug)] for offload in (0, 1)},
        "by hand": _by_hand(rank),
    }


def _leave(engine):
    return None


def _answers(case, rank, change):
    engine = stock.engine_of(case)
    change(engine)
    stock.backwards(engine, case, rank, 0)
    optimizer, utils, answers = engine.optimizer, stock.deepspeed.utils, {}
    param = next(engine.module.parameters())

    def ask(when):
        if case.stage == 3:
            answers[f"norms {when}"] = torch.stack([norm.double() for norm in optimizer._get_norm_groups()])
        else:
            answers[f"norms {when}"] = optimizer.scaled_global_norm()
        answers[f"overflow {when}"] = torch.tensor(optimizer.has_overflow())
        optimizer.check_overflow()
        answers[f"overflow is {when}"] = torch.tensor(optimizer.overflow)

    ask("at first")
    ask("again")
    if case.stage == 3:
        answers["norm of a tensor"] = optimizer._constant_buffered_norm2(torch.ones(9))
        answers["local gradient"] = utils.safe_get_local_grad(param).clone()
        utils.safe_set_local_grad(param, answers["local gradient"] / 2)
    answers["gradient"] = utils.safe_get_full_grad(param).clone()
    engine.step()
    answers["weights"] = torch.cat([weight.flatten() for weight in stock.masters(engine)])
    answers["norm of the step"] = torch.as_tensor(engine.get_global_grad_norm()) * (case.stage < 3)
    engine.backward(stock.loss_of(engine(stock.batch(rank, 1, 0).to(stock.DTYPES[case.dtype]) * torch.nan)))
    answers["overflow with NaN"] = torch.tensor(optimizer.has_overflow())
    return answers


def _removed(case, rank):
    """How far a training is from torch's of which the plug is removed just before a step."""
    engine, reference = stock.engine_of(case), stock.Reference(case)
    plugged = plug(engine)
    for step in range(2):
        stock.backwards(engine, case, rank, step)
        if step:
            plugged.remove()
        engine.step()
        reference.step(step)
    return stock.distance(engine, reference.weights)


def _unused(rank):
    case = stock.Case(2, offload=True, zero={"ignore_unused_parameters": False})
    engine = stock.engine_of(case, optimizer=adamw, module=Heads())
    with plug(engine):
        for step in range(2):
            engine.backward(engine(stock.batch(rank, step, 0), both=step == 0).square().mean())
            if step:
                with pytest.raises(AssertionError) as caught:
                    engine.step()
            else:
                engine.step()
    return str(caught.value)


def _elastic(rank):
    import tempfile

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    case = stock.Case(2, "bf16", zero={"elastic_checkpoint": True})

    def fused_adam(module):
        return stock.deepspeed.ops.adam.FusedAdam(stock.groups(module), eps=1e-4)

    first, *others = (stock.engine_of(case, optimizer=fused_adam) for _ in range(4))
    reference, distances = stock.Reference(case), []
    plugged = plug(first)
    for step in range(2):
        stock.backwards(first, case, rank, step)
        first.step()
        reference.step(step)
    first.save_checkpoint(folder[0], tag="plugged")
    plugged.remove()
    first.save_checkpoint(folder[0], tag="removed")
    plug(others[0])
    others[0].load_checkpoint(folder[0], tag="plugged")
    others[1].load_checkpoint(folder[0], tag="plugged")
    others[2].load_checkpoint(folder[0], tag="removed")
    reference.step(2)
    for engine in (first, *others):
        stock.backwards(engine, case, rank, 2)
        engine.step()
        distances.append(stock.distance(engine, reference.weights))
    return distances


def _managed(case, rank):
    """The distance of two plugged trainings, the one with windows of the engine, the other with its own."""
    weights = []
    for managed in (True, False):
        more = {} if managed else {"managed_gradient_accumulation": False}
        windows = stock.Case(case.stage, offload=case.offload, clip=case.clip, accumulation=2, more=more)
        engine = stock.engine_of(windows, optimizer=adamw, module=Heads())
        plug(engine)
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(stock.batch(rank, step, micro), both=step != 1).square().mean())
                if managed or micro:
                    engine.step()
        weights.append(stock.masters(engine))
    return max((a - b).abs().max().item() for a, b in zip(*weights, strict=True))


def _unchecked(offload, rank, change):
    case = stock.Case(2, offload=bool(offload), more={"bf16": {"enabled": True, "check_grad_overflow": False}})
    engine = stock.engine_of(case)
    change(engine)
    optimizer = engine.optimizer
    engine.backward(stock.loss_of(engine(stock.batch(rank, 0, 0).bfloat16())))
    if offload:
        grads = [param.grad for param in optimizer.single_partition_of_fp32_groups]
    else:
        grads = optimizer.averaged_gradients[0]
    grads[0].view(-1)[0] = torch.nan if rank else torch.inf
    if offload:
        for name in optimizer.norm_for_param_grads:
            optimizer.norm_for_param_grads[name] = torch.tensor(torch.inf)
    engine.step()
    return optimizer.single_partition_of_fp32_groups[0].detach().clone(), engine.was_step_applied()


def _by_hand(rank):
    case = stock.Case(0)
    engine = stock.engine_of(case)
    with plug(engine):
        stock.backwards(engine, case, rank, 0)
        engine.clip_fp32_gradients()
        return torch.nn.utils.get_total_norm([param.grad for param in engine.module.parameters()]).item()
