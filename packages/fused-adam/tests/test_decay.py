"""How weights decay: as the constructor and the groups say, whatever a state dict was saved by, and never silently."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch

from stepstack_fused_adam import FusedAdam, FusedAdamW

L2 = partial(FusedAdam, adam_w_mode=False)


def trained(cls, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,)]]
    optimizer = cls(params, lr=0.1, **options)
    step(optimizer, range(3))
    return optimizer


def step(optimizer, seeds):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize(
    ("ours", "goes_on_as", "saved_by"),
    [
        (FusedAdam, torch.optim.AdamW, torch.optim.Adam),
        (FusedAdamW, torch.optim.AdamW, torch.optim.Adam),
        (FusedAdamW, torch.optim.AdamW, L2),
        (L2, torch.optim.Adam, torch.optim.AdamW),
    ],
)
def test_a_state_dict_that_says_otherwise_does_not_change_the_decay_and_is_told(ours, goes_on_as, saved_by):
    saved = trained(saved_by, weight_decay=0.5).state_dict()
    optimizer = trained(ours, weight_decay=0.1)
    theirs = trained(goes_on_as, weight_decay=0.1)
    with pytest.warns(UserWarning, match=r"weight_decay 0\.5\).*goes on doing so") as caught:
        optimizer.load_state_dict(saved)
    assert caught[0].filename == __file__
    same_kind = saved | {
        "param_groups": [
            {**group, "decoupled_weight_decay": goes_on_as is torch.optim.AdamW} for group in saved["param_groups"]
        ]
    }
    theirs.load_state_dict(same_kind)
    torch.testing.assert_close(step(optimizer, range(3, 6)), step(theirs, range(3, 6)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours", [FusedAdam, FusedAdamW, L2])
@pytest.mark.parametrize("saved_by", [torch.optim.Adam, torch.optim.AdamW])
def test_a_state_dict_without_decay_or_without_a_word_about_it_loads_quietly(ours, saved_by):
    without_decay = trained(saved_by, weight_decay=0.0).state_dict()
    wordless = trained(saved_by, weight_decay=0.5).state_dict()  # as Apex and torch before 2.6 save it
    for group in wordless["param_groups"]:
        del group["decoupled_weight_decay"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for saved in (without_decay, wordless):
            optimizer = trained(ours, weight_decay=0.1)
            before = optimizer.param_groups[0]["decoupled_weight_decay"]
            optimizer.load_state_dict(saved)
            assert optimizer.param_groups[0]["decoupled_weight_decay"] == before


@pytest.mark.parametrize(("ours", "reference"), [(FusedAdamW, torch.optim.AdamW), (L2, torch.optim.Adam)])
def test_a_group_may_say_how_it_decays_as_in_torch(ours, reference):
    ends = []
    for cls in (ours, reference):
        optimizer = trained(cls, weight_decay=0.5)
        for decoupled in (True, False):
            more = [torch.nn.Parameter(torch.ones(3))]
            optimizer.add_param_group({"params": more, "decoupled_weight_decay": decoupled})
        optimizer.param_groups[0]["decoupled_weight_decay"] ^= True
        ends.append(step(optimizer, range(3, 6)))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_decays_as_the_original(copied):
    optimizer = trained(FusedAdamW, weight_decay=0.5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "decoupled_weight_decay": False})
    twin = copied(optimizer)
    assert [group["decoupled_weight_decay"] for group in twin.param_groups] == [True, False]
    torch.testing.assert_close(step(twin, range(3, 6)), step(optimizer, range(3, 6)), rtol=0, atol=0)


def test_new_groups_of_l2_decay_so():
    assert trained(L2).defaults["decoupled_weight_decay"] is False
