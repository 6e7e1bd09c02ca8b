"""Two models trained in turns, as adversarial ones are: each freezes what the other's optimizer lists."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks


def adamw(model, sharded):
    if sharded:
        return ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01, bucket_cap_mb=2e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@contextmanager
def toggled(optimizer, optimizers):
    """As Lightning's `toggle_optimizer` and `untoggle_optimizer` do it, by what is in `param_groups`."""
    flags = {param: param.requires_grad for it in optimizers for group in it.param_groups for param in group["params"]}
    for param in flags:
        param.requires_grad = False
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.requires_grad = flags[param]
    yield
    for param, flag in flags.items():
        param.requires_grad_(flag)


def in_turns(ranks, sharded):
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))
    judge = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = adamw(maker, sharded), adamw(judge, sharded)
    for number in range(8):
        data = [torch.Generator().manual_seed(10 * number + rank) for rank in ranks]
        noise = torch.cat([torch.randn(4, 7, generator=generator) for generator in data])
        real = torch.cat([torch.randn(4, 3, generator=generator) for generator in data])
        for optimizer in optimizers:
            with toggled(optimizer, optimizers):
                made = judge(maker(noise))
                if optimizer is optimizers[0]:
                    loss = bce(made, torch.ones_like(made))
                else:
                    judged = judge(real)
                    loss = bce(judged, torch.ones_like(judged)) + bce(made, torch.zeros_like(made))
                (loss / 2).backward()
                if number % 2:  # accumulated over two batches
                    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
                    torch.nn.utils.clip_grad_norm_(trained, 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
    return [param.detach().clone() for model in (maker, judge) for param in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_who_freezes_what_param_groups_list_freezes_the_model_s_parameters(world):
    expected = in_turns(range(world), False)
    for result in on_ranks(world, lambda rank: in_turns([rank], True)):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def check_listed(kind, rank=0):
    param = nn.Parameter(torch.arange(200.0))
    optimizer = ShardedOptimizer([param], torch.optim.SGD, lr=0.1)
    (part,) = optimizer.param_groups[0]["params"]
    assert isinstance(part, kind)
    assert part.is_leaf
    assert part.requires_grad
    for result in (part * 2, part.detach(), torch.zeros_like(part), part.clone(), torch._foreach_add([part], 1)[0]):
        assert type(result) is kind
        assert not result.requires_grad
    norm = torch.linalg.vector_norm(part)
    torch.testing.assert_close(norm.full_tensor() if kind is DTensor else norm, torch.arange(200.0).norm())
    if kind is DTensor:  # written between backward and step only
        param.square().sum().backward()
    part.mul_(2)
    if rank == 0:
        torch.testing.assert_close(param.detach()[:3], torch.tensor([0.0, 2.0, 4.0]))
    if kind is torch.Tensor:  # a DTensor can't be copied so
        assert type(copy.deepcopy(part)) is kind
    assert part.requires_grad_(False) is part
    assert not param.requires_grad


def test_what_is_computed_from_what_param_groups_list_is_a_tensor_like_others():
    check_listed(torch.Tensor)
    on_ranks(2, lambda rank: check_listed(DTensor, rank))
