"""The engine on two ranks: what they agree on."""

from itertools import chain

import pytest
import torch
from plain import RANKS, batch, config, engine_of, net, train
from torch import nn

from stepstack_deepspeed import initialize
from stepstack_deepspeed._fsdp import blocks
from stepstack_testing import HostSyncs, Operations, on_ranks

STAGES = range(4)
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}


def values_of(engine):
    """This rank's numbers, whatever they are cut into."""
    return [getattr(param, "_local_tensor", param).detach().clone() for param in engine.module.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(stage):
    def on_rank(rank):
        said = []
        for dtype in ("fp32", "bf16", "fp16"):
            engine = engine_of(stage=stage, dtype=dtype, scheduler=WARMUP)
            train(engine, rank)
            before, lr = values_of(engine), engine.get_lr()
            for value in (float("nan"), float("inf"), 1e20 if dtype == "fp16" else -float("inf")):
                loss = engine(*batch(rank, 1))
                engine.backward(loss * value if rank == 1 else loss)
                engine.step()
                said.append(
                    not engine.was_step_applied()
                    and not engine.get_global_grad_norm().isfinite()
                    and all(map(torch.equal, before, values_of(engine)))
                    and engine.get_lr() == lr
                )
            train(engine, rank, 2)
            said.append(engine.was_step_applied() and engine.skipped_steps == 3 and engine.global_steps == 5)
        return said

    assert on_ranks(RANKS, on_rank) == [[True] * 12] * RANKS


@pytest.mark.parametrize("stage", STAGES)
def test_a_huge_gradient_on_one_rank_is_clipped(stage):
    def on_rank(rank):
        engine = engine_of(stage=stage)
        engine.backward(engine(*batch(rank, 1)) * (1e20 if rank else 1.0))
        engine.step()
        return engine.was_step_applied(), engine.get_global_grad_norm().item(), values_of(engine)

    for applied, norm, values in on_ranks(RANKS, on_rank):
        assert applied
        assert 1e19 < norm < 1e21
        assert all(value.isfinite().all() for value in values)


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_waits_for_the_device(stage):
    def on_rank(rank):
        waits = []
        for dtype in ("fp32", "bf16", "fp16"):
            for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
                engine = engine_of(
                    dtype=dtype, accumulation=2, scheduler=WARMUP, zero_optimization={"stage": stage, **offload}
                )
                train(engine, rank)
                with HostSyncs() as syncs:
                    train(engine, rank, 1)
                    train(engine, rank, 2)
                waits += syncs
        return waits

    assert on_ranks(RANKS, on_rank) == [[]] * RANKS


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_how_often_ranks_talk_does_not_grow_with_the_parameters(stage):
    def on_rank(rank):
        counts = []
        for number in (2, 20):
            engine = engine_of(model=net(blocks=number), stage=stage, accumulation=2)
            train(engine, rank)
            with Operations() as operations:
                train(engine, rank, 1)
            counts.append(operations.collectives())
        return counts

    for few, many in on_ranks(RANKS, on_rank):
        assert few == many
        assert 0 < sum(few.values()) < 8


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_start_with_the_first_ones_values(stage):
    def on_rank(rank):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])[0], nn.Linear(3, 3))
        model[0].requires_grad_(False)
        engine, *_ = initialize(model=model, config=config(stage=stage))
        return [whole(param) for param in engine.module.parameters()]

    first, second = on_ranks(RANKS, on_rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    assert all(map(torch.equal, first, model.parameters()))
    assert all(map(torch.equal, first, second))


def whole(param):
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def test_a_part_of_the_states_may_be_offloaded():
    def on_rank(rank):
        norms, params = [], []
        for ratio in (0.0, 0.3, 1.0):
            zero = {"stage": 2, "reduce_bucket_size": 300, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
            engine = engine_of(zero_optimization=zero, scheduler=WARMUP)
            for step in range(3):
                train(engine, rank, step)
            norms.append(engine.get_global_grad_norm().item())
            params.append(torch.cat([param.detach().flatten() for param in engine.module.parameters()]))
        return norms, params

    for norms, params in on_ranks(RANKS, on_rank):
        assert len(set(norms)) == 1
        assert torch.equal(params[0], params[1])
        assert torch.equal(params[0], params[2])


def test_gradients_may_be_summed_or_divided_before_the_sum():
    def on_rank(rank):
        norms = []
        for more in (
            {},
            {"gradient_allreduce_op": "sum"},
            {"prescale_gradients": True},
            {"gradient_predivide_factor": 1.5},
        ):
            engine = engine_of(**more)
            train(engine, rank)
            norms.append(engine.get_global_grad_norm().item())
        return norms

    for mean, summed, *before in on_ranks(RANKS, on_rank):
        assert summed == pytest.approx(2 * mean)
        assert before == pytest.approx([mean, mean])


@pytest.mark.parametrize("stage", [0, 1])
def test_in_no_sync_nothing_is_reduced_until_a_backward_outside(stage):
    def on_rank(rank):
        engine = engine_of(stage=stage)
        with Operations() as inside, engine.no_sync():
            engine.backward(engine(*batch(rank, 0)) / 2)
        engine.backward(engine(*batch(rank, 1)) / 2)
        engine.step()
        counted = engine_of(stage=stage, accumulation=2)
        for step in range(2):
            counted.backward(counted(*batch(rank, step)))
            counted.step()
        return inside.collectives(), engine.get_global_grad_norm() == counted.get_global_grad_norm()

    assert on_ranks(RANKS, on_rank) == [({}, True)] * RANKS


def test_the_caller_s_optimizer_is_sharded_in_stage_3_too():
    def on_rank(rank):
        ends = []
        for stage in (1, 3):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            engine, sharded, *_ = initialize(model=model, config=config(stage=stage), optimizer=optimizer)
            assert isinstance(sharded, torch.optim.SGD) == (stage == 3)
            for step in range(3):
                train(engine, rank, step)
            ends.append(torch.cat([whole(param).flatten() for param in engine.module.parameters()]))
        return (ends[0] - ends[1]).abs().max().item()

    assert max(on_ranks(RANKS, on_rank)) < 1e-6


def test_each_rank_loads_its_share_of_the_data():
    def on_rank(rank):
        data = torch.utils.data.TensorDataset(torch.arange(16))
        _, _, dataloader, _ = initialize(model=net(), config=config(), training_data=data)
        return [x.tolist() for (x,) in dataloader]

    first, second = on_ranks(RANKS, on_rank)
    assert len(first) == len(second) == 2
    assert sorted(chain(*first, *second)) == list(range(16))


def test_batch_sizes_count_the_ranks():
    def on_rank(rank):
        del rank
        engine, *_ = initialize(
            model=net(), config={"train_batch_size": 12, "optimizer": {"type": "Adam"}, "gradient_clipping": 0}
        )
        return engine.train_micro_batch_size_per_gpu()

    assert on_ranks(RANKS, on_rank) == [6, 6]


def test_ranks_with_different_configs_are_told():
    def on_rank(rank):
        with pytest.raises(ValueError, match=r"config of rank 1 is another than that of rank 0: batch .*gradient_cl"):
            engine_of(accumulation=1 + rank, clip=1.0 + rank)

    on_ranks(RANKS, on_rank)


def test_in_stage_3_blocks_are_gathered_one_by_one_and_stay_if_the_model_is_small():
    def on_rank(rank):
        gathers = []
        for live in (None, 10):
            zero = {"stage": 3, "stage3_max_live_parameters": live}
            engine = engine_of(zero_optimization=zero)
            train(engine, rank)
            with Operations() as forward:
                loss = engine(*batch(rank, 1))
            with Operations() as backward:
                engine.backward(loss)
            gathers += [forward["c10d._allgather_base_"], backward["c10d._allgather_base_"]]
        return gathers

    assert on_ranks(RANKS, on_rank) == [[3, 0, 3, 2]] * RANKS  # the model itself, and two blocks


@pytest.mark.parametrize("stage", STAGES)
def test_a_look_at_the_loss_between_backward_and_step_leaves_nothing_behind(stage):
    def on_rank(rank):
        engine, curious = engine_of(stage=stage), engine_of(stage=stage)
        losses = []
        for step in range(3):
            train(engine, rank, step)
            curious.backward(curious(*batch(rank, step)))
            with torch.no_grad():
                curious(*batch(rank, 9))
            curious.step()
            with torch.no_grad():
                losses.append([each(*batch(rank, 9)).item() for each in (engine, curious)])
        return losses

    for losses in on_ranks(RANKS, on_rank):
        assert [one for one, _ in losses] == [other for _, other in losses]
        assert len({one for one, _ in losses}) == 3


def test_a_block_that_shares_a_parameter_with_the_rest_is_none():
    model = net()
    assert blocks(model) == list(model.blocks)
    model.blocks[0][0].bias = model.first.bias
    assert blocks(model) == [model.blocks[1]]


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_gradient_is_skipped(stage):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.unused = net(), nn.Linear(3, 3)

        def forward(self, *batch):
            return self.net(*batch)

    def on_rank(rank):
        engine = engine_of(model=Unused(), stage=stage)
        before = whole(engine.module.unused.weight).clone()
        train(engine, rank)
        return engine.was_step_applied(), torch.equal(whole(engine.module.unused.weight), before)

    assert on_ranks(RANKS, on_rank) == [(True, True)] * RANKS
