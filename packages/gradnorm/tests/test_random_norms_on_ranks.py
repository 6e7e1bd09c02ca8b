"""DTensors in every pair of placements on a mesh of 2 × 2, of all dtypes and shapes, have the norm of one vector."""

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stepstack_gradnorm import local_runs, tensor_norms, total_norm
from stepstack_testing import on_ranks

PLACEMENTS = [*itertools.product((Shard(0), Shard(1), Replicate(), Partial()), repeat=2)]
SHAPES = [(5, 3), (4, 6), (1, 7)]  # uneven on two ranks, even, and with ranks that hold nothing
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NORM_TYPES = [2.0, 1.0, 0.5, 3.0, 8.0, 0.0, math.inf]


def whole(number, shape, dtype):
    generator = torch.Generator().manual_seed(number)
    magnitude = 10 ** torch.randint(-2, 3, (), generator=generator)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude).to(dtype)


def spread(tensor, mesh, placements, *, transposed):
    """The DTensor that is this tensor: of a Partial axis, one rank holds twice as much, the other takes it away."""
    local = tensor
    for axis, placement in enumerate(placements):
        rank, size = mesh.get_local_rank(axis), mesh.size(axis)
        if isinstance(placement, Shard):
            pieces = local.chunk(size, placement.dim)
            local = pieces[rank] if rank < len(pieces) else local.narrow(placement.dim, 0, 0)
        elif isinstance(placement, Partial):
            local = -local if rank else 2 * local
    local = local.t().contiguous().t() if transposed else local
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def cases():
    numbers = itertools.count()
    for placements, shape in itertools.product(PLACEMENTS, SHAPES):
        number = next(numbers)
        yield placements, whole(number, shape, DTYPES[number % len(DTYPES)]), number % 2 == 1


def measured(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    spread_out = [spread(tensor, mesh, placements, transposed=odd) for placements, tensor, odd in cases()]
    several = tensor_norms(dict(enumerate(spread_out)))
    runs = local_runs(spread_out)
    return {
        "total": {p: total_norm(spread_out, p).item() for p in NORM_TYPES},
        "each": [norm.item() for norm in several.values()],
        "backwards": total_norm(spread_out[::-1]).item(),
        "again": total_norm(spread_out).item(),
        "here": sum(run.numel() for of_place in runs.values() for run in of_place),
        "expected here": sum(grad.to_local().numel() for grad in spread_out),
    }


def test_the_norm_of_any_placements_is_that_of_one_vector_on_every_rank():
    tensors = [tensor.double() for _, tensor, _ in cases()]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    ranks = on_ranks(4, measured, timeout=30.0)
    for p, norm in ranks[0]["total"].items():
        assert norm == pytest.approx(torch.linalg.vector_norm(flat, p).item(), rel=1e-6), p
    assert ranks[0]["each"] == pytest.approx([tensor.norm().item() for tensor in tensors], rel=1e-6)
    for found in ranks:
        assert found["total"] == ranks[0]["total"]
        assert found["again"] == found["total"][2.0]
        assert found["backwards"] == pytest.approx(found["total"][2.0], rel=1e-12)
        assert found["here"] == found["expected here"]
