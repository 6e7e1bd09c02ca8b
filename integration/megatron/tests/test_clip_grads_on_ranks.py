"""Megatron's functions of gradients, on ranks that hold different pieces. None of this needs Megatron."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stepstack_megatron import clip_grad_by_total_norm_fp32, count_zeros_fp32, get_grad_norm_fp32
from stepstack_testing import HostSyncs, Operations, RankError, on_ranks


def piece(rank):
    return torch.randn(100, generator=torch.Generator().manual_seed(rank))


def parameter(grad, **marks):
    param = torch.nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    for mark, value in marks.items():
        setattr(param, mark, value)
    return param


@pytest.mark.parametrize("norm_type", [1, 2, 3.5, math.inf])
def test_the_norm_is_that_of_all_pieces_and_costs_one_reduction_and_no_wait(norm_type):
    def run(rank):
        grads = [piece(rank), piece(rank + 2).bfloat16()] if rank else [piece(rank)]
        with HostSyncs() as syncs, Operations() as operations:
            norm = get_grad_norm_fp32(grads, norm_type, dist.group.WORLD)
        assert syncs == []
        assert sum(operations.collectives().values()) == 1
        return norm

    whole = torch.cat([piece(0), piece(1), piece(3).bfloat16().float()]).double()
    expected = torch.linalg.vector_norm(whole, norm_type).item()
    for norm in on_ranks(2, run):
        assert norm.shape == ()
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_gradients_takes_part_and_none_is_the_whole_world():
    def run(rank):
        return (
            get_grad_norm_fp32([piece(0)] if rank else []).item(),
            get_grad_norm_fp32([] if rank else piece(0), math.inf).item(),
            count_zeros_fp32([parameter(torch.zeros(7))] if rank else [], None, tp_group=alone()).item(),
        )

    for norm, largest, zeros in on_ranks(2, run):
        assert norm == pytest.approx(piece(0).norm().item())
        assert largest == piece(0).abs().max().item()
        assert zeros == 7


def test_a_norm_whose_square_is_beyond_fp32_is_right():
    def run(rank):
        return get_grad_norm_fp32([torch.full((4,), 3e18 * 10)], 2, dist.group.WORLD).item()

    assert on_ranks(2, run) == [pytest.approx(8**0.5 * 3e19, rel=1e-6)] * 2


def test_zeros_leave_out_what_is_shared_or_held_by_another_rank_of_the_tensor_parallel_group():
    def run(rank):
        params = [
            parameter(torch.tensor([0.0, 1.0, -0.0]), tensor_model_parallel=True),
            parameter(torch.zeros(10)),  # a duplicate
            parameter(torch.zeros(100), shared=True, tensor_model_parallel=True),
            parameter(torch.tensor([torch.nan, torch.inf, 0.0]), tensor_model_parallel=True),
            torch.nn.Parameter(torch.zeros(1000)),
        ]
        with HostSyncs() as syncs, Operations() as operations:
            zeros = count_zeros_fp32(params, dist.group.WORLD, tp_group=dist.group.WORLD)
        assert syncs == []
        assert sum(operations.collectives().values()) == 1
        assert (zeros.dtype, zeros.shape) == (torch.int64, ())
        return zeros.item()

    assert on_ranks(2, run) == [2 * 3 + 10] * 2


def test_dtensors_are_added_up_over_their_mesh_as_well():
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    whole[:3] = 0

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
        mine = whole.chunk(2)[rank // 2]  # the model-parallel group holds two pieces
        param = torch.nn.Parameter(distribute_tensor(mine, mesh["data"], [Shard(0)], src_data_rank=None))
        param.grad = param.detach().clone()
        group = mesh.get_group("model")
        before = get_grad_norm_fp32([param.grad], 2, group)
        zeros = count_zeros_fp32([param], group, tp_group=alone())
        clip_grad_by_total_norm_fp32([param], 1.0, before)
        return before.item(), zeros.item(), get_grad_norm_fp32([param.grad], 2, group).item()

    for before, zeros, after in on_ranks(4, run):
        assert before == pytest.approx(whole.double().norm().item(), rel=1e-6)
        assert zeros == 18
        assert after == pytest.approx(1.0, rel=1e-5)


def test_without_a_tensor_parallel_group_and_without_megatron_the_count_is_refused():
    def run(rank):
        count_zeros_fp32([parameter(torch.zeros(2))], dist.group.WORLD)

    with pytest.raises(RankError, match="pass tp_group"):
        on_ranks(1, run)


def alone():
    """A group of each rank by itself, so that all of them count what they hold."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
