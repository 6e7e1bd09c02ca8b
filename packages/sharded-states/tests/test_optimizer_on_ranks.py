"""ShardedOptimizer against one process that sees all ranks' data."""

import pytest
import torch
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MESHES = {"2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2), "4x1": (4, 1)}


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 33), nn.Tanh(), nn.Linear(33, 5))
    model[0].to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    return model


def groups_of(model):
    decay = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    rest = [(name, p) for name, p in model.named_parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]


def batches(step, micro, ranks):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(ranks, 4, 3, 6, 6, generator=generator)


def train_alone(ranks, accumulate, steps=8):
    model = make_model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    for step in range(steps):
        for micro in range(accumulate):
            data = batches(step, micro, ranks).flatten(0, 1)
            model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def train_sharded(rank, shape, accumulate, capacity, no_sync, steps=8):
    mesh = init_device_mesh("cpu", shape)
    model = make_model()
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)  # the first rank's values count
    optimizer = ShardedOptimizer(groups_of(model), torch.optim.AdamW, mesh=mesh, bucket_cap_mb=capacity, lr=0.01)
    for step in range(steps):
        for micro in range(accumulate):
            loss = model(batches(step, micro, mesh.size())[rank]).square().mean()
            if no_sync and micro < accumulate - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().contiguous() for p in model.parameters()]


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "reducing every backward"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("capacity", [0.001, 25], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_sharded_training_equals_one_process(shape, capacity, accumulate, no_sync):
    if accumulate == 1 and not no_sync:
        pytest.skip("the same as with no_sync")
    world = torch.Size(shape).numel()
    expected = train_alone(world, accumulate)
    results = on_ranks(world, train_sharded, shape, accumulate, capacity, no_sync)
    for result in results:
        for ours, theirs, first in zip(result, expected, results[0], strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
