"""Loops that don't go straight from backward to step: what they come to is what they come to in torch."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import RankError, on_ranks

WAYS = {
    "plain": {},
    "capturable": {"capturable": True},
    "sharded gradients": {"shard_gradients": True},
    "offloaded": {"state_device": "cpu:0"},  # the CPU with a number passes for another device
    "find unused": {"find_unused_parameters": True},
}


class Loop:
    """A model with many small buckets and its optimizer: sharded, or torch's on the data of all ranks."""

    def __init__(self, rank, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(7, 7), nn.Tanh())])
        self.params = list(self.model.parameters())
        self.ranks = (0, 1) if rank is None else (rank,)
        self.capturable = "capturable" in options
        if rank is None:
            self.optimizer, self.no_sync = torch.optim.AdamW(self.params, lr=0.1, fused=True), nullcontext
        else:
            self.optimizer = ShardedOptimizer(
                self.model.named_parameters(), torch.optim.AdamW, lr=0.1, fused=True, bucket_cap_mb=2e-4, **options
            )
            self.no_sync = self.optimizer.no_sync

    def loss(self, seed):
        data = [torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * seed + rank)) for rank in self.ranks]
        return self.model(torch.cat(data)).square().mean()

    def backward(self, seed):
        self.loss(seed).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_as_in_torch(detour):
    """In each of the ways."""

    def run(rank, **options):
        loop = Loop(rank, **options)
        detour(loop)
        return [p.detach().clone() for p in loop.params]

    expected = run(None)
    for results in on_ranks(2, lambda rank: {way: run(rank, **options) for way, options in WAYS.items()}):
        for way, result in results.items():
            for ours, theirs in zip(result, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}")


def steps_that_have_no_gradients(loop):
    loop.step()
    loop.backward(0)
    loop.optimizer.zero_grad()
    loop.step()
    loop.backward(1)
    loop.step()
    loop.step()


def steps_twice(loop):
    loop.backward(0)
    loop.optimizer.step()
    loop.step()
    loop.backward(1)
    loop.step()


def accumulates_in_any_order(loop):
    with loop.no_sync():
        loop.backward(0)
        loop.backward(1)
    loop.backward(2)
    with loop.no_sync():
        loop.backward(3)
    loop.step()
    with loop.no_sync():
        loop.backward(4)
    loop.optimizer.zero_grad()
    loop.backward(5)
    loop.backward(6)
    loop.step()


def sets_to_zero(loop):
    loop.backward(0)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()
    loop.backward(1)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    with loop.no_sync():
        loop.backward(2)
    loop.step()


def asks_for_gradients_otherwise(loop):
    loop.backward(0)
    torch.autograd.grad(loop.loss(1), loop.params)
    loop.step()
    torch.autograd.grad(loop.loss(1), loop.params)
    loop.backward(2)
    loop.step()


def freezes_and_thaws(loop):
    for seed in range(5):
        loop.params[0].requires_grad_(seed % 3 != 1)
        loop.params[-1].requires_grad_(seed % 2 == 0)
        loop.backward(seed)
        loop.step()


def changes_gradients_in_hooks(loop):
    loop.params[2].register_hook(lambda grad: grad * 3)
    for seed in range(3):
        loop.backward(seed)
        loop.step()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("half of the gradients are there")


def fails_and_goes_on(loop):
    for seed in range(3):
        x = Fails.apply(loop.model[:2](torch.ones(7)))
        with pytest.raises(ArithmeticError):
            loop.model[2:](x).sum().backward()
        loop.optimizer.zero_grad()
        loop.backward(seed)
        loop.step()


def zeroes_by_the_model(loop):
    loop.backward(0)
    loop.optimizer.step()
    loop.model.zero_grad()
    loop.optimizer.step()
    loop.backward(1)
    loop.model.zero_grad()
    loop.optimizer.step()
    loop.backward(2)
    loop.model.zero_grad()
    loop.backward(3)
    loop.step()
    with loop.no_sync():
        loop.backward(4)
    loop.model.zero_grad()
    loop.backward(5)
    loop.optimizer.step()
    loop.model.zero_grad(set_to_none=False)
    loop.backward(6)
    loop.step()


def forgets_some(loop):
    for seed in range(3):
        loop.backward(seed)
        loop.params[0].grad = loop.params[3].grad = None
        if seed:
            loop.backward(seed + 3)
        loop.params[-1].grad = None
        loop.step()


def forgets_some_while_accumulating(loop):
    loop.backward(0)
    with loop.no_sync():
        loop.backward(1)
        loop.params[1].grad = None
        loop.backward(2)
    loop.params[2].grad = None
    loop.backward(3)
    loop.step()


def steps_with_zeros(loop):
    loop.backward(0)
    if not loop.capturable:  # where `.grad` is not to be written to
        loop.model.zero_grad(set_to_none=False)
        loop.optimizer.step()
        loop.model.zero_grad(set_to_none=False)
        loop.backward(1)
        loop.optimizer.step()
        loop.model.zero_grad(set_to_none=False)
        loop.optimizer.step()
    else:
        loop.optimizer.zero_grad(set_to_none=False)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)
        loop.backward(1)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)
        loop.optimizer.step()
    loop.optimizer.zero_grad()


DETOURS = (
    steps_that_have_no_gradients,
    steps_twice,
    accumulates_in_any_order,
    sets_to_zero,
    asks_for_gradients_otherwise,
    freezes_and_thaws,
    changes_gradients_in_hooks,
    fails_and_goes_on,
    zeroes_by_the_model,
    forgets_some,
    forgets_some_while_accumulating,
    steps_with_zeros,
)


def test_detours_end_where_torch_s_do():
    def all_of_them(loop):
        for detour in DETOURS:
            detour(loop)

    assert_as_in_torch(all_of_them)


def test_a_large_group_may_be_added_between_backward_and_step():
    def detour(loop):
        torch.manual_seed(1)
        wide = nn.Linear(7, 50)
        for seed in range(4):
            if seed == 2:
                loop.optimizer.add_param_group({"params": [*wide.named_parameters()], "lr": 0.05})
            loop.backward(seed)
            if seed > 1:
                wide(torch.ones(7)).square().mean().backward()
            loop.step()
        loop.params += wide.parameters()

    def named(loop):
        if isinstance(loop.optimizer, torch.optim.AdamW):
            loop.optimizer = torch.optim.AdamW(loop.model.named_parameters(), lr=0.1, fused=True)
        detour(loop)

    assert_as_in_torch(named)


def test_going_on_after_a_failed_backward_as_if_nothing_had_happened_is_refused():
    def check(rank):
        for options, go_on in product(
            WAYS.values(), (lambda loop: loop.backward(0), lambda loop: loop.optimizer.step())
        ):
            loop = Loop(rank, **options)
            x = Fails.apply(loop.model[:2](torch.ones(7)))
            with pytest.raises(ArithmeticError):
                loop.model[2:](x).sum().backward()
            with pytest.raises(RuntimeError, match=rf"rank {rank}: the last backward ended in an exception.*zero_grad"):
                go_on(loop)

    on_ranks(2, check)


def test_a_rank_with_fewer_batches_ends_in_an_error_on_the_others():
    def check(rank):
        loop = Loop(rank)
        for seed in range(2 - rank):
            loop.backward(seed)
            loop.step()

    with pytest.raises(RankError, match=r"(?i)rank 0(.|\n)*(timed out|timeout|closed)"):
        on_ranks(2, check, timeout=1.0)


def test_gradients_are_assigned_where_a_reduced_bucket_has_none_yet():
    def check(rank, **options):
        p, q = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(100))
        optimizer = ShardedOptimizer([p, q], torch.optim.SGD, lr=1.0, **options)
        p.sum().backward()
        q.grad = torch.full((100,), 2.0 + 2 * rank)
        optimizer.step()
        return [(x.min().item(), x.max().item()) for x in (p, q)]

    for options in ({}, {"capturable": True}, {"shard_gradients": True}):
        assert on_ranks(2, lambda rank, options=options: check(rank, **options)) == [[(-1, -1), (-3, -3)]] * 2


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["plain", "capturable"])
def test_no_gradient_is_shown_while_a_part_of_it_is_not_reduced(options):
    def check(rank):
        p, q = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(100))
        optimizer = ShardedOptimizer([p, q], torch.optim.SGD, lr=1.0, **options)
        shards = optimizer.param_groups[0]["params"]
        ((p.sum() + q.sum()) * (rank + 1)).backward()
        shown = [[shard.grad is not None for shard in shards]]
        with optimizer.no_sync():
            (p.sum() * (rank + 1)).backward()
        shown.append([shard.grad is not None for shard in shards])
        optimizer.grad_shards()
        shown.append([shard.grad is not None for shard in shards])
        norm = torch.nn.utils.clip_grad_norm_(shards, 1e9).full_tensor().item()
        optimizer.step()
        return shown, norm, p.max().item(), q.max().item()

    both, none = [True, True], [False, False]
    expected = ([both, none, both], pytest.approx((100 * 3.0**2 + 100 * 1.5**2) ** 0.5), -3.0, -1.5)
    assert on_ranks(2, check) == [expected] * 2


@pytest.mark.parametrize("saved", [None, torch.float32])
def test_a_state_dict_with_other_masters_is_refused(saved):
    def make(inner_dtype):
        p = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
        optimizer = ShardedOptimizer([p], torch.optim.AdamW, inner_dtype=inner_dtype)
        p.sum().backward()
        optimizer.step()
        return optimizer

    make(saved).load_state_dict(make(saved).state_dict())
    with pytest.raises(ValueError, match="inner_dtype"):
        make(torch.float32 if saved is None else None).load_state_dict(make(saved).state_dict())


@pytest.mark.parametrize("inner", ["told", "untold"])
def test_flags_of_any_dtype_and_of_one_element_count(inner):
    for scale in (torch.tensor([4.0]), torch.tensor(4, dtype=torch.int32), torch.tensor(4.0).double()):
        for found_inf in (torch.zeros(1), torch.tensor(False), torch.zeros((), dtype=torch.bfloat16)):
            p = nn.Parameter(torch.zeros(5))
            optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0, fused=inner == "told")
            (8 * p.sum()).backward()
            optimizer.grad_scale, optimizer.found_inf = scale, found_inf
            optimizer.step()
            assert torch.equal(p, torch.full((5,), -2.0))


def test_one_bucket_for_all():
    params = [nn.Parameter(torch.ones(100)) for _ in range(3)]
    optimizer = ShardedOptimizer(params, torch.optim.SGD, bucket_cap_mb=float("inf"))
    assert len(optimizer._backward.buckets) == 1
