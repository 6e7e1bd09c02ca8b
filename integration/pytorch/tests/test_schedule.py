import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_testing import HostSyncs


def halving(applied_steps):
    return 0.5**applied_steps


def torch_halving(optimizer):
    return LambdaLR(optimizer, halving)


def device_halving(optimizer):
    return halving


each_kind = pytest.mark.parametrize("schedule", [torch_halving, device_halving])


class Loop:
    """One parameter, two groups, a schedule: `step` gives the learning rates that it used."""

    def __init__(self, schedule, optimizer_class=FusedAdamW):
        self.params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        self.optimizer = optimizer_class(
            [{"params": self.params[:1], "lr": 1.0}, {"params": self.params[1:], "lr": 0.25}], fused=True
        )
        self.used = []
        self.optimizer.register_step_pre_hook(self._note)
        self.scheduler = schedule(self.optimizer)
        self.optimizer_step = OptimizerStep(self.optimizer, lr_scheduler=self.scheduler)

    def step(self, bad=False):
        for param in self.params:
            param.grad = torch.full((3,), math.inf if bad else 1.0)
        self.optimizer_step()
        return self.used.pop()

    def _note(self, *_):
        self.used.append([float(group["lr"]) for group in self.optimizer.param_groups])


@each_kind
@pytest.mark.parametrize("optimizer_class", [FusedAdamW, torch.optim.AdamW])
def test_a_skipped_step_leaves_the_schedule_where_it_is(schedule, optimizer_class):
    loop = Loop(schedule, optimizer_class)
    steps = [loop.step(bad) for bad in (False, False, True, True, False, False)]
    assert [first for first, _ in steps] == [1, 0.5, 0.25, 0.25, 0.25, 0.125]
    assert [second for _, second in steps] == [0.25, 0.125, 0.0625, 0.0625, 0.0625, 0.03125]
    assert loop.optimizer_step.applied_steps == 4


@each_kind
def test_the_first_step_may_be_skipped(schedule):
    loop = Loop(schedule)
    assert [loop.step(bad)[0] for bad in (True, False, False)] == [1, 1, 0.5]


@each_kind
def test_a_loop_goes_on_from_its_state_dicts(schedule):
    loop, resumed = Loop(schedule), Loop(schedule)
    for bad in (False, True, False, True):
        loop.step(bad)
    saved = copy.deepcopy((loop.optimizer.state_dict(), loop.optimizer_step.state_dict()))
    after = [loop.step(bad) for bad in (False, True, False)]
    resumed.optimizer.load_state_dict(saved[0])
    resumed.optimizer_step.load_state_dict(saved[1])
    assert [resumed.step(bad) for bad in (False, True, False)] == after
    assert resumed.optimizer_step.applied_steps == loop.optimizer_step.applied_steps == 4


def test_a_state_dict_does_not_change_afterwards():
    loop = Loop(device_halving)
    loop.step()
    saved = loop.optimizer_step.state_dict()
    loop.step()
    assert saved["applied_steps"] == 1


def test_a_state_dict_of_another_kind_of_schedule_is_refused():
    with pytest.raises(ValueError, match="another kind of lr_scheduler"):
        Loop(torch_halving).optimizer_step.load_state_dict(Loop(device_halving).optimizer_step.state_dict())


def test_a_function_of_applied_steps_is_never_waited_for():
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer_step = OptimizerStep(FusedAdamW(params), lr_scheduler=halving)
    for _ in range(2):
        params[0].grad = torch.ones(3)
        with HostSyncs() as syncs:
            optimizer_step()
        assert syncs == []


def test_a_torch_scheduler_is_waited_for_once_from_the_second_step_on():
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = FusedAdamW(params)
    optimizer_step = OptimizerStep(optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 1.0))
    waits = []
    for _ in range(3):
        params[0].grad = torch.ones(3)
        with HostSyncs() as syncs:
            optimizer_step()
        waits.append(len(syncs))
    assert waits == [0, 1, 1]


def test_learning_rates_are_written_in_place():
    loop = Loop(device_halving)
    loop.step()
    before = [group["lr"] for group in loop.optimizer.param_groups]
    loop.step()
    assert all(group["lr"] is lr for group, lr in zip(loop.optimizer.param_groups, before, strict=True))


def test_a_learning_rate_may_be_a_tensor_already():
    param = torch.nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.5)
    optimizer_step = OptimizerStep(FusedAdamW([param], lr=lr), lr_scheduler=halving)
    for expected in (0.5, 0.25, 0.125):
        param.grad = torch.ones(3)
        optimizer_step()
        assert lr == expected


def test_groups_may_share_the_tensor_of_their_learning_rate():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedAdamW([{"params": [param]} for param in params], lr=torch.tensor(0.5))
    optimizer_step = OptimizerStep(optimizer, lr_scheduler=halving)
    for expected in (0.5, 0.25, 0.125):
        optimizer_step()
        assert [group["lr"].item() for group in optimizer.param_groups] == [expected, expected]
        params[0].grad = torch.ones(3)


def test_a_group_that_is_added_later_is_scheduled_from_its_own_learning_rate():
    loop = Loop(device_halving)
    loop.step()
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 4.0})
    assert loop.step() == [0.5, 0.125, 2.0]


def test_schedulers_that_cannot_be_moved_are_refused():
    optimizer, other = (FusedAdamW([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        OptimizerStep(optimizer, lr_scheduler=ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="another optimizer"):
        OptimizerStep(optimizer, lr_scheduler=CosineAnnealingLR(other, 10))
    with pytest.raises(TypeError, match=r"gave 0\.5"):
        OptimizerStep(optimizer, lr_scheduler=lambda applied_steps: 0.5)
    with pytest.raises(TypeError, match="got str"):
        OptimizerStep(optimizer, lr_scheduler="cosine")
