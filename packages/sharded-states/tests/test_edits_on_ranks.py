"""What callers change in `param_groups` and `state` between steps ends where it ends with torch's optimizer."""

from collections import defaultdict
from random import Random

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


def add_again(optimizer):
    params = [take(optimizer, 0, 0), take(optimizer, 2, 1)]
    optimizer.add_param_group({"params": [("p0", params[0]), ("p5", params[1])], "lr": 0.03, "weight_decay": 0.2})


EDITS = {
    "parameters taken out and added as a group": add_again,
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


def test_the_model_s_parameters_may_stand_for_their_shards():
    params = fresh()
    expected = after_edit([0], False, lambda o: o.param_groups[2].update(params=o.param_groups[2]["params"][:1]))
    optimizer = make(params, True)
    steps(params, optimizer, range(3), [0])
    optimizer.param_groups[2]["params"] = [param for param in params if param.shape == (3,)]
    steps(params, optimizer, range(3, 6), [0])
    assert_near([param.detach() for param in params], expected, "by the model's parameters")


def test_a_parameter_that_is_out_keeps_its_states_and_its_gradients_as_in_torch():
    def train(make):
        params = fresh()
        optimizer = make(params)
        steps(params, optimizer, range(2), [0])
        out = take(optimizer, 0, 0)
        for number in range(2, 5):  # nobody zeroes its gradient
            backward(params, number, [0])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[1]["params"].append(out)
        kept = params[0].grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        steps(params, optimizer, range(5, 7), [0])
        return [kept, *(param.detach() for param in params)]

    expected = train(lambda params: make(params, False))
    for options in ({}, {"shard_gradients": True}, {"fused": True}):
        found = train(lambda params, options=options: make(params, True, **options))
        assert_near(found, expected, str(options))


def test_states_of_a_parameter_that_is_out_are_neither_saved_nor_kept_over_a_load():
    params = fresh()
    optimizer = make(params, True)
    steps(params, optimizer, range(2), [0])
    out = take(optimizer, 0, 0)
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2], [3, 4]]
    assert sorted(saved["state"]) == [0, 1, 2, 3, 4]
    assert out in optimizer.state
    optimizer.load_state_dict(saved)
    assert out not in optimizer.state
    assert set(optimizer.state) == {shard for group in optimizer.param_groups for shard in group["params"]}


def test_whole_state_dicts_have_groups_as_they_were_edited():
    params, plain_params = fresh(), fresh()
    optimizer, plain = make(params, True), make(plain_params, False)
    for each, its_params in ((optimizer, params), (plain, plain_params)):
        move(each)
        take(each, 2, 0)
        each.param_groups.reverse()
        steps(its_params, each, range(2), [0])
    whole = optimizer.full_state_dict()
    names = [group["param_names"] for group in whole["param_groups"]]
    assert names == [["p5"], ["p3"], ["p0", "p1", "p2"]]
    assert [group["params"] for group in whole["param_groups"]] == [[0], [1], [2, 3, 4]]
    plain.load_state_dict(whole)
    steps(params, optimizer, range(2, 4), [0])
    steps(plain_params, plain, range(2, 4), [0])
    assert_near([param.detach() for param in params], [param.detach() for param in plain_params], "after a load")


def test_states_made_like_a_shard_are_taken_for_its_local_part():
    def check(rank):
        p = nn.Parameter(torch.ones(200))
        optimizer = ShardedOptimizer([("p", p)], torch.optim.SGD, lr=0.1, momentum=0.9)
        steps([p], optimizer, range(1), [0])
        shard = optimizer.param_groups[0]["params"][0]
        optimizer.state[shard]["momentum_buffer"] = torch.zeros_like(shard)
        return optimizer.full_state_dict(rank0_only=False)["state"][0]["momentum_buffer"]

    for momentum in on_ranks(2, check):
        assert torch.equal(momentum, torch.zeros(200))


def edit_at_random(optimizer, params, listed_as, random):
    """One edit; `listed_as`: by number, what stands for a parameter in `param_groups`."""
    groups = optimizer.param_groups
    number_of = {id(it): number for number, it in listed_as.items()}
    inside = [number_of[id(it)] for group in groups for it in group["params"]]
    outside = sorted(listed_as.keys() - set(inside))
    edit = random.choice(("take", "put", "delete", "insert", "add", "order", "forget", "copy", "option", "freeze"))
    group = random.choice(groups) if groups else None
    if edit == "take" and group and group["params"]:
        group["params"].pop(random.randrange(len(group["params"])))
    elif edit == "put" and group and outside:
        group["params"].insert(random.randint(0, len(group["params"])), listed_as[random.choice(outside)])
    elif edit == "delete" and len(groups) > 1:
        groups.pop(random.randrange(len(groups)))
    elif edit == "insert" and group and outside:
        groups.insert(
            random.randint(0, len(groups)), {**group, "params": [listed_as[outside[0]]], "lr": random.random()}
        )
    elif edit == "add" and outside:
        number = random.choice(outside)
        optimizer.add_param_group({"params": [(f"p{number}", listed_as[number])], "lr": random.random() / 10})
    elif edit == "order" and group:
        random.shuffle(group["params"])
        groups.reverse()
    elif edit == "forget" and inside:
        chosen = listed_as[random.choice(inside)]
        random.choice((lambda: optimizer.state.pop(chosen, None), optimizer.state.clear))()
    elif edit == "copy":
        optimizer.param_groups = [dict(group) for group in groups]
    elif edit == "option" and group:
        group.update(lr=random.random() / 10, betas=(random.random(), random.random()))
    elif edit == "freeze":
        param = random.choice(params[1:])
        param.requires_grad_(not param.requires_grad)


def after_random_edits(seed, ranks, sharded, **options):
    random, params = Random(seed), fresh()
    optimizer = make(params, sharded, **options)
    listed = [it for group in optimizer.param_groups for it in group["params"]]
    for number in range(12):
        edit_at_random(optimizer, params, dict(enumerate(listed)), random)
        steps(params, optimizer, [number], ranks)
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("world", [1, 2])
def test_edits_at_random_end_where_torch_s_optimizer_ends(world):
    def check(rank):
        return [after_random_edits(seed, [rank], True, shard_gradients=seed % 2 == 1) for seed in range(12)]

    expected = [after_random_edits(seed, range(world), False) for seed in range(12)]
    for of_rank in on_ranks(world, check):
        for seed, params in enumerate(of_rank):
            assert_near(params, expected[seed], f"seed {seed}")


def test_a_parameter_that_comes_back_frozen_is_trained_when_it_is_unfrozen():
    def train(make):
        p, q = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(5))
        optimizer = make([p, q])
        for number in range(4):
            if number == 1:
                optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.2})
            q.requires_grad_(number != 1)
            (p.square().sum() + q.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach(), q.detach()]

    expected = train(lambda params: torch.optim.AdamW(params, lr=0.1))
    assert_near(train(lambda params: ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)), expected, "")


def add_stranger(optimizer):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


REFUSED = {
    "is no parameter of this optimizer.*add_param_group": add_stranger,
    "'p0', is in group 0 too and would be stepped twice": lambda o: o.param_groups.extend(o.param_groups),
    "'p2', is in group 1 too and would be stepped twice": lambda o: o.param_groups[1]["params"].append(
        o.param_groups[1]["params"][0]
    ),
    r"param_groups\[1\] must be a dict with a list in 'params'": lambda o: o.param_groups[1].pop("params"),
    r"param_groups\[0\] must be a dict with a list": lambda o: o.param_groups[0].update(params=torch.ones(3)),
    r"param_groups\[3\] must be a dict with a list": lambda o: o.param_groups.append([]),
}


@pytest.mark.parametrize(("message", "edit"), REFUSED.items(), ids=range(len(REFUSED)))
def test_edits_that_are_not_followed_are_refused_by_name_wherever_they_would_count(message, edit):
    params = fresh()
    optimizer = make(params, True)
    steps(params, optimizer, range(2), [0])
    before = [param.detach().clone() for param in params]
    edit(optimizer)
    backward(params, 2, [0])
    for use in (optimizer.step, optimizer.grad_shards, optimizer.state_dict, optimizer.full_state_dict):
        with pytest.raises((TypeError, ValueError), match=message):
            use()
    assert all(map(torch.equal, params, before))


def test_an_option_that_is_removed_is_gone_for_the_inner_optimizer_too():
    params = fresh()
    optimizer = make(params, True)
    del optimizer.param_groups[1]["weight_decay"]
    backward(params, 0, [0])
    with pytest.raises(KeyError, match="weight_decay"):  # as torch.optim.AdamW says
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*ranks differed")
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("edit", ["a parameter taken out", "a parameter moved", "the first group deleted"])
def test_a_rank_that_edits_alone_trains_nothing_rather_than_its_own_way(edit, find_unused):
    def check(rank):
        params = fresh()
        optimizer = make(params, True, fused=True, find_unused_parameters=find_unused)
        steps(params, optimizer, range(1), [0])
        before = [param.detach().clone() for param in params]
        if rank == 1:
            EDITS[edit](optimizer)
        if find_unused:
            with pytest.raises(RuntimeError, match=f"rank {rank}: .*param_groups"):
                steps(params, optimizer, range(1, 3), [0])
        else:
            steps(params, optimizer, range(1, 3), [0])
        return all(map(torch.equal, params, before))

    assert on_ranks(2, check) == [True, True]
