"""The scaler's own calls, on one process."""

import pytest
import torch

from stepstack_grad_scaler import GradScaler
from stepstack_testing import HostSyncs


def model_and_optimizer(*, fused=True):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    return weight, torch.optim.AdamW([weight], lr=0.1, fused=fused)


def test_the_scale_is_there_before_anything_is_scaled():
    scale = (scaler := GradScaler("cpu", init_scale=1024.0)).scale_tensor
    assert scale == 1024
    assert scale.shape == ()
    assert scale.dtype == torch.float32
    scaler.scale(torch.ones(()))
    assert scaler.scale_tensor is scale


def test_a_flag_that_is_handed_in_needs_no_other_call():
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scale = scaler.scale_tensor
    scaler.update(found_inf=torch.tensor(1.0))
    assert scale == 512
    assert scaler.last_step_skipped
    assert scaler.skipped_steps == 1
    for _ in range(2):
        scaler.update(found_inf=torch.tensor(0.0))
    assert scale == 1024
    assert not scaler.last_step_skipped
    assert scaler.skipped_steps == 1


def test_a_step_composed_by_hand_waits_for_nothing():
    weight, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu", init_scale=1024.0)
    before = weight.detach().clone()
    with HostSyncs() as syncs:
        for factor in (1.0, float("inf")):
            scaler.scale((weight * factor).sum()).backward()
            norm = weight.grad.norm() / scaler.scale_tensor
            optimizer.grad_scale = scaler.scale_tensor.clone()
            optimizer.found_inf = found_inf = (~norm.isfinite()).float()
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            scaler.update(found_inf=found_inf)
            optimizer.zero_grad()
    assert syncs == []
    assert torch.allclose(weight, before * (1 - 0.1 * 0.01) - 0.1)
    assert scaler.scale_tensor == 512


def test_a_disabled_scaler_has_scale_1_and_never_changes():
    scaler = GradScaler("cpu", enabled=False)
    assert scaler.scale_tensor == 1
    assert scaler.scale_tensor is scaler.scale_tensor
    scaler.update(found_inf=torch.tensor(1.0))
    scaler.update()
    assert scaler.scale_tensor == 1
    assert not scaler.last_step_skipped
    assert scaler.skipped_steps == 0


@pytest.mark.parametrize("fused", [True, False])
def test_it_steps_as_torchs_scaler_does(fused):
    results = []
    for scaler in (
        GradScaler("cpu", 1024.0, growth_interval=2),
        torch.amp.GradScaler("cpu", 1024.0, growth_interval=2),
    ):
        weight, optimizer = model_and_optimizer(fused=fused)
        for factor in (1.0, float("inf"), 2.0, 3.0, 4.0):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((weight.detach(), scaler.get_scale(), scaler._get_growth_tracker()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
