"""What the scaler remembers: saved, loaded, copied, and always in the same place."""

import copy
import pickle

import pytest
import torch

from stepstack_grad_scaler import GradScaler


def test_all_tensors_stay_where_they_are_for_fifty_steps_and_a_load():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = GradScaler("cpu", growth_interval=2, hysteresis=2)
    names = ("_scale", "_growth_tracker", "_hysteresis_tracker", "_last_step_skipped", "_skipped_steps")

    def where():
        tensors = [getattr(scaler, name) for name in names]
        return [(id(tensor), tensor.data_ptr()) for tensor in tensors]

    scaler.scale(torch.ones(()))
    before = where()
    for step in range(50):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if step % 3 == 0 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(GradScaler("cpu", init_scale=4.0).state_dict())
    scaler.update(2.0)
    assert where() == before
    assert scaler.scale_tensor is scaler._scale
    assert scaler.last_step_skipped is scaler._last_step_skipped
    assert scaler.skipped_steps is scaler._skipped_steps


def test_a_state_dict_restores_hysteresis_exactly():
    saved = GradScaler("cpu", preset="megatron", growth_interval=3)
    for overflow in (0, 1, 0):
        saved.update(found_inf=torch.tensor(float(overflow)))
    loaded = GradScaler("cpu")
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state_dict() == saved.state_dict()
    assert (loaded.get_scale(), loaded.skipped_steps.item()) == (2.0**32, 1)
    for scaler in (saved, loaded):
        scaler.update(found_inf=torch.tensor(1.0))  # the second of two
    assert loaded.get_scale() == saved.get_scale() == 2.0**31


@pytest.mark.parametrize("made", [False, True], ids=["before the first use", "in use"])
def test_a_state_dict_of_torch_loads_and_makes_hysteresis_whole(made):
    scaler = GradScaler("cpu", init_scale=1024.0, hysteresis=2)
    if made:
        scaler.update(found_inf=True)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5).state_dict())
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.skipped_steps.item()) == (64, 5, 0)
    scaler.update(found_inf=True)
    assert scaler.get_scale() == 64
    scaler.update(found_inf=True)
    assert scaler.get_scale() == 32


def test_a_scale_that_fell_to_zero_is_loaded_as_the_smallest():
    state = torch.amp.GradScaler("cpu").state_dict() | {"scale": 0.0}
    (scaler := GradScaler("cpu", min_scale=0.5)).load_state_dict(state)
    assert scaler.get_scale() == 0.5


@pytest.mark.parametrize("made", [False, True], ids=["before the first use", "in use"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"hysteresis": -1}, "hysteresis is -1"),
        ({"growth_interval": "7"}, "growth_interval is '7'; it must be a whole number"),
        ({"scale": float("nan")}, "scale of the state dict is nan; it must be a number in"),
        ({"scale": float("inf")}, "scale of the state dict is inf"),
        ({"scale": None}, "scale of the state dict is None"),
        ({"scale": torch.ones(2)}, r"scale of the state dict is tensor\(\[1., 1.\]\)"),
        ({"_growth_tracker": 2**40}, f"_growth_tracker of the state dict is {2**40}"),
        ({"_hysteresis_tracker": "one"}, "_hysteresis_tracker of the state dict is 'one'"),
    ],
    ids=str,
)
def test_a_bad_state_dict_changes_nothing(made, bad, message):
    scaler = GradScaler("cpu")
    if made:
        scaler.update(found_inf=True)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(before | {"scale": 2.0, "growth_interval": 5} | bad)
    assert scaler.state_dict() == before


def test_what_a_state_dict_lacks_is_said():
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="_growth_tracker of the state dict is missing beside scale, growth_tracker"):
        scaler.load_state_dict({"scale": 8.0, "growth_tracker": 3})
    with pytest.raises(RuntimeError, match="state dict is empty"):
        scaler.load_state_dict({})
    assert scaler.get_scale() == 65536


@pytest.mark.parametrize("made", [False, True], ids=["before the first use", "in use"])
def test_numbers_of_a_state_dict_may_be_tensors(made):
    scaler = GradScaler("cpu")
    if made:
        scaler.update(found_inf=True)
    scale = torch.tensor([8.0])
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": torch.tensor(3)})
    scale.fill_(1)
    assert (scaler.scale_tensor, scaler._growth_tracker) == (8, 3)
    assert (scaler.state_dict()["scale"], scaler.state_dict()["_growth_tracker"]) == (8, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_a_copy_goes_on_alone(duplicate, enabled):
    scaler = GradScaler("cpu", init_scale=1024.0, hysteresis=2, enabled=enabled)
    scaler.update(found_inf=True)
    twin = duplicate(scaler)
    twin.update(found_inf=True)
    assert (scaler.get_scale(), twin.get_scale()) == ((1024, 512) if enabled else (1, 1))
    assert twin.scale_tensor is not scaler.scale_tensor
    assert (scaler.skipped_steps.item(), twin.skipped_steps.item()) == ((1, 2) if enabled else (0, 0))
