"""State dicts through torch.distributed.checkpoint's functions, and their groups as torch makes and reads them."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from stepstack_fused_adam import FusedAdamW

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained(steps, **options):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    optimizer = FusedAdamW(model.parameters(), lr=0.1, **options)
    step(model, optimizer, range(steps))
    return model, optimizer


def step(model, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8", "amsgrad": True},
        {"exp_avg_sq_dtype": "block8", "master_weights": "fp32"},
    ],
)
def test_a_flattened_state_dict_goes_on_bit_for_bit(options, steps_before):
    model, optimizer = trained(3, **options)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FLAT))
    twin, other = trained(steps_before, **options)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, saved, options=FLAT)
    for one, its in ((model, optimizer), (twin, other)):
        step(one, its, range(3, 5))
    torch.testing.assert_close(list(twin.parameters()), list(model.parameters()), rtol=0, atol=0)
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_a_remainder_that_torch_loses_by_flattening_is_refused_and_changes_nothing():
    model, optimizer = trained(3, master_weights="remainder")
    saved = get_optimizer_state_dict(model, optimizer, options=FLAT)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"no master weight of parameter 0 .*flatten_optimizer_state_dict=False"):
        set_optimizer_state_dict(model, optimizer, saved, options=FLAT)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def both(params):
    generator = torch.Generator().manual_seed(0)
    for cls in (FusedAdamW, torch.optim.AdamW):
        yield cls, [torch.nn.Parameter(torch.randn(3, generator=generator)) for _ in range(params)]


def test_repeated_parameters_have_the_numbers_that_torch_gives_them():
    numbers, keys = [], []
    for cls, (first, second) in both(2):
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = cls([{"params": [first, second, first]}, {"params": [torch.nn.Parameter(torch.ones(2))]}])
        optimizer.param_groups.extend(optimizer.param_groups)
        for param in (first, second):
            param.grad = torch.ones(3)
        optimizer.step()
        state_dict = optimizer.state_dict()
        numbers.append([group["params"] for group in state_dict["param_groups"]])
        keys.append(sorted(state_dict["state"]))
        optimizer.load_state_dict(state_dict)
    assert numbers[0] == numbers[1] == [[2, 1, 2], [3], [2, 1, 2], [3]]
    assert keys[0] == keys[1] == [1, 2]


def test_what_others_keep_in_a_group_is_what_the_state_dict_has():
    """A schedule made after the load begins at the rate that was loaded."""
    rates = []
    for cls, params in both(2):
        saved = cls(params, lr=0.1).state_dict()
        saved["param_groups"][0]["theirs"] = 3
        optimizer = cls(params, lr=0.7)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["theirs"] == 3
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["initial_lr"]))
    assert rates[0] == rates[1] == (0.1, 0.1)
