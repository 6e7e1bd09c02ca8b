"""FusedAdam: Apex's arguments in Apex's order."""

import copy
import inspect

import pytest
import torch

from stepstack_fused_adam import FusedAdam, steps_in_groups


def parameters():
    return [
        torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for shape in [(3, 4), (5,)]
    ]


def train(params, optimizer, steps=3):
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in params]


def test_the_arguments_are_apexs():
    names = list(inspect.signature(FusedAdam).parameters)
    assert names[:11] == [
        "params",
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "adam_w_mode",
        "weight_decay",
        "amsgrad",
        "set_grad_none",
        "capturable",
        "master_weights",
    ]


@pytest.mark.parametrize(("adam_w_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_it_decays_as_asked(adam_w_mode, reference):
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, 0.1, True, (0.8, 0.9), 1e-8, adam_w_mode, 0.5)
    other = reference(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, foreach=False)
    torch.testing.assert_close(train(ours, optimizer), train(theirs, other), rtol=1e-6, atol=1e-6)


def test_it_does_not_decay_by_default():
    ours, theirs = parameters(), parameters()
    other = torch.optim.Adam(theirs, foreach=False)
    torch.testing.assert_close(train(ours, FusedAdam(ours)), train(theirs, other), rtol=1e-6, atol=1e-6)


def test_without_bias_correction_the_first_step_is_small():
    params = [torch.nn.Parameter(torch.zeros(1))]
    params[0].grad = torch.ones(1)
    FusedAdam(params, lr=0.1, bias_correction=False).step()
    torch.testing.assert_close(params[0].detach(), torch.tensor([-0.1 * 0.1 / 0.001**0.5]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("given", "kept"), [(True, torch.float32), ("fp32", torch.float32), (False, None)])
def test_master_weights_may_be_a_bool(given, kept):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param], master_weights=given)
    optimizer.step()
    master = optimizer.state[param].get("master_weight")
    assert (None if master is None else master.dtype) == kept


def test_zero_grad_does_what_the_constructor_says():
    for set_grad_none in (True, False):
        params = parameters()
        optimizer = FusedAdam(params, set_grad_none=set_grad_none)
        train(params, optimizer, steps=1)
        optimizer.zero_grad()
        assert (params[0].grad is None) == set_grad_none
        optimizer.zero_grad(set_to_none=True)
        assert params[0].grad is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: optimizer])
def test_the_decay_survives_copies_loads_and_new_groups(copied):
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours[:1], lr=0.1, adam_w_mode=False, weight_decay=0.5)
    optimizer.add_param_group({"params": ours[1:]})
    other = torch.optim.Adam(theirs, lr=0.1, weight_decay=0.5, foreach=False)
    train(ours, optimizer)
    optimizer = copied(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    ours = [param for group in optimizer.param_groups for param in group["params"]]
    train(theirs, other)
    torch.testing.assert_close(train(ours, optimizer), train(theirs, other), rtol=1e-5, atol=1e-5)


def test_betas_in_third_place_are_refused():
    with pytest.raises(TypeError, match="pass betas by name"):
        FusedAdam(parameters(), 0.1, (0.9, 0.99))


def test_steps_in_the_group_are_written_and_read():
    """As Apex and Transformer Engine save them: one count for a group, none in the states."""
    params, theirs = parameters(), parameters()
    other = torch.optim.Adam(theirs, lr=0.1, foreach=False)
    train(theirs, other)
    saved = steps_in_groups(other.state_dict())
    assert saved["param_groups"][0]["step"] == 3
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq"}
    saved["param_groups"][0]["step"] = torch.tensor([3], dtype=torch.int32)
    optimizer = FusedAdam(params, lr=0.1)
    for param, twin in zip(params, theirs, strict=True):
        param.data.copy_(twin)
    optimizer.load_state_dict(saved)
    assert optimizer.state[params[1]]["step"] == 3
    assert "step" not in optimizer.param_groups[0]
    torch.testing.assert_close(train(params, optimizer), train(theirs, other), rtol=1e-6, atol=1e-6)


def test_different_counts_do_not_fit_into_a_group():
    params = parameters()
    optimizer = FusedAdam(params)
    assert steps_in_groups(optimizer.state_dict())["param_groups"][0]["step"] == 0
    train(params, optimizer)
    params[0].grad = None
    optimizer.step()
    with pytest.raises(ValueError, match=r"group 0 have made different numbers of steps: \[3.0, 4.0\]"):
        steps_in_groups(optimizer.state_dict())
