"""A look at single parameters of an engine on two ranks, and writing them."""

from itertools import product

import pytest
import torch
from plain import ADAM, DTYPES, RANKS, batch, config, engine_of, net, train

import stepstack_deepspeed as ours
from stepstack_testing import on_ranks

CASES = list(product(range(4), ("fp32", "bf16"), ("AdamW", "SGD"), (False, True)))
"""Stage, dtype, optimizer, offload."""
LR = 0.5


def engine(stage, dtype, name, offload):
    optimizer = {"type": name, "params": ADAM if name == "AdamW" else {"lr": LR, "momentum": 0.5}}
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    model = net()
    model.norm.requires_grad_(False)
    return engine_of(model=model, dtype=dtype, clip=0.0, optimizer=optimizer, zero_optimization=zero)


@pytest.fixture(scope="module")
def outcomes():
    """All in one launch."""
    first, second = on_ranks(RANKS, lambda rank: [look(rank, *case) for case in CASES], timeout=60.0)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return dict(zip(CASES, first, strict=True))


def look(rank, *case):
    each = engine(*case)
    named = dict(each.module.named_parameters())
    trained = {name: param for name, param in named.items() if "norm" not in name}
    frozen = ours.safe_get_full_fp32_param(named["norm.weight"])
    start = {name: ours.safe_get_full_fp32_param(param) for name, param in trained.items()}
    each.backward(each(*batch(rank, 0)))
    grads = {name: ours.safe_get_full_grad(param) for name, param in trained.items()}
    ours.safe_set_full_grad(named["first.bias"], torch.ones(29))
    set_grad = ours.safe_get_full_grad(named["first.bias"])
    each.step()
    end = {name: ours.safe_get_full_fp32_param(param) for name, param in trained.items()}
    key = "exp_avg" if case[2] == "AdamW" else "momentum_buffer"
    states = {name: ours.safe_get_full_optimizer_state(param, key) for name, param in trained.items()}
    ours.safe_set_full_optimizer_state(named["last.weight"], torch.full((31, 29), 0.25), key)
    ours.safe_set_full_fp32_param(named["last.weight"], end["last.weight"] + 2**-12)
    again = (
        ours.safe_get_full_fp32_param(named["last.weight"]),
        ours.safe_get_full_optimizer_state(named["last.weight"], key),
    )
    gone = ours.safe_get_full_grad(named["last.weight"])
    train(each, rank, 1)
    last = ours.safe_get_full_fp32_param(named["last.weight"])
    return {
        "frozen": frozen, "start": start, "grads": grads, "set_grad": set_grad, "end": end, "states": states,
        "again": again, "gone": gone, "last": last,
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_optimizer_steps_is_seen_and_set_whole(outcomes, case):
    _, dtype, name, _ = case
    seen = outcomes[case]
    assert seen["frozen"] is seen["gone"] is None
    model = net().to(DTYPES[dtype])
    for rank in range(RANKS):
        (model(*batch(rank, 0)) / RANKS).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == "fp32" else {"rtol": 0.05, "atol": 5e-3}
    for key, param in model.named_parameters():
        if "norm" in key:
            continue
        torch.testing.assert_close(seen["start"][key], param.detach().float(), rtol=0, atol=0)
        torch.testing.assert_close(seen["grads"][key].float(), param.grad.float(), **tolerance)
        grad = seen["grads"][key].float() if key != "first.bias" else torch.ones(29)
        moved = seen["end"][key] - seen["start"][key]
        if name == "SGD":
            torch.testing.assert_close(moved, -LR * grad, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(seen["states"][key], grad, rtol=1e-6, atol=1e-7)
        else:
            torch.testing.assert_close(seen["states"][key], (1 - ADAM["betas"][0]) * grad, rtol=1e-5, atol=1e-7)
    assert torch.equal(seen["set_grad"].float(), torch.ones(29))
    assert torch.equal(seen["again"][0], seen["end"]["last.weight"] + 2**-12)
    assert torch.equal(seen["again"][1], torch.full((31, 29), 0.25))
    assert not torch.equal(seen["last"], seen["again"][0])


def test_masters_that_are_not_made_yet_are_not_set_on_any_rank():
    def on_rank(rank):
        each = engine_of(dtype="bf16")
        bias = each.module.first.bias
        assert bias.numel() <= 64  # a piece of one rank
        with pytest.raises(RuntimeError, match="the fp32 weights are made in the first step"):
            ours.safe_set_full_fp32_param(bias, torch.ones(29))
        train(each, rank)
        ours.safe_set_full_fp32_param(bias, torch.ones(29))
        return torch.equal(ours.safe_get_full_fp32_param(bias), torch.ones(29))

    assert on_ranks(RANKS, on_rank) == [True] * RANKS


def test_a_stranger_or_another_shape_is_refused():
    each = ours.initialize(model=net(), config=config(), dist_init_required=False)[0]
    with pytest.raises(ValueError, match=r"a parameter of shape \(2,\) is of no engine"):
        ours.safe_get_full_grad(torch.nn.Parameter(torch.zeros(2)))
    bias = each.module.first.bias
    with pytest.raises(ValueError, match=r"of the shape of 'first.bias', \(29,\), got \(28,\)"):
        ours.safe_set_full_fp32_param(bias, torch.zeros(28))
    with pytest.raises(RuntimeError, match="has none yet to be set: a gradient is there after backward"):
        ours.safe_set_full_grad(bias, torch.zeros(29))
    with pytest.raises(RuntimeError, match="a state after the first step"):
        ours.safe_set_full_optimizer_state(bias, torch.zeros(29), "exp_avg")
    assert ours.safe_get_full_optimizer_state(bias, "exp_avg") is None
