"""ShardedOptimizer against one process that sees all ranks' data."""

import itertools

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


WAYS = {
    "at once": (1, 25, True),
    "no_sync": (3, 0.001, True),
    "reduced each time": (3, 0.001, False),
}
"""Micro-batches, MiB a bucket, and whether all but the last accumulate under no_sync."""


@pytest.mark.parametrize("shape", MESHES.values(), ids=[f"{name} ranks" for name in MESHES])
def test_sharded_training_equals_one_process(shape):
    world = torch.Size(shape).numel()
    expected = {way: train_alone(world, WAYS[way][0]) for way in WAYS}
    results = on_ranks(world, lambda rank: {way: train_sharded(rank, shape, *WAYS[way]) for way in WAYS})
    for result in results:
        for way in WAYS:
            for ours, theirs, first in zip(result[way], expected[way], results[0][way], strict=True):
                assert torch.equal(ours, first), way
                torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2x2 ranks"])
def test_other_ways_to_hold_gradients_give_the_same(shape):
    def train(rank, no_sync):
        ways = ({}, {"shard_gradients": True}, {"capturable": True})
        return [train_sharded(rank, shape, 3, 0.001, no_sync, **options) for options in ways]

    for expected, *held in on_ranks(torch.Size(shape).numel(), lambda rank: train(rank, True) + train(rank, False)):
        for result in held:
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


def test_an_unused_parameter_is_decayed_only_with_zero_fill_unused():
    def check(rank, fill):
        p, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(70))
        optimizer = ShardedOptimizer(
            [p, unused], torch.optim.AdamW, lr=0.5, weight_decay=1.0, fused=True, zero_fill_unused=fill
        )
        p.sum().backward()
        optimizer.step()
        return unused.min().item(), unused.max().item()

    assert on_ranks(2, check, True) == [(0.5, 0.5)] * 2
    assert on_ranks(2, check, False) == [(1.0, 1.0)] * 2


def test_find_unused_parameters_steps_with_an_optimizer_that_knows_flags_too():
    def check(rank):
        p, q = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(70))
        optimizer = ShardedOptimizer([p, q], torch.optim.AdamW, lr=0.5, fused=True, find_unused_parameters=True)
        (q if rank else p).sum().backward()
        optimizer.step()
        return [x.max().item() < 1 for x in (p, q)]

    assert on_ranks(2, check) == [[True, True]] * 2


AVERAGES = {
    "mean": {},
    "divided after": {"grad_divisor": 8},
    "partly before": {"grad_predivisor": 16},
    "divided before": {"grad_divisor": 8, "grad_predivisor": 8},
}


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2x2 ranks"])
def test_averages_are_right_in_every_precision(shape):
    world = torch.Size(shape).numel()
    torch.manual_seed(0)
    gradients = torch.randn(world, 200)
    cases = list(itertools.product((torch.float16, torch.bfloat16, torch.float32), AVERAGES))

    def average(rank, dtype, how):
        p = nn.Parameter(torch.zeros(200, dtype=dtype))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, mesh=init_device_mesh("cpu", shape), **AVERAGES[how])
        (p * gradients[rank].to(dtype)).sum().backward()
        return optimizer.grad_shards()[0].to_local().clone()

    results = on_ranks(world, lambda rank: [average(rank, *case) for case in cases])
    for (dtype, how), *pieces in zip(cases, *results[: shape[-1]], strict=True):
        seen = torch.cat(pieces)[:200].double()
        expected = gradients.to(dtype).double().sum(0) / AVERAGES[how].get("grad_divisor", world)
        torch.testing.assert_close(seen, expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_dividing_before_the_sum_keeps_fp16_finite():
    def check(rank, predivisor):
        p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, grad_divisor=2, grad_predivisor=predivisor)
        (p * 60000).sum().backward()
        return torch.cat([shard.to_local() for shard in optimizer.grad_shards()])[:3].tolist()

    assert on_ranks(2, check, 2.0)[0] == [60000.0] * 3
    assert on_ranks(2, check, 1.0)[0] == [float("inf")] * 3


def test_gradients_come_apart_by_the_owner_of_their_norm_and_lie_together():
    params = [(f"{'norm' if i % 2 else 'weight'}{i}", nn.Parameter(torch.ones(64))) for i in range(6)]
    owner = lambda name, param: name[:4]  # noqa: E731
    optimizer = ShardedOptimizer(params, torch.optim.SGD, norm_owner=owner)
    sum(p.sum() for _, p in params).backward()
    shards = optimizer.grad_shards_by_owner()
    assert {name: len(grads) for name, grads in shards.items()} == {"weig": 3, "norm": 3}
    for grads in shards.values():
        offsets = [grad.storage_offset() for grad in grads]
        assert offsets == list(range(offsets[0], offsets[0] + 192, 64))


@pytest.mark.parametrize("retained", [True, False], ids=["retain_graph", "create_graph"])
def test_a_graph_may_be_used_twice(retained):
    def check(rank):
        p = nn.Parameter(torch.full((3,), 2.0))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0)
        loss = p.pow(3).sum()
        if retained:
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            (gradient,) = torch.autograd.grad(loss, p, create_graph=True)
            (gradient.sum() * 2).backward()
        return torch.cat([shard.to_local() for shard in optimizer.grad_shards()])[:3].tolist()

    assert on_ranks(2, check)[0] == [24.0] * 3


def test_most_of_the_bytes_are_launched_before_backward_is_nearly_done():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(64), nn.Linear(64, 64)]) for _ in range(24))
    weights = [p for p in layers.parameters() if p.ndim > 1]
    rest = [p for p in layers.parameters() if p.ndim <= 1]
    optimizer = ShardedOptimizer([{"params": weights}, {"params": rest}], torch.optim.SGD, bucket_cap_mb=0.06)
    launched_at, arrivals = {}, []

    def note(_):
        arrivals.append(1)
        for bucket in optimizer._backward.buckets:
            if bucket.gradients.under_way:
                launched_at.setdefault(bucket, len(arrivals))

    for p in layers.parameters():
        p.register_post_accumulate_grad_hook(note)
    x = torch.ones(64)
    for norm, linear in layers:
        x = linear(norm(x))
    x.sum().backward()
    early = sum(b.params.numel() for b, at in launched_at.items() if at <= 0.9 * len(arrivals))
    assert early / sum(b.params.numel() for b in optimizer._backward.buckets) > 0.8


def test_states_are_found_by_what_is_in_the_groups():
    p = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([("weight", p)], torch.optim.AdamW)
    p.sum().backward()
    optimizer.step()
    (group,) = optimizer.param_groups
    states = dict(zip(group["param_names"], (optimizer.state[shard] for shard in group["params"]), strict=True))
    assert torch.equal(states["weight"]["exp_avg"][:3], torch.full((3,), 0.1))
    states["weight"]["exp_avg"].zero_()
    assert not optimizer.state_dict()["state"][0]["exp_avg"].any()
