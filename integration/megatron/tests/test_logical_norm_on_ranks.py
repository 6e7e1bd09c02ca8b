"""The norm is that of the logical model, whoever holds copies or pieces of it."""

import pytest
import torch

from stepstack_megatron import plug
from stepstack_testing import on_ranks

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"]),
]


class Module(torch.nn.Module):
    """A module of parameters of the given shapes, each with the marks that Megatron's layers set."""

    def __init__(self, shapes, **marks):
        super().__init__()
        for name, shape in shapes.items():
            param = torch.nn.Parameter(torch.ones(shape))
            for mark, value in marks.get(name, {}).items():
                setattr(param, mark, value)
            self.register_parameter(name, param)


def logical(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(megatron, module, grads, distributed, *, before_reduction=None, plugged=True):
    chunk = megatron.wrapped(module, distributed=distributed)
    optimizer = megatron.optimizer(chunk, distributed=distributed, clip_grad=1.0)
    if plugged:
        plug(optimizer)
    megatron.backward(chunk, optimizer, grads, before_reduction=before_reduction)
    success, norm, zeros = optimizer.step()
    return bool(success), float(norm), int(zeros), [param.detach().clone() for param in module.parameters()]


def test_tensor_parallel_duplicates_count_once(engine, distributed):
    weight, gain = logical(0, 8, 6), logical(1, 6)

    def run(rank):
        with engine(tp=2) as megatron:
            cut = rank % 2  # of two tensor-parallel ranks; the other two hold the same
            shapes = {"weight": (4, 6), "gain": (6,)}
            grads = {"weight": weight.chunk(2)[cut].clone(), "gain": gain}
            grads["weight"][0] = 0
            module = Module(shapes, weight={"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
            stock = Module(shapes, weight={"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
            return step(megatron, module, grads, distributed), step(megatron, stock, grads, distributed, plugged=False)

    whole = weight.clone()
    whole[[0, 4]] = 0
    for ours, theirs in on_ranks(4, run, timeout=60):
        assert ours[:2] == (True, pytest.approx(torch.cat([whole.flatten(), gain]).double().norm().item(), rel=1e-6))
        assert ours[1] == pytest.approx(theirs[1], rel=1e-6)
        assert ours[2] == theirs[2] == 12
        torch.testing.assert_close(ours[3], theirs[3], rtol=0, atol=1e-6)


def test_an_embedding_tied_over_two_pipeline_stages_counts_once(engine, distributed):
    embedding, layers = logical(0, 10, 4), [logical(1, 4, 4), logical(2, 4, 4)]

    def run(rank):
        with engine(pp=2) as megatron:
            stage = rank // 2
            shared = {"shared_embedding": True, "shared": stage == 1}
            module = Module({"embedding": (10, 4), "layer": (4, 4)}, embedding=shared)
            return step(megatron, module, {"embedding": embedding, "layer": layers[stage]}, distributed)

    expected = torch.cat([grad.flatten() for grad in (embedding, *layers)]).double().norm().item()
    for success, norm, _, _ in on_ranks(4, run, timeout=60):
        assert success
        assert norm == pytest.approx(expected, rel=1e-6)


def test_experts_over_two_by_two_count_each_once(engine, distributed):
    dense, experts = logical(0, 5, 4), [logical(1, 4, 6), logical(2, 4, 6)]

    def run(rank):
        with engine(ep=2) as megatron:
            expert = megatron.parallel_state.get_expert_model_parallel_rank()
            module = Module({"dense": (5, 4), "expert": (4, 6)}, expert={"allreduce": False})
            # Each expert sees the tokens of both its replicas, and Megatron divides by all four ranks.
            success, norm, _, weights = step(
                megatron, module, {"dense": dense, "expert": 2 * experts[expert]}, distributed
            )
            return success, norm, expert, weights

    seen = on_ranks(4, run, timeout=60)
    expected = torch.cat([grad.flatten() for grad in (dense, *experts)]).double().norm().item()
    assert sorted(expert for _, _, expert, _ in seen) == [0, 0, 1, 1]
    for success, norm, _, _ in seen:
        assert success
        assert norm == pytest.approx(expected, rel=1e-6)


def test_a_duplicate_that_does_not_count_still_lets_all_skip_if_it_is_not_finite(engine, distributed):
    def run(rank):
        with engine(tp=2) as megatron:
            module = Module({"gain": (6,)})
            broken = rank == 1  # holds a duplicate

            def spoil(params):
                params["gain"].main_grad[0] = torch.nan

            return step(
                megatron, module, {"gain": torch.ones(6)}, distributed, before_reduction=spoil if broken else None
            )

    for success, norm, _, (gain,) in on_ranks(2, run, timeout=60):
        assert not success
        assert norm == pytest.approx(6**0.5)  # of what counts, which is fine
        assert torch.equal(gain, torch.ones(6))
