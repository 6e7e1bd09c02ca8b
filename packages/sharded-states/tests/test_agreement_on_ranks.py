"""What ranks agree on in a step, and in how many reductions."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import HostSyncs, Operations, on_ranks


def norm_of(shards):
    """The plainest there is: of all ranks' pieces, the same on each."""
    total = torch.stack([torch.linalg.vector_norm(shard.to_local().float()).square() for shard in shards]).sum()
    mesh = shards[0].device_mesh
    dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return total.sqrt()


def make(params, shape, **options):
    return ShardedOptimizer(
        params,
        torch.optim.AdamW,
        lr=0.1,
        fused=True,
        mesh=init_device_mesh("cpu", shape),
        bucket_cap_mb=1e-4,
        **options,
    )


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2x2 ranks"])
def test_a_flag_from_the_norm_is_not_reduced_again(shape):
    def check(rank):
        params = [nn.Parameter(torch.ones(n)) for n in (300, 70, 7)]
        optimizer = make(params, shape)
        reduced = []
        for agreed in (True, False):
            sum(p.sum() for p in params).backward()
            norm = norm_of(optimizer.grad_shards_with_objections())
            optimizer.found_inf, optimizer.found_inf_is_agreed = (~norm.isfinite()).float(), agreed
            with Operations() as operations, HostSyncs() as syncs:
                optimizer.step()
            assert syncs == []
            reduced.append(operations["c10d.allreduce_"])
        return reduced, params[0][0].item() < 1

    assert on_ranks(torch.Size(shape).numel(), check) == [([0, len(shape)], True)] * torch.Size(shape).numel()


@pytest.mark.parametrize("what", ["infinite", "missing"])
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2x2 ranks"])
@pytest.mark.filterwarnings("ignore:.*ranks differed")
def test_a_norm_with_objections_skips_on_all_ranks_what_one_objects_to(shape, what):
    def check(rank):
        p, small = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(3))
        optimizer = make([p, small], shape)
        history = []
        for number in range(3):
            bad = number == 1 and rank == 1
            factor = float("inf") if bad and what == "infinite" else 1.0
            (p.sum() * factor + (0 if bad and what == "missing" else small.sum())).backward()
            norm = norm_of(optimizer.grad_shards_with_objections())
            optimizer.found_inf, optimizer.found_inf_is_agreed = (~norm.isfinite()).float(), True
            optimizer.step()
            optimizer.zero_grad()
            history.append((optimizer.found_inf.item(), p[0].item()))
        return history

    for history in on_ranks(torch.Size(shape).numel(), check):
        (first, a), (second, b), (third, c) = history
        assert (first, second, third) == (0, 1, 0)
        assert a == b != c


@pytest.mark.filterwarnings("ignore:.*ranks differed")
def test_a_flag_is_agreed_for_one_step_only():
    def check(rank):
        p, q = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(3))
        optimizer = make([p, q], (2,))
        optimizer.found_inf, optimizer.found_inf_is_agreed = torch.zeros(2), True
        with pytest.raises(ValueError, match="found_inf must be one number"):
            optimizer.step()
        (p.sum() + (q.sum() if rank else 0)).backward()
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        return optimizer.found_inf.item(), p.max().item()

    assert on_ranks(2, check) == [(1.0, 1.0)] * 2


def test_with_several_meshes_an_agreed_flag_is_agreed_over_all_of_them():
    def check(rank):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
        dense, expert = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        groups = [{"params": [dense]}, {"params": [expert], "mesh": grid["data"]}]
        optimizer = ShardedOptimizer(groups, torch.optim.AdamW, lr=1.0, fused=True)
        (dense.sum() + expert.sum()).backward()
        optimizer.found_inf, optimizer.found_inf_is_agreed = torch.tensor(float(rank > 1)), True  # one expert's norm
        optimizer.step()
        return dense.any().item(), expert.any().item(), optimizer.found_inf.item()

    assert on_ranks(4, check) == [(False, False, 1.0)] * 4


def test_shards_add_up_without_being_gathered_and_refuse_to_be():
    def check(rank):
        p = nn.Parameter(torch.linspace(0, 1, 100))
        optimizer = ShardedOptimizer([("w", p)], torch.optim.SGD, lr=1.0)
        p.square().sum().backward()
        shards = [*optimizer.grad_shards(), *optimizer.param_groups[0]["params"]]
        for shard in shards:
            assert isinstance(shard, DTensor)
            for gather in (
                lambda shard: shard.full_tensor(),
                lambda shard: shard.redistribute(placements=[Replicate()]),
                lambda shard: planner_helpers._create_write_items("w", shard),
                lambda shard: planner_helpers._create_chunk_list(shard),
            ):
                with pytest.raises(
                    RuntimeError, match=rf"rank {rank}: a shard of a ShardedOptimizer can't be gathered"
                ):
                    gather(shard)
        return torch.linalg.vector_norm(shards[0]).full_tensor().item()

    expected = (2 * torch.linspace(0, 1, 100)).norm().item()
    assert on_ranks(3, check) == [pytest.approx(expected)] * 3


def test_a_launched_process_without_a_process_group_is_warned(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(UserWarning, match="one of 8.*init_process_group before the optimizer is made"):
        ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD)
    on_ranks(1, lambda rank: ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD) and None)  # there is one
    monkeypatch.setenv("WORLD_SIZE", "1")
    ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD)
