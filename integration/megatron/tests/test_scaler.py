"""Megatron's rule of the loss scale, its state dict, and no wait."""

import pytest
import torch

from stepstack_megatron import DynamicGradScaler
from stepstack_testing import HostSyncs

OVERFLOWS = [1, 0, 1, 1, 0, 0, 0, 1, 1]
SCALES = [1024, 1024, 512, 256, 256, 256, 512, 512, 256]


@pytest.fixture
def scaler():
    return DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 3, 2, device="cpu")


@pytest.mark.parametrize("as_tensor", [True, False])
def test_the_scale_follows_megatrons_rule_without_a_wait(scaler, as_tensor):
    scales = []
    for overflow in OVERFLOWS:
        with HostSyncs() as syncs:
            scaler.update(torch.tensor(float(overflow)) if as_tensor else bool(overflow))
            scales.append(scaler.scale)
        assert syncs == []
    assert [scale.item() for scale in scales] == SCALES
    assert all(scale.shape == (1,) for scale in scales)


def test_the_scale_stays_at_least_what_it_may_be(scaler):
    for _ in range(20):
        scaler.update(True)
    assert scaler.scale == 1.0
    assert scaler.inv_scale == 1.0


def test_inv_scale_is_the_reciprocal_rounded_once(scaler):
    scaler.load_state_dict({"scale": torch.tensor([3.0]), "growth_tracker": 0, "hysteresis_tracker": 2})
    assert scaler.inv_scale.item() == torch.tensor(1 / 3).item()


def test_a_state_dict_is_megatrons_and_goes_on_where_it_was_made(scaler):
    for overflow in OVERFLOWS[:4]:
        scaler.update(bool(overflow))
    state_dict = scaler.state_dict()
    assert state_dict == {"scale": torch.tensor([256.0]), "growth_tracker": 0, "hysteresis_tracker": 0}
    other = DynamicGradScaler(2.0, 1.0, 2.0, 0.5, 3, 2, device="cpu")
    other.load_state_dict({**state_dict, "hysteresis_tracker": -1})  # as Megatron counts on
    for overflow, scale in zip(OVERFLOWS[4:], SCALES[4:], strict=True):
        other.update(bool(overflow))
        assert other.scale == scale


@pytest.mark.parametrize("numbers", [(1024.0, 0.0, 2.0, 0.5, 3, 2), (1024.0, 1.0, 0.5, 0.5, 3, 2)])
def test_numbers_that_make_no_sense_are_refused(numbers):
    with pytest.raises(ValueError, match="must be"):
        DynamicGradScaler(*numbers, device="cpu")
