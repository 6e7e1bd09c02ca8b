import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from stepstack_clip import clip_grad_norm_, clip_grad_value_
from stepstack_gradnorm import Part
from stepstack_testing import HostSyncs, on_ranks


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameter_with(grad):
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def test_any_mix_of_meshes_is_clipped_as_one_vector():
    values = [random(5, 3), random(4, seed=1), random(6, seed=2)]

    def run(rank):
        square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
        grads = [
            distribute_tensor(values[0], square, [Replicate(), Shard(0)]),
            distribute_tensor(values[1], line, [Shard(0)]),
            values[2].clone(),
        ]
        with HostSyncs() as syncs:
            norm = clip_grad_norm_([parameter_with(grad) for grad in grads], 0.5)
        assert syncs == []
        return norm, grads[0].full_tensor(), grads[1].full_tensor(), grads[2]

    references = [parameter_with(value.clone()) for value in values]
    expected = (torch.nn.utils.clip_grad_norm_(references, 0.5), *[reference.grad for reference in references])
    for result in on_ranks(4, run):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)


def test_parts_of_parameters():
    """An expert on each rank and a layer that both hold; the experts are in `parameters` too, as a model has them."""

    def run(rank):
        expert, layer = parameter_with(torch.tensor([[2.0, 4.0], [6.0, 8.0]][rank])), parameter_with(torch.ones(1))
        norm = clip_grad_norm_([layer, expert], 1.1, parts=[Part([expert], sharded_over=dist.group.WORLD)])
        return norm.item(), [*layer.grad.tolist(), *expert.grad.tolist()]

    values = [(11.0, pytest.approx([0.1, 0.2, 0.4])), (11.0, pytest.approx([0.1, 0.6, 0.8]))]
    assert on_ranks(2, run) == values


def test_a_rank_outside_of_the_group_of_a_part_clips_by_the_same_norm():
    def run(rank):
        pair = dist.new_group([0, 1])
        shared, piece = parameter_with(torch.tensor([30.0])), parameter_with(torch.tensor([40.0 if rank == 0 else 0.0]))
        parts = [Part([piece] if rank < 2 else [], pair)]
        if rank == 2:
            with pytest.raises(ValueError, match="rank 2 is outside"):
                clip_grad_norm_([shared], 5.0, parts=parts)
        norm = clip_grad_norm_([shared], 5.0, parts=parts, agree_over=dist.group.WORLD)
        return norm.item(), shared.grad.item()

    assert on_ranks(3, run) == [(50.0, pytest.approx(3.0))] * 3


def test_shards_of_an_optimizer_are_clipped_by_their_common_norm():
    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        shards = [torch.tensor([30.0]) if rank == 0 else torch.empty(0), torch.tensor([0.0, 40.0][rank : rank + 1])]
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter.grad_shard = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
        return clip_grad_norm_(parameters, 5.0).item(), [shard.tolist() for shard in shards]

    assert on_ranks(2, run) == [(50.0, [[pytest.approx(3.0)], [0.0]]), (50.0, [[], [pytest.approx(4.0)]])]


def test_all_ranks_raise_or_zero_when_one_has_a_bad_element():
    def run(rank):
        def part(value):
            return [Part([parameter_with(value)], sharded_over=dist.group.WORLD)]

        grad = torch.tensor([1.0, math.nan if rank == 1 else 2.0])
        with pytest.raises(RuntimeError, match="nan"):
            clip_grad_norm_([], 1.0, parts=part(grad), nonfinite="raise")
        untouched = grad.tolist()
        clip_grad_norm_([], 1.0, parts=part(grad), nonfinite="zero")
        return untouched[0], grad.tolist()

    assert on_ranks(2, run) == [(1.0, [0.0, 0.0])] * 2


def test_a_partial_gradient_is_scaled_but_has_no_elements_to_clip():
    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        grad = DTensor.from_local(torch.tensor([[1.0, 3.0], [2.0, 1.0]][rank]), mesh, [Partial()], run_check=False)
        norm = clip_grad_norm_([parameter_with(grad)], 0.5).item()
        with pytest.raises(ValueError, match="Partial"):
            clip_grad_value_([parameter_with(grad)], 0.1)
        return norm, grad.full_tensor().tolist()

    assert on_ranks(2, run) == [(5.0, pytest.approx([0.3, 0.4]))] * 2


def test_values_are_clipped_in_shards():
    def run(rank):
        grad = distribute_tensor(torch.tensor([5.0, -5.0, 0.5]), init_device_mesh("cpu", (2,)), [Shard(0)])
        clip_grad_value_(parameter_with(grad), 1.0)
        return grad.full_tensor().tolist()

    assert on_ranks(2, run) == [[1.0, -1.0, 0.5]] * 2
