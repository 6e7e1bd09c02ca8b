"""A learning rate that stands still on skipped steps."""

import pytest
import torch
from torch.optim import lr_scheduler

from stepstack_grad_scaler import AppliedStepsLR, GradScaler
from stepstack_testing import HostSyncs

OVERFLOWS = [1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0]
SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "recursive": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[3],
    ),
}
each_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


class Contract(torch.optim.SGD):
    """Takes any `lr`, and steps on nothing."""

    _step_supports_amp_scaling = True

    def step(self):
        pass


def two_groups():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.1, 0.02)]
    return Contract(groups)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def update(scaler, optimizer, overflow):
    optimizer.step()
    scaler.update(found_inf=torch.tensor(float(overflow)))


def expected_rates(make):
    """The naive way, on the host."""
    optimizer = two_groups()
    scheduler = make(optimizer)
    expected = [rates(optimizer)]
    optimizer.step()
    for overflow in OVERFLOWS:
        if not overflow:
            scheduler.step()
        expected.append(rates(optimizer))
    return expected


@each_scheduler
def test_rates_are_those_of_the_applied_steps(make):
    optimizer, scaler = two_groups(), GradScaler("cpu")
    schedule = AppliedStepsLR(make(optimizer), scaler)
    seen = [rates(optimizer)]
    for overflow in OVERFLOWS:
        update(scaler, optimizer, overflow)
        with HostSyncs() as syncs:
            schedule.step()
        assert syncs == []
        seen.append(rates(optimizer))
    assert torch.allclose(torch.tensor(seen), torch.tensor(expected_rates(make)), rtol=1e-6, atol=1e-9)


@each_scheduler
def test_a_saved_schedule_goes_on_where_it_was(make):
    optimizer, scaler = two_groups(), GradScaler("cpu")
    schedule = AppliedStepsLR(make(optimizer), scaler)
    seen = [rates(optimizer)]
    for overflow in OVERFLOWS:
        saved = schedule.state_dict(), optimizer.state_dict()
        optimizer = two_groups()
        schedule = AppliedStepsLR(make(optimizer), scaler)
        optimizer.load_state_dict(saved[1])
        schedule.load_state_dict(saved[0])
        assert rates(optimizer) == seen[-1]
        update(scaler, optimizer, overflow)
        schedule.step()
        seen.append(rates(optimizer))
    assert torch.allclose(torch.tensor(seen), torch.tensor(expected_rates(make)), rtol=1e-6, atol=1e-9)


def test_the_rates_are_the_same_tensors_for_ever():
    optimizer, scaler = two_groups(), GradScaler("cpu")
    schedule = AppliedStepsLR(SCHEDULERS["cosine"](optimizer), scaler)
    before = [(id(group["lr"]), group["lr"].data_ptr()) for group in optimizer.param_groups]
    for overflow in OVERFLOWS * 4:
        update(scaler, optimizer, overflow)
        schedule.step()
    schedule.load_state_dict(schedule.state_dict())
    assert [(id(group["lr"]), group["lr"].data_ptr()) for group in optimizer.param_groups] == before


def test_adam_trains_as_with_a_scheduler_that_reads_the_flag():
    results = []
    for ours in (True, False):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        scaler = GradScaler("cpu", init_scale=8.0)
        schedule = SCHEDULERS["lambda"](optimizer)
        if ours:
            schedule = AppliedStepsLR(schedule, scaler)
        for overflow in [0, *OVERFLOWS]:
            scaler.scale((weight**2).sum() * (float("inf") if overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if ours or not scaler.last_step_skipped:
                schedule.step()
            optimizer.zero_grad()
        results.append(weight.detach())
    assert torch.allclose(*results, rtol=1e-6)


def test_a_scheduler_that_changes_more_than_the_rate_is_refused_by_name():
    optimizer, scaler = two_groups(), GradScaler("cpu")
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    schedule = AppliedStepsLR(lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20), scaler)
    update(scaler, optimizer, 0)
    with pytest.raises(RuntimeError, match="changes momentum of parameter group 0"):
        schedule.step()


def test_a_rate_that_is_a_tensor_already_is_refused():
    optimizer = Contract([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="lr of parameter group 0 is a tensor"):
        AppliedStepsLR(SCHEDULERS["lambda"](optimizer), GradScaler("cpu"))


def test_other_parameter_groups_are_refused_by_their_number():
    optimizer, scaler = two_groups(), GradScaler("cpu")
    schedule = AppliedStepsLR(SCHEDULERS["recursive"](optimizer), scaler)
    saved = schedule.state_dict()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.3})
    update(scaler, optimizer, 0)
    with pytest.raises(RuntimeError, match="has 3 parameter groups, and had 2 when the schedule was made"):
        schedule.step()
    one_group = Contract([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="of a schedule of 2 parameter groups; this optimizer has 1"):
        AppliedStepsLR(SCHEDULERS["recursive"](one_group), scaler).load_state_dict(saved)


def test_a_step_that_one_optimizer_skips_is_skipped_for_the_schedules_of_all():
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.AdamW([weight], lr=0.5, fused=True) for weight in (good, bad)]
    good.grad, bad.grad = torch.ones(2), torch.tensor([1.0, float("inf")])
    scaler = GradScaler("cpu")
    schedules = [AppliedStepsLR(SCHEDULERS["recursive"](optimizer), scaler) for optimizer in optimizers]
    for clean in (False, True):
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for schedule in schedules:
            schedule.step()
        assert [rates(optimizer) for optimizer in optimizers] == [[0.25 if clean else 0.5]] * 2
        bad.grad = torch.ones(2)
