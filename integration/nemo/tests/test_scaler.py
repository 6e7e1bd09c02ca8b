"""The loss scaler: NeMo's rule and state, without its faults."""

import pytest
import torch
from torch import nn

from stepstack_nemo import DistributedFusedAdam, GradScaler


def trajectory(scaler, overflows, optimizer=None):
    scales = []
    for overflow in overflows:
        scaler.scale(torch.zeros(()))
        scaler.update(found_inf=torch.tensor(float(overflow)))
        scales.append(scaler.get_scale())
    return scales


def test_hysteresis_forgives_the_first_of_several_and_is_whole_after_a_clean_step():
    scaler = GradScaler(1024.0, growth_interval=3, hysteresis=2, device="cpu")
    assert trajectory(scaler, [1, 0, 1, 1, 0, 0, 0, 1, 1]) == [1024, 1024, 1024, 512, 512, 512, 1024, 1024, 512]


def test_what_is_left_of_the_hysteresis_survives_a_checkpoint():
    scaler = GradScaler(1024.0, hysteresis=3, device="cpu")
    trajectory(scaler, [1, 1])
    resumed = GradScaler(hysteresis=3, device="cpu")
    resumed.load_state_dict(scaler.state_dict())
    assert trajectory(resumed, [1]) == trajectory(scaler, [1]) == [512]


def test_a_state_dict_of_nemos_scaler_is_read():
    scaler = GradScaler(hysteresis=2, device="cpu")
    scaler.load_state_dict(
        {
            "scale": 64.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1000,
            "_growth_tracker": 7,
            "_hysteresis_tracker": 1,
        }
    )
    assert trajectory(scaler, [1]) == [32]


def test_optimizer_update_skipped_says_so_until_it_is_forgotten():
    param = nn.Parameter(torch.zeros(3))
    optimizer, scaler = DistributedFusedAdam([param]), GradScaler(8.0, device="cpu")
    assert scaler.optimizer_update_skipped is None
    for factor, skipped in ((1.0, False), (torch.inf, True), (1.0, False)):
        scaler.scale(param.sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert bool(scaler.optimizer_update_skipped) is skipped
        scaler.optimizer_update_skipped = None
        assert scaler.optimizer_update_skipped is None
    with pytest.raises(ValueError, match="set to None"):
        scaler.optimizer_update_skipped = True


def test_other_optimizers_are_stepped_as_ever():
    param = nn.Parameter(torch.zeros(3))
    optimizer, scaler = torch.optim.AdamW([param], lr=0.1), GradScaler(8.0, device="cpu")
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(param.grad, torch.ones(3))
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.full((3,), -0.1))


def test_it_says_that_it_takes_flags_only_while_it_is_told():
    param = nn.Parameter(torch.zeros(3))
    optimizer, scaler = DistributedFusedAdam([param]), GradScaler(8.0, device="cpu")
    assert not optimizer._step_supports_amp_scaling
    scaler.scale(param.sum()).backward()
    seen = []
    optimizer.register_step_pre_hook(lambda told, *_: seen.append(told._step_supports_amp_scaling))
    scaler.step(optimizer)
    assert seen == [True]
    assert not optimizer._step_supports_amp_scaling
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_step_that_raised_is_made_up_for_with_the_clip_it_was_told():
    def raising():
        raise KeyError("batch")

    weights = []
    for raises in (False, True):
        param = nn.Parameter(torch.zeros(3))
        optimizer, scaler = DistributedFusedAdam([param], lr=1.0, eps=1.0), GradScaler(8.0, device="cpu")
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(0.5)
        if raises:
            with pytest.raises(KeyError):
                optimizer.step(raising)
        scaler.step(optimizer)
        weights.append(param.detach().clone())
    assert torch.equal(*weights)


def test_disabled_it_does_nothing():
    param = nn.Parameter(torch.zeros(3))
    optimizer, scaler = DistributedFusedAdam([param], lr=0.1), GradScaler(enabled=False, device="cpu")
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.optimizer_update_skipped is None
    torch.testing.assert_close(param.detach(), torch.full((3,), -0.1))
