"""Unscaling and clipping first, clipping as one number, and everything in the step: the optimizer sees the same."""

import pytest
import torch
import torch.distributed as dist

from stepstack import OptimizerStep
from stepstack_clip import clip_coefficient, clip_grad_norm_
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_gradnorm import grads_of, total_norm
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

ADAM = {"lr": 0.1, "eps": 1e-3}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAM),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, fused=True, **ADAM),
    "FusedAdamW": lambda params: FusedAdamW(params, **ADAM),
    "sharded AdamW": lambda params: ShardedOptimizer(params, torch.optim.AdamW, **ADAM),
    "sharded AdamW(fused)": lambda params: ShardedOptimizer(params, torch.optim.AdamW, fused=True, **ADAM),
    "sharded FusedAdamW": lambda params: ShardedOptimizer(params, FusedAdamW, **ADAM),
}


def unscale_clip_step(params, optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def deferred(params, optimizer, scaler, max_norm):
    norm = total_norm(grads_of(params)) / scaler.scale_tensor
    optimizer.grad_scale = 1 / clip_coefficient(norm, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def in_the_step(params, optimizer, scaler, max_norm):
    return OptimizerStep(optimizer, max_norm=max_norm, scaler=scaler)().grad_norm


def train(rank, order, make_optimizer, max_norm, bad_step=1):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 5), (70,), ())]
    optimizer, scaler = make_optimizer(params), GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    norms = []
    for step in range(5):
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params)
        if step == bad_step and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if not isinstance(optimizer, ShardedOptimizer):  # what DistributedDataParallel does
            for p in params:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        norms.append(order(params, optimizer, scaler, max_norm).item())
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in params]), norms, scaler.get_scale()


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_all_orders_give_the_optimizer_the_same_gradients(make_optimizer):
    def run(rank):
        return [
            [train(rank, order, make_optimizer, max_norm) for order in (unscale_clip_step, deferred, in_the_step)]
            for max_norm in (1.0, 1e6)
        ]

    first, second = on_ranks(2, run)
    clipped, free = first
    for values, norms, scale in clipped[1:]:
        torch.testing.assert_close(values, clipped[0][0], rtol=0, atol=1e-6)
        assert norms == pytest.approx(clipped[0][1], rel=1e-6)
        assert scale == clipped[0][2] == 2.0**16  # halved by the bad step, doubled again after two good ones
    for values, *_ in free[1:]:
        assert torch.equal(values, free[0][0])  # where clipping doesn't bind, no bit differs
    assert not torch.equal(clipped[0][0], free[0][0])
    for ours, theirs in zip([*clipped, *free], [way for ways in second for way in ways], strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_the_norm_is_of_unscaled_gradients_and_adam_sees_them_clipped():
    for order in (unscale_clip_step, deferred, in_the_step):
        p = torch.nn.Parameter(torch.zeros(4))
        optimizer, scaler = FusedAdamW([p], lr=1.0, weight_decay=0.0), GradScaler("cpu", init_scale=65536.0)
        scaler.scale((p * torch.tensor([5.0, 5.0, 5.0, 5.0])).sum()).backward()
        assert order([p], optimizer, scaler, 1.0).item() == pytest.approx(10)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((4,), 0.05), rtol=1e-5, atol=0)
