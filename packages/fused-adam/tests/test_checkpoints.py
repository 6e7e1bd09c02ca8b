"""State dicts: torch's format both ways, in copies, with dtypes, flags and addresses kept."""

import copy
import io
import pickle

import pytest
import torch

from stepstack_fused_adam import FusedAdamW


def model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 3, 2, 2)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, seeds):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return params


def as_lists(params):
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("master_weights", [None, "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_goes_on_bit_for_bit(dtype, master_weights):
    optimizer = FusedAdamW(model(dtype), lr=0.1, master_weights=master_weights)
    train(optimizer, range(3))
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), as_lists(optimizer.param_groups[0]["params"])), file)
    file.seek(0)
    saved, weights = torch.load(file)
    twin = FusedAdamW(model(dtype), lr=0.3, master_weights=master_weights)
    for param, weight in zip(twin.param_groups[0]["params"], weights, strict=True):
        param.data.copy_(weight)
    twin.load_state_dict(saved)
    for one, other in zip(train(optimizer, range(3, 6)), train(twin, range(3, 6)), strict=True):
        assert torch.equal(one, other)


def test_it_loads_what_torch_saved():
    theirs = torch.optim.AdamW(model(), lr=0.1, amsgrad=True, foreach=False)
    train(theirs, range(3))
    ours = FusedAdamW(model(), amsgrad=True)
    for param, twin in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        param.data.copy_(twin)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.1
    torch.testing.assert_close(train(ours, range(3, 6)), train(theirs, range(3, 6)), rtol=1e-6, atol=1e-6)


def test_a_checkpoint_decides_on_amsgrad():
    for live in (False, True):
        theirs = torch.optim.AdamW(model(), lr=0.1, amsgrad=not live, foreach=False)
        train(theirs, range(3))
        ours = FusedAdamW(model(), amsgrad=live)
        train(ours, range(1))
        for param, twin in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            param.data.copy_(twin)
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["amsgrad"] is not live
        torch.testing.assert_close(train(ours, range(3, 6)), train(theirs, range(3, 6)), rtol=1e-6, atol=1e-6)


def test_torch_loads_what_it_saved():
    ours = FusedAdamW(model(), lr=0.1)
    train(ours, range(3))
    for flags in ({"foreach": False}, {"fused": True}):
        theirs = torch.optim.AdamW(model(), **flags)
        for param, twin in zip(theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            param.data.copy_(twin)
        theirs.load_state_dict(ours.state_dict())
        mine = copy.deepcopy(ours)
        torch.testing.assert_close(train(mine, range(3, 6)), train(theirs, range(3, 6)), rtol=1e-6, atol=1e-6)


def test_wide_moments_stay_wide_in_a_narrow_model():
    wide = torch.optim.AdamW(model(), lr=0.1, foreach=False)
    train(wide, range(3))
    narrow = FusedAdamW(model(torch.bfloat16))
    narrow.load_state_dict(wide.state_dict())
    for param, twin in zip(narrow.param_groups[0]["params"], wide.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert narrow.state[param][name].dtype == torch.float32
            assert torch.equal(narrow.state[param][name], wide.state[twin][name])


def test_asking_for_a_state_dict_changes_nothing():
    asked, twin = FusedAdamW(model()), FusedAdamW(model())
    assert asked.state_dict()["state"] == {}
    asked.load_state_dict(asked.state_dict())
    for one, other in zip(train(asked, range(2)), train(twin, range(2)), strict=True):
        assert torch.equal(one, other)
    assert [asked.state[param]["step"].item() for param in asked.param_groups[0]["params"]] == [2, 2, 2]


def test_a_state_dict_shares_no_memory():
    optimizer = FusedAdamW(model(torch.bfloat16), lr=torch.tensor(0.1), master_weights="fp32")
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    train(optimizer, range(2, 4))
    optimizer.param_groups[0]["lr"].fill_(9.0)
    torch.testing.assert_close(saved, before, rtol=0, atol=0)
    optimizer.load_state_dict(saved)
    train(optimizer, range(2))
    torch.testing.assert_close(saved, before, rtol=0, atol=0)


def test_flags_and_tensors_of_the_constructor_survive_a_load():
    rate = torch.tensor(0.5)
    optimizer = FusedAdamW(model(torch.bfloat16), lr=rate, master_weights="fp32", fused=True, backend="torch")
    other = torch.optim.AdamW(model(torch.bfloat16), lr=0.25, foreach=True, weight_decay=0.3)
    optimizer.load_state_dict(other.state_dict())
    group = optimizer.param_groups[0]
    assert group["lr"] is rate
    assert rate == 0.25
    assert group["weight_decay"] == 0.3
    assert group["fused"] is True
    assert group["foreach"] is None
    (param, *_) = train(optimizer, [0])
    assert optimizer.state[param]["master_weight"].dtype == torch.float32


def test_different_counts_part_those_that_shared_one():
    saved = FusedAdamW(model())
    train(saved, range(2))
    state_dict = saved.state_dict()
    state_dict["state"][1]["step"] = 7  # an int, as older checkpoints have it
    loaded = FusedAdamW(model())
    train(loaded, range(1))
    loaded.load_state_dict(state_dict)
    states = [loaded.state[param] for param in loaded.param_groups[0]["params"]]
    assert [state["step"].item() for state in states] == [2, 7, 2]
    train(loaded, [0])
    assert [state["step"].item() for state in states] == [3, 8, 3]


def test_masters_that_a_checkpoint_lacks_are_the_parameters():
    theirs = torch.optim.AdamW(model(torch.bfloat16), foreach=False)
    train(theirs, range(2))
    ours = FusedAdamW(model(torch.bfloat16), master_weights="fp32")
    ours.load_state_dict(theirs.state_dict())
    for param in ours.param_groups[0]["params"]:
        assert torch.equal(ours.state[param]["master_weight"], param.float())


@pytest.mark.parametrize("master_weights", [None, "fp32", "remainder"])
def test_masters_are_also_read_under_the_name_of_other_libraries(master_weights):
    saved = FusedAdamW(model(torch.bfloat16), lr=0.1, master_weights="fp32")
    train(saved, range(2))
    state_dict = saved.state_dict()
    masters = [state.pop("master_weight") for state in state_dict["state"].values()]
    for state, master in zip(state_dict["state"].values(), masters, strict=True):
        state["master_param"] = master
    loaded = FusedAdamW(model(torch.bfloat16), master_weights=master_weights)
    loaded.load_state_dict(state_dict)
    again = loaded.state_dict()["state"]
    for number, master in enumerate(masters):
        assert "master_param" not in again[number]
        if master_weights:
            assert torch.equal(again[number]["master_weight"], master)
        else:
            assert "master_weight" not in again[number]


def test_states_that_a_checkpoint_lacks_are_forgotten():
    optimizer = FusedAdamW(model())
    empty = optimizer.state_dict()
    train(optimizer, range(2))
    optimizer.load_state_dict(empty)
    assert len(optimizer.state) == 0


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    optimizer = FusedAdamW(model())
    train(optimizer, range(1))
    saved, before = optimizer.state_dict(), optimizer.state_dict()
    with pytest.raises(ValueError, match=r"the groups have \[2\] parameters, those of the state dict \[3\]"):
        FusedAdamW(model()[:2]).load_state_dict(saved)
    saved["param_groups"][0]["lr"] = 7.0
    saved["state"][0]["exp_avg"].fill_(7.0)
    state = saved["state"][1]
    state["exp_avg"] = torch.zeros(6)
    with pytest.raises(ValueError, match="the saved exp_avg of parameter 1 of group 0"):
        optimizer.load_state_dict(saved)
    del state["exp_avg"]
    with pytest.raises(ValueError, match="parameter 1 of group 0 has no exp_avg"):
        optimizer.load_state_dict(saved)
    state["exp_avg"] = state["exp_avg_sq"]
    del state["step"]
    with pytest.raises(ValueError, match="neither the saved state of parameter 1 of group 0 nor its group has a step"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0] |= {"amsgrad": True, "step": 1}
    with pytest.raises(ValueError, match="parameter 0 of group 0 has no max_exp_avg_sq"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_a_memory_format_that_changed_is_an_error_and_a_state_dict_from_before_still_loads():
    optimizer = FusedAdamW(model(torch.bfloat16), master_weights="fp32")
    params = train(optimizer, range(2))
    saved = optimizer.state_dict()
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    for refused in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(ValueError, match=r"exp_avg of parameter 2 of .* a new optimizer can load the state dict"):
            refused()
    anew = FusedAdamW(params, master_weights="fp32")
    anew.load_state_dict(saved)
    torch.testing.assert_close(anew.state_dict(), saved, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_alike(copied):
    optimizer = FusedAdamW(model(torch.bfloat16), lr=0.1, master_weights="fp32", backend="torch")
    train(optimizer, range(2))
    twin = copied(optimizer)
    for one, other in zip(train(twin, range(2, 4)), train(optimizer, range(2, 4)), strict=True):
        assert torch.equal(one, other)


def test_hooks_are_called():
    optimizer = FusedAdamW(model())
    train(optimizer, range(1))
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: called.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "extra": 1})
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert called == ["pre", "post"]
