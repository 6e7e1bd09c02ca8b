"""What callers change in `param_groups` and `state` between steps ends where it ends with torch's optimizer."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

SHAPES = ((20, 16), (16,), (9, 20), (130,), (3,), (40, 2))


def fresh():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make(params, sharded, **options):
    groups = [
        {"params": [(f"p{i}", params[i]) for i in numbers], "lr": 0.1 / (at + 1)}
        for at, numbers in enumerate(((0, 1), (2, 3), (4, 5)))
    ]
    if sharded:
        return ShardedOptimizer(groups, torch.optim.AdamW, bucket_cap_mb=0.001, **options)
    return torch.optim.AdamW(groups, **options)


def backward(params, number, ranks):
    """The mean over `ranks` of what each rank's batch gives."""
    sum(
        (param.sin() * (1 + 0.1 * i * number + rank)).sum() / len(ranks)
        for i, param in enumerate(params)
        for rank in ranks
    ).backward()


def steps(params, optimizer, numbers, ranks):
    for number in numbers:
        backward(params, number, ranks)
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.grad = None  # torch's keeps those of parameters that are in no group


def take(optimizer, group, place):
    return optimizer.param_groups[group]["params"].pop(place)


def move(optimizer):
    optimizer.param_groups[0]["params"].append(take(optimizer, 1, 0))


def insert(optimizer):
    param = take(optimizer, 0, 1)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.param_groups.insert(0, {**options, "params": [param], "lr": 0.02})


def forget_moments(optimizer):
    for param in optimizer.param_groups[1]["params"]:
        for name in ("exp_avg", "exp_avg_sq"):
            if param in optimizer.state:  # this rank has a piece of it
                optimizer.state[param][name] = torch.zeros_like(optimizer.state[param][name])


def reset_states(optimizer):
    for param in optimizer.param_groups[2]["params"]:
        optimizer.state[param] = {}


def swap(optimizer):
    first, second = optimizer.param_groups[:2]
    first["params"], second["params"] = second["params"], first["params"]


EDITS = {
    "a parameter taken out": lambda o: take(o, 0, 0),
    "a parameter moved": move,
    "a group emptied": lambda o: o.param_groups[0].update(params=[]),
    "a group emptied in place": lambda o: o.param_groups[1]["params"].clear(),
    "the first group deleted": lambda o: o.param_groups.__delitem__(0),
    "a middle group deleted": lambda o: o.param_groups.__delitem__(1),
    "all groups deleted": lambda o: o.param_groups.clear(),
    "a group inserted by hand": insert,
    "groups in another order": lambda o: o.param_groups.reverse(),
    "parameters in another order": lambda o: o.param_groups[0]["params"].reverse(),
    "two groups that swap their parameters": swap,
    "param_groups replaced by copies": lambda o: setattr(o, "param_groups", [dict(group) for group in o.param_groups]),
    "state replaced": lambda o: setattr(o, "state", defaultdict(dict)),
    "state replaced by a dict": lambda o: setattr(o, "state", dict(o.state)),
    "state cleared": lambda o: o.state.clear(),
    "a state popped": lambda o: o.state.pop(o.param_groups[1]["params"][1], None),
    "states replaced by {}": reset_states,
    "moments replaced": forget_moments,
    "an option changed": lambda o: o.param_groups[1].update(betas=(0.5, 0.6), weight_decay=0.3),
    "an option of the loop's own": lambda o: o.param_groups[1].update(note="mine"),
}


def assert_near(params, expected, name):
    torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def after_edit(ranks, sharded, edit, **options):
    params = fresh()
    optimizer = make(params, sharded, **options)
    steps(params, optimizer, range(3), ranks)
    edit(optimizer)
    steps(params, optimizer, range(3, 6), ranks)
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_edits_between_steps_end_where_torch_s_optimizer_ends(world):
    def check(rank):
        return {name: after_edit([rank], True, edit, fused=world < 3) for name, edit in EDITS.items()}

    expected = {name: after_edit(range(world), False, edit) for name, edit in EDITS.items()}
    for of_rank in on_ranks(world, check):
        for name, params in of_rank.items():
            assert_near(params, expected[name], name)
