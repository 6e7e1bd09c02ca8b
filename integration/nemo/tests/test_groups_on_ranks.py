"""Over which ranks states, means and norms go: within nodes, of any group, with other kinds of parallelism beside."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepstack_nemo import DistributedFusedAdam, GradScaler, configure_gradient_clipping
from stepstack_testing import RankError, on_ranks


def group_of(rank, *rows):
    """The group that this rank is in; all ranks make all of them."""
    groups = {tuple(row): dist.new_group(row) for row in rows}
    return next(group for row, group in groups.items() if rank in row)


def one_step(rank, **arguments):
    params = [nn.Parameter(torch.zeros(200)) for _ in range(3)]
    optimizer = DistributedFusedAdam(params, lr=1.0, betas=(0.0, 0.0), eps=1e6, **arguments)
    sum((p * (rank + 1)).sum() for p in params).backward()
    norm = optimizer.grad_norm()
    optimizer.step()
    held = sum(value["exp_avg"].numel() for value in optimizer.state.values())
    return held, norm.item() / 600**0.5, -1e6 * params[0][0].item()


@pytest.mark.parametrize("average", [True, False])
def test_states_are_spread_over_some_and_gradients_averaged_over_all(average):
    mean = 2.5 if average else 10.0
    for arguments, least, most in (
        ({}, 128, 256),
        ({"distributed_size": 2}, 256, 448),
        ({"distribute_within_nodes": True}, 128, 256),  # one host
        ({"disable_distributed_parameters": True}, 768, 768),
    ):
        for held, norm, gradient in on_ranks(
            4, lambda rank, more=arguments: one_step(rank, average_grad_sync=average, **more)
        ):
            assert held == 0 or least <= held <= most
            assert norm == pytest.approx(mean)
            assert gradient == pytest.approx(mean, rel=1e-4)


def test_apexs_own_groups_say_the_same():
    def check(rank):
        rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
        return one_step(
            rank, distributed_process_group=group_of(rank, *rows), redundant_process_group=group_of(rank, *columns)
        )

    assert [found[1:] for found in on_ranks(4, check)] == [(pytest.approx(2.5), pytest.approx(2.5, rel=1e-4))] * 4


def test_groups_that_make_no_grid_are_refused():
    def check(rank):
        return one_step(rank, distributed_process_group=group_of(rank, (0, 1), (2, 3)))

    with pytest.raises(RankError, match="must make one grid"):
        on_ranks(4, check)


def test_a_size_that_does_not_divide_is_refused():
    with pytest.raises(RankError, match="don't divide into nodes of 3"):
        on_ranks(4, lambda rank: one_step(rank, distributed_size=3))


def test_a_rank_outside_of_a_group_that_it_is_given_is_refused():
    def check(rank, argument):
        group = dist.new_group([0])
        with pytest.raises(ValueError, match=f"rank 1 is not in {argument}") if rank else nullcontext():
            one_step(rank, **{"process_group": None if rank else group, argument: group})

    for argument in ("process_group", "distributed_process_group", "redundant_process_group"):
        on_ranks(2, check, argument)


def test_ranks_that_would_spread_differently_are_refused():
    with pytest.raises(RankError, match="give all the same distributed_size"):
        on_ranks(2, lambda rank: one_step(rank, distributed_size=[None, 1][rank]))


def test_two_different_sizes_are_refused():
    with pytest.raises(RankError, match="give one of the two"):
        on_ranks(2, lambda rank: one_step(rank, distributed_size=1, distribute_within_nodes=True))


def test_flags_that_keep_a_gradient_from_being_reduced_early_are_heard():
    def check(rank):
        first, late = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        optimizer = DistributedFusedAdam([first])
        optimizer.add_param_group({"params": [_flagged(late)]})
        given = DistributedFusedAdam([nn.Parameter(torch.zeros(8)), _flagged(nn.Parameter(torch.zeros(8)))])
        for one in (optimizer, given):
            sum((param * rank).sum() for param in one.parameters()).backward()
            assert all(shard.grad is None for group in one.param_groups for shard in group["params"])
        return optimizer.grad_norm().item(), given.grad_norm().item()

    assert on_ranks(2, check) == [(pytest.approx(2.0), pytest.approx(2.0))] * 2


def _flagged(param):
    param._disable_overlap_grad_sync = True
    return param


@pytest.fixture
def with_megatron(monkeypatch):
    """Make Megatron's parallel state say: neighbours are tensor parallel, every second rank data parallel."""

    def initialised(rank):
        tensor, data = group_of(rank, (0, 1), (2, 3)), group_of(rank, (0, 2), (1, 3))
        alone = group_of(rank, (0,), (1,), (2,), (3,))
        state = SimpleNamespace(
            is_initialized=lambda: True,
            get_data_parallel_group=lambda with_context_parallel: data if with_context_parallel else None,
            get_expert_data_parallel_group=lambda: alone,
            get_model_parallel_group=lambda: tensor,
            get_expert_tensor_model_pipeline_parallel_group=lambda: dist.group.WORLD,
            get_tensor_model_parallel_rank=lambda: rank % 2,
        )
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    return initialised


def parallel_model(rank):
    """Gradients on rank r: of what is cut 1 + r, of a duplicate 10, of a shared weight 5, of an expert 100 (r + 1)."""
    cut, _, shared, expert = params = [nn.Parameter(torch.zeros(70)) for _ in range(4)]
    cut.tensor_model_parallel = shared.tensor_model_parallel = expert.tensor_model_parallel = True
    shared.shared = rank % 2 == 1
    expert.allreduce = False
    values = (1.0 + rank, 10.0, 5.0, 100.0 * (rank + 1))
    return params, sum((p * value).sum() for p, value in zip(params, values, strict=True))


# Means over data-parallel ranks: of `cut`, (1 + 3) / 2 and (2 + 4) / 2. Experts are divided by 2 too, the dense size.
LOGICAL = (70 * (2**2 + 3**2 + 10**2 + 5**2 + 50**2 * (1 + 4 + 9 + 16))) ** 0.5


@pytest.mark.parametrize("distributed_size", [None, 1])
def test_the_norm_is_the_models_with_duplicates_and_shared_weights_once(with_megatron, distributed_size):
    def check(rank):
        with_megatron(rank)
        params, loss = parallel_model(rank)
        optimizer = DistributedFusedAdam(params, betas=(0.0, 0.0), distributed_size=distributed_size)
        loss.backward()
        norms = [optimizer.grad_norm(), configure_gradient_clipping(None, optimizer, 1.0), optimizer.grad_norm()]
        dense = optimizer.grad_norm(params[:1])
        optimizer.step()
        expert = optimizer.param_groups[1]["params"][0]
        return [norm.item() for norm in norms], optimizer.state[expert]["exp_avg"].shape, dense.item()

    for norms, of_expert, dense in on_ranks(4, check):
        assert norms == [pytest.approx(LOGICAL), pytest.approx(LOGICAL), pytest.approx(1.0)]
        assert of_expert == (128,)  # whole: its data-parallel group is this rank alone
        assert dense == pytest.approx((70 * (2**2 + 3**2)) ** 0.5 / LOGICAL)


def test_other_optimizers_are_clipped_by_the_same_norm(with_megatron):
    def check(rank, fp16):
        with_megatron(rank)
        params, loss = parallel_model(rank)
        optimizer = torch.optim.AdamW(params)
        loss.backward()
        for p in params[:3]:
            dist.all_reduce(
                p.grad,
                op=dist.ReduceOp.AVG,
                group=sys.modules["megatron.core.parallel_state"].get_data_parallel_group(True),
            )
        params[3].grad /= 2
        norm = configure_gradient_clipping(None, optimizer, 1.0)
        return norm.item(), params[1].grad[0].item()

    assert on_ranks(4, check, False) == [(pytest.approx(LOGICAL), pytest.approx(10 / LOGICAL))] * 4


def test_a_skip_is_agreed_over_model_parallel_ranks(with_megatron):
    def check(rank):
        scaler = GradScaler(8.0, device="cpu")  # before Megatron's groups are there
        with_megatron(rank)
        params, loss = parallel_model(rank)
        optimizer = DistributedFusedAdam(params, lr=1.0)
        scaler.scale(loss * (torch.inf if rank == 3 else 1)).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), [p.abs().max().item() for p in params]

    assert on_ranks(4, check) == [(4.0, [0.0] * 4)] * 4


def test_experts_are_saved_and_loaded_with_the_rest(with_megatron):
    def check(rank):
        with_megatron(rank)
        states = []
        for _ in range(2):
            params, loss = parallel_model(rank)
            optimizer = DistributedFusedAdam(params, lr=0.1)
            if states:
                optimizer.load_state_dict(states[0])
            else:
                loss.backward()
                optimizer.step()
            states.append(optimizer.state_dict())
        one, other = (
            [
                entry[name]
                for entry in s["state"].values()
                if isinstance(entry, dict)
                for name in entry
                if name != "step"
            ]
            for s in states
        )
        return all(map(torch.equal, one, other)) and [len(g["params"]) for g in states[0]["param_groups"]] == [3, 1]

    assert on_ranks(4, check) == [True] * 4


def test_experts_that_come_late_have_ranks_only_if_others_were_there_before(with_megatron):
    def check(rank):
        with_megatron(rank)
        (*dense, expert), _ = parallel_model(rank)
        *_, other = parallel_model(rank)[0]
        optimizer = DistributedFusedAdam([*dense, expert])
        optimizer.add_param_group({"params": [other]})
        with pytest.raises(ValueError, match="give some to the constructor"):
            DistributedFusedAdam(parallel_model(rank)[0][:3]).add_param_group({"params": [parallel_model(rank)[0][3]]})

    on_ranks(4, check)
