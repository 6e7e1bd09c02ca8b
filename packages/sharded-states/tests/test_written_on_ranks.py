"""What callers write to what `param_groups` lists, and to a `.grad` that stands for none, is the same on all ranks."""

import pytest
import torch
from pytorch_optimizer import Yogi
from small import params_of

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

WRITES = {
    "mul_": lambda p: p.mul_(0.9),
    "data": lambda p: p.data.clamp_(-0.01, 0.01),
    "data assigned": lambda p: setattr(p, "data", p.detach() * 0.9),
    "foreach": lambda p: torch._foreach_mul_([p], 0.9),
    "copy_": lambda p: p.copy_(p.detach() * 2),
}


def loss_of(params):
    return sum(p.square().sum() for p in params.values())


def written_after_a_step(world, way):
    params = params_of(first=(7, 30), last=(3,))
    optimizer = ShardedOptimizer(params.items(), torch.optim.SGD, lr=0.1, bucket_cap_mb=2e-4, **way)
    group = optimizer.param_groups[0]["params"]
    for write in WRITES.values():
        loss_of(params).backward()
        with torch.no_grad():
            for part in group:  # the step brings it
                write(part)
        optimizer.step()
        optimizer.zero_grad()
        before = [p.detach().clone() for p in params.values()]
        if world == 1:
            with torch.no_grad():
                write(group[0])
            assert not torch.equal(params["first"], before[0])
            continue
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"'first' is to be written in param_groups.*model"),
        ):
            write(group[0])
        assert all(map(torch.equal, params.values(), before))
    assert not group[0].data.requires_grad
    loss_of(params).backward()
    torch.nn.utils.clip_grad_norm_(group, 0.1)
    optimizer.step()
    if world > 1:
        group[0].detach().mul_(0.9)
        with pytest.raises(RuntimeError, match=r"'first' was written in param_groups"):
            loss_of(params).backward()
        optimizer.zero_grad()
        optimizer.step()  # brings it
    loss_of(params).backward()
    optimizer.step()
    return [p.detach().clone() for p in params.values()]


@pytest.mark.parametrize("world", [1, 2])
def test_weights_written_in_param_groups_are_the_same_on_all_ranks_or_refused_by_name(world):
    def run(rank):
        return [written_after_a_step(world, way) for way in ({}, {"shard_gradients": world > 1})]

    for result in zip(*on_ranks(world, run), strict=True):
        for other in result[1:]:
            for ours, theirs in zip(result[0], other, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def added_to_zero(sharded):
    params, settings = params_of(used=(7, 30), unused=(65,), never=(3,)), {"lr": 0.05, "momentum": 0.9}
    settings["weight_decay"] = 0.1
    if sharded:
        optimizer = ShardedOptimizer(params.items(), torch.optim.SGD, capturable=True, bucket_cap_mb=2e-4, **settings)
    else:
        optimizer = torch.optim.SGD(params.values(), **settings)

    def add():
        p = params["unused"]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.add_(p.detach(), alpha=0.5)

    for step in range(5):
        if step == 1:
            add()
        params["used"].square().sum().backward()
        if step in (0, 3):
            add()
        if step == 4 and params["never"].grad is not None:
            params["never"].grad.mul_(0.5)  # of zeros is no gradient
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params.values()]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_added_in_place_to_the_zero_grad_of_a_parameter_without_one_is_stepped(world):
    expected = added_to_zero(False)
    for result in on_ranks(world, lambda rank: added_to_zero(True)):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def with_yogi():
    params = params_of(first=(7, 30), second=(65,), last=(3,))
    return params, ShardedOptimizer(params.items(), Yogi, lr=0.05, bucket_cap_mb=2e-4)


def with_yogi_trained(params, optimizer):
    for _ in range(3):
        loss_of(params).backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*(p.detach().clone() for p in params.values()), norm]


def test_padding_that_an_optimizer_moves_is_in_no_norm_and_no_checkpoint():
    def save(rank):
        params, optimizer = with_yogi()
        weights = with_yogi_trained(params, optimizer)[:-1]
        moved = optimizer.param_groups[0]["params"][0].to_local()[-1]
        return optimizer.full_state_dict(rank0_only=False), weights, moved, with_yogi_trained(params, optimizer)

    (state, weights, _, expected), (*_, moved, _) = on_ranks(2, save)
    assert moved != 0

    def load(rank):
        params, optimizer = with_yogi()
        for param, weight in zip(params.values(), weights, strict=True):
            param.data.copy_(weight)
        optimizer.load_full_state_dict(state)
        return with_yogi_trained(params, optimizer)

    for world in (1, 3):
        for result in on_ranks(world, load):
            torch.testing.assert_close(result, expected)
