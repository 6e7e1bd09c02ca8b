"""Learning rates by the number of applied steps."""

import math
from itertools import chain

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau

from stepstack_deepspeed._curves import Curve
from stepstack_deepspeed._schedules import ScheduledRates, SteppedScheduler, of_caller, of_config
from stepstack_deepspeed._section import Section
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_testing import HostSyncs


def optimizer_of(*lrs):
    return FusedAdamW([{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs])


def rates(scheduler, *, lrs=(0.5,), steps=12):
    """The rates of all groups, before the first step and after each."""
    optimizer, applied_steps = optimizer_of(*lrs), torch.zeros(())
    section = Section({"scheduler": scheduler})
    made = of_config(section)(optimizer)
    assert section.finish() == []
    assert isinstance(made, Curve)
    schedule = ScheduledRates(optimizer, made, applied_steps, on_device=True)
    said = [schedule.get_last_lr()]
    for _ in range(steps):
        applied_steps += 1
        with HostSyncs() as syncs:
            schedule.move()
        assert syncs == []
        said.append(schedule.get_last_lr())
    return said


def test_a_warm_up_starts_at_the_low_rate_twice_and_stays_at_the_high_one():
    said = rates({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.1}})
    assert list(chain(*said)) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4] + [0.5] * 8)


def test_a_warm_up_is_logarithmic_by_default():
    said = rates({"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.3}})
    expected = [0.0] + [0.3 * math.log(i + 1) / math.log(8) for i in range(8)] + [0.3] * 4
    assert list(chain(*said)) == pytest.approx(expected)


def test_after_the_warm_up_the_rate_may_fall_on_a_line_to_0():
    params = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear", "warmup_max_lr": 0.4}
    said = rates({"type": "WarmupDecayLR", "params": params}, steps=9)
    assert list(chain(*said)) == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0])


def test_after_the_warm_up_the_rate_may_fall_on_a_cosine_to_a_part_of_it():
    params = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear", "warmup_min_ratio": 0.5}
    said = rates({"type": "WarmupCosineLR", "params": params | {"cos_min_ratio": 0.1}}, lrs=(1.0,), steps=9)
    falls = [0.1 + 0.9 * (1 + math.cos(math.pi * progress / 4)) / 2 for progress in (1, 2, 3, 4, 4, 4)]
    assert list(chain(*said)) == pytest.approx([0.0, 0.5, 0.75, *falls, 0.1])


def test_each_group_may_have_a_rate_of_its_own():
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    said = rates(scheduler, lrs=(0.2, 0.4), steps=3)
    assert list(chain(*said)) == pytest.approx([0, 0, 0, 0, 0.1, 0.2, 0.2, 0.4])
    scheduler["params"] |= {"warmup_min_lr": [0.0, 0.2], "warmup_max_lr": [1.0, 0.4]}
    said = rates(scheduler, lrs=(0.2, 0.4), steps=3)
    assert list(chain(*said)) == pytest.approx([0, 0.2, 0, 0.2, 0.5, 0.3, 1.0, 0.4])
    with pytest.raises(ValueError, match=r"scheduler\.params\.warmup_min_lr has 2 rates, for 1 parameter groups"):
        rates(scheduler)


def test_a_schedule_goes_on_from_its_state():
    optimizer, applied_steps = optimizer_of(1.0), torch.tensor(5.0)
    made = of_config(Section({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}))(optimizer)
    schedule = ScheduledRates(optimizer, made, applied_steps, on_device=True)
    state, rate = schedule.state_dict(), schedule.get_last_lr()
    assert state == {"last_batch_iteration": 4}
    applied_steps.zero_()
    schedule.move()
    schedule.load_state_dict(state)
    assert schedule.get_last_lr() == rate
    assert applied_steps == 5


def test_for_an_optimizer_that_waits_anyway_rates_are_numbers():
    optimizer, applied_steps = optimizer_of(1.0), torch.tensor(2.0)
    made = of_config(Section({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}))(optimizer)
    ScheduledRates(optimizer, made, applied_steps, on_device=False)
    assert optimizer.param_groups[0]["lr"] == 0.001


@pytest.mark.parametrize("on_device", [True, False])
def test_a_scheduler_of_torch_stays_where_it_is_in_a_skipped_step(on_device):
    optimizer, scaler = optimizer_of(1.0, 2.0), GradScaler("cpu")
    schedule = SteppedScheduler(LambdaLR(optimizer, lambda step: 0.5**step), scaler, on_device=on_device)
    said = [schedule.get_last_lr()]
    for skipped in (0.0, 1.0, 1.0, 0.0, 1.0):
        optimizer.step()
        scaler.update(found_inf=torch.tensor(skipped))
        schedule.move()
        said.append(schedule.get_last_lr())
    assert [first for first, _ in said] == [1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert [second for _, second in said] == [2, 1, 1, 1, 0.5, 0.5]


def test_the_scheduler_itself_tells_of_the_applied_steps_and_is_moved_by_the_engine_only():
    optimizer, scaler = optimizer_of(1.0), GradScaler("cpu")
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    schedule = SteppedScheduler(scheduler, scaler, on_device=True)
    for skipped in (0.0, 1.0):
        optimizer.step()
        scaler.update(found_inf=torch.tensor(skipped))
        schedule.move()
    assert scheduler.get_last_lr() == [0.5]
    assert scheduler.state_dict() == schedule.state_dict()
    assert isinstance(scheduler, LambdaLR)
    with pytest.raises(RuntimeError, match=r"engine.step\(\) moves the schedule"):
        scheduler.step()
    state = scheduler.state_dict()
    schedule.move()
    scheduler.load_state_dict(state)
    assert scheduler.get_last_lr() == [0.5]


def test_one_cycle_goes_up_and_down_with_the_momentum_the_other_way_round():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    params |= {"decay_step_size": 1, "decay_lr_rate": 1.0, "cycle_min_mom": 0.5, "cycle_max_mom": 0.9}
    optimizer, applied_steps = optimizer_of(1.0), torch.zeros(())
    made = of_config(Section({"scheduler": {"type": "OneCycle", "params": params}}))(optimizer)
    schedule = ScheduledRates(optimizer, made, applied_steps, on_device=True)
    said = [(*schedule.get_lr(), schedule.get_mom()[0][0])]
    for _ in range(8):
        applied_steps += 1
        schedule.move()
        said.append((*schedule.get_last_lr(), schedule.get_mom()[0][0]))
    assert [lr for lr, _ in said] == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 2, 0.1 / 3])
    assert [beta for _, beta in said] == pytest.approx([0.5, 0.7, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9])
    with pytest.raises(RuntimeError, match=r"engine.step\(\) moves the schedule"):
        schedule.step()


def test_a_range_test_goes_up_without_an_end():
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5}
    said = rates({"type": "LRRangeTest", "params": params}, steps=4)
    assert list(chain(*said)) == pytest.approx([0.1, 0.125, 0.15, 0.175, 0.2])
    said = rates({"type": "LRRangeTest", "params": params | {"lr_range_test_staircase": True}}, steps=4)
    assert list(chain(*said)) == pytest.approx([0.1, 0.1, 0.15, 0.15, 0.2])


def test_the_config_may_name_a_scheduler_of_torch():
    optimizer = optimizer_of(1.0)
    scheduler = {"type": "CosineAnnealingLR", "params": {"T_max": 7}}
    made = of_config(Section({"scheduler": scheduler}))(optimizer)
    assert isinstance(made, CosineAnnealingLR)
    assert made.T_max == 7


def test_what_is_no_scheduler_of_this_optimizer_is_refused():
    optimizer, other = optimizer_of(1.0), optimizer_of(1.0)
    with pytest.raises(TypeError, match=r"lr_scheduler must be a scheduler of torch.* got int"):
        of_caller(3, optimizer, None)
    with pytest.raises(TypeError, match="the function given as lr_scheduler must make a torch scheduler; it made 3"):
        of_caller(lambda optimizer: 3, optimizer, None)
    with pytest.raises(TypeError, match="ReduceLROnPlateau, which moves on a metric"):
        of_caller(ReduceLROnPlateau, optimizer, None)
    with pytest.raises(ValueError, match="made for another optimizer"):
        of_caller(LinearLR(other), optimizer, optimizer)


def test_a_scheduler_that_changes_more_than_the_rate_says_how_not_to():
    optimizer, scaler = optimizer_of(1.0), GradScaler("cpu")
    schedule = SteppedScheduler(OneCycleLR(optimizer, 1.0, 10), scaler, on_device=True)
    optimizer.step()
    scaler.update(found_inf=torch.zeros(()))
    with pytest.raises(RuntimeError, match="cycle_momentum=False"):
        schedule.move()
