"""ShardedOptimizer against one process that sees all ranks' data."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

MESHES = {"2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2), "4x1": (4, 1)}


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 33), nn.Tanh(), nn.Linear(33, 5)
    )
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


def train_sharded(rank, shape, accumulate, capacity, no_sync, steps=8, **options):
    mesh = init_device_mesh("cpu", shape)
    model = make_model()
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)  # the first rank's values count
    options |= {"mesh": mesh, "bucket_cap_mb": capacity, "lr": 0.01}
    optimizer = ShardedOptimizer(groups_of(model), torch.optim.AdamW, **options)
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


CASES = [
    pytest.param(shape, accumulate, capacity, no_sync, id=f"{name} ranks, {accumulate} batches, {capacity} MiB, {how}")
    for name, shape in MESHES.items()
    for accumulate, capacity, no_sync, how in [
        (1, 25, True, "at once"),
        (3, 0.001, True, "no_sync"),
        (3, 0.001, False, "reduced each time"),
    ]
]


@pytest.mark.parametrize(("shape", "accumulate", "capacity", "no_sync"), CASES)
def test_sharded_training_equals_one_process(shape, accumulate, capacity, no_sync):
    world = torch.Size(shape).numel()
    expected = train_alone(world, accumulate)
    results = on_ranks(world, train_sharded, shape, accumulate, capacity, no_sync)
    for result in results:
        for ours, theirs, first in zip(result, expected, results[0], strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "reduced each time"])
@pytest.mark.parametrize("holding", ["shard_gradients", "capturable"])
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2x2 ranks"])
def test_other_ways_to_hold_gradients_give_the_same(shape, holding, no_sync):
    def train(rank, **options):
        return train_sharded(rank, shape, 3, 0.001, no_sync, **options)

    world = torch.Size(shape).numel()
    held = on_ranks(world, lambda rank: train(rank, **{holding: True}))
    for result, expected in zip(held, on_ranks(world, train), strict=True):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_two_runs_are_bitwise_equal():
    first, second = (on_ranks(2, train_sharded, (2,), 3, 0.001, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_a_parameter_without_gradient_is_skipped_as_torch_skips_it():
    def losses(model, step):
        return model[0].sum() + (model[1] * 2).sum() if step != 1 else (model[0] ** 2).sum()

    def train(rank=None):
        model = [nn.Parameter(torch.full((70,), 1.0)), nn.Parameter(torch.full((7,), 2.0))]
        if rank is None:
            optimizer = torch.optim.AdamW(model, lr=0.1, weight_decay=0.1)
        else:
            optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
        for step in range(3):
            losses(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model]

    for result in on_ranks(2, train):
        for ours, theirs in zip(result, train(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_gradient_shards_are_the_averaged_gradient_cut_in_pieces():
    def check(rank):
        weight, bias, unused = (nn.Parameter(torch.zeros(n)) for n in (100, 3, 5))
        optimizer = ShardedOptimizer([weight, bias, unused], torch.optim.SGD, lr=1.0)
        ((rank + 1) * weight.sum() + bias.sum()).backward()
        assert weight.grad is None
        shards = optimizer.grad_shards()
        assert [p.grad_shard is shard for p, shard in zip((weight, bias, unused), shards, strict=True)] == [True] * 3
        return [shard.to_local().clone() for shard in shards]

    results = on_ranks(3, check)
    pieces = [torch.cat([result[i] for result in results]) for i in range(3)]
    assert torch.equal(pieces[0], torch.cat([torch.full((100,), 2.0), torch.zeros(28)]))
    assert torch.equal(pieces[1], torch.cat([torch.ones(3), torch.zeros(61)]))
    assert pieces[2].numel() == 0


def test_more_ranks_than_elements_and_an_empty_parameter():
    def check(rank):
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))]
        optimizer = ShardedOptimizer(params, torch.optim.AdamW, lr=0.5, weight_decay=0.0)
        sum(p.sum() for p in params).backward()
        optimizer.step()
        return [p.detach().clone() for p in params]

    for result in on_ranks(4, check):
        torch.testing.assert_close(result, [torch.full((2,), 0.5), torch.tensor(0.5), torch.ones(0, 3)])


def test_gradients_assigned_by_hand_are_averaged_too():
    def check(rank):
        p = nn.Parameter(torch.zeros(3))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0)
        results = []
        for value in (rank, 10.0 * rank):
            p.grad = torch.full((3,), float(value))
            optimizer.step()
            results.append(p.detach().clone())
        return results

    for first, second in on_ranks(2, check):
        assert torch.equal(first, torch.full((3,), -0.5))
        assert torch.equal(second, torch.full((3,), -5.5))  # the first gradient was used up


def test_zero_grad_to_zero_goes_on_from_zero():
    def check(rank):
        p = nn.Parameter(torch.ones(3))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0, weight_decay=0.5)
        p.sum().backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # a gradient of zero: weight decay alone
        decayed = p.detach().clone()
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()  # no gradient: nothing
        return decayed, p.detach().clone()

    for decayed, after in on_ranks(2, check):
        assert torch.equal(decayed, torch.full((3,), 0.5))
        assert torch.equal(after, decayed)


def test_a_gradient_on_one_rank_counts_for_all_with_find_unused_parameters():
    def check(rank):
        p, q, r = (nn.Parameter(torch.ones(n)) for n in (70, 100, 3))
        optimizer = ShardedOptimizer([p, q, r], torch.optim.SGD, lr=1.0, weight_decay=0.5, find_unused_parameters=True)
        (q if rank else p).sum().backward()
        optimizer.step()
        return [(x.min().item(), x.max().item()) for x in (p, q, r)]

    assert on_ranks(2, check) == [[(0.0, 0.0), (0.0, 0.0), (1.0, 1.0)]] * 2


def test_gathering_under_the_next_forward_gives_the_same():
    def train(rank, overlap):
        model = make_model()
        optimizer = ShardedOptimizer(groups_of(model), torch.optim.AdamW, bucket_cap_mb=0.001, lr=0.01)
        if overlap:
            optimizer.overlap_gather(model)
        under_way = []
        for step in range(5):
            under_way.append(len(optimizer._gather._pending))
            model(batches(step, 0, 2)[rank]).square().mean().backward()
            under_way.append(len(optimizer._gather._pending))
            optimizer.step()
            optimizer.zero_grad()
        return under_way, model.state_dict()

    for (lazy, ours), (eager, theirs) in zip(on_ranks(2, train, True), on_ranks(2, train, False), strict=True):
        assert min(lazy[2::2]) > 1
        assert set(lazy[1::2]) == set(eager) == {0}
        assert all(torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True))


def test_a_parameter_that_nobody_would_wait_for_is_refused():
    model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    optimizer = ShardedOptimizer([*model.named_parameters(), ("extra", extra)], torch.optim.SGD)
    with pytest.raises(ValueError, match="'extra' is in no part of the module"):
        optimizer.overlap_gather(model)
