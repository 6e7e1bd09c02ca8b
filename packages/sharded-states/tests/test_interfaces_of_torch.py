"""What torch offers around an optimizer: arguments of step, schedulers, averages, state dicts, compilers, profiles."""

import copy
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from stepstack_sharded_states import ShardedLoadPlanner, ShardedOptimizer
from stepstack_testing import on_ranks


def small(**options):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1, **options)


class Louder(torch.optim.SGD):
    def step(self, closure=None, *, times=1):
        for _ in range(times):
            super().step(closure)


@pytest.mark.parametrize("scaled", [False, True])
def test_other_arguments_of_step_go_to_the_inner_optimizer(scaled):
    p = nn.Parameter(torch.zeros(3))
    optimizer = ShardedOptimizer([p], Louder, lr=1.0)
    p.sum().backward()
    if scaled:
        optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step(None, times=4)
    assert torch.equal(p, torch.full((3,), -2.0 if scaled else -4.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'twice'"):
        optimizer.step(twice=True)


@pytest.mark.parametrize("function", [get_optimizer_state_dict, get_state_dict])
def test_functions_that_would_look_for_parameters_in_param_groups_are_told_what_to_do(function):
    model, optimizer = small()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"save its sharded_state_dict\(\)"):
            function(model, optimizer)
        model(torch.ones(3)).sum().backward()
        optimizer.step()


def test_a_backward_under_compiled_autograd_says_what_to_do():
    model, _ = small()
    compiler = torch.compile(backend="eager")
    with (
        torch._dynamo.compiled_autograd._enable(compiler),
        pytest.raises(RuntimeError, match="compiled autograd"),
    ):
        model(torch.ones(3)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_is_scripted_traced_and_compiled_in_one_graph_beside_its_optimizer():
    model, optimizer = small()
    x = torch.ones(3)
    model(x).sum().backward()
    optimizer.step()
    expected = model(x)
    compiled = [torch.compile(it, backend="eager", fullgraph=True) for it in (model, copy.deepcopy(model))]
    for other in (torch.jit.script(model), torch.jit.trace(model, x), *compiled):
        torch.testing.assert_close(other(x), expected)


def test_an_option_that_is_nan_is_saved_and_loaded_as_any_other(tmp_path):
    def check(rank):
        model, optimizer = small()
        optimizer.param_groups[0]["weight_decay"] = math.nan
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
        other = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW)
        state_dict = other.sharded_state_dict()
        dcp.load(state_dict, checkpoint_id=tmp_path, planner=ShardedLoadPlanner())
        other.load_sharded_state_dict(state_dict)
        other.load_full_state_dict(other.full_state_dict())
        other.load_state_dict(other.state_dict())
        return other.param_groups[0]["weight_decay"]

    assert math.isnan(on_ranks(1, check)[0])


def test_a_profiler_shows_the_step():
    model, optimizer = small()
    model(torch.ones(3)).sum().backward()
    with torch.profiler.profile() as profile:
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#ShardedOptimizer.step", "Optimizer.step#AdamW.step"} <= names


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_of_torch_s_and_an_average_of_the_weights_go_as_with_torch_s_optimizer(scheduler):
    def train(make):
        p, q = nn.Parameter(torch.linspace(-1, 1, 100)), nn.Parameter(torch.ones(3))
        model = nn.ParameterList([p, q])
        optimizer = make([{"params": [p]}, {"params": [q], "lr": 0.05}])
        schedule = SCHEDULERS[scheduler](optimizer)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(6):
            optimizer.step(lambda: (p.square().sum() + q.square().sum()).backward() or 0.0)
            optimizer.zero_grad()
            schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
            average.update_parameters(model)
        return [*model, *average.parameters()], [group["lr"] for group in optimizer.param_groups]

    expected, lr = train(lambda groups: torch.optim.AdamW(groups, lr=0.1))
    found, same_lr = train(lambda groups: ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1))
    torch.testing.assert_close(found, expected)
    assert same_lr == lr
