"""Checkpoints: Apex's format 2, whole and the same on every rank, from any number of ranks into any other."""

import copy

import pytest
import torch
from torch import nn

from stepstack_nemo import DistributedFusedAdam
from stepstack_testing import on_ranks

SHAPES = ((9, 7), (130,), (4, 3, 3, 3), ())


class Model(nn.Module):
    """Parameters of several shapes; the third is a convolution's."""

    def __init__(self, dtype=torch.float32, memory_format=torch.contiguous_format):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)
        self.to(memory_format=memory_format)

    def backward(self, step, rank, but=()):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = sum(
            (weight.float() * torch.randn(weight.shape, generator=generator)).sum()
            for number, weight in enumerate(self.weights)
            if number not in but
        )
        loss.backward()


def groups(model, **first):
    return [{"params": list(model.weights[:2]), **first}, {"params": list(model.weights[2:]), "lr": 0.02}]


def train(rank, model, optimizer, steps, but=()):
    for step in steps:
        model.backward(step, 0, but)  # the same on every rank, so that it is the same on any number of them
        optimizer.step()
        optimizer.zero_grad()


def saved(rank, dtype, arguments):
    model = Model(dtype)
    optimizer = DistributedFusedAdam(groups(model), lr=0.1, bucket_cap_mb=1e-3, **arguments)
    train(rank, model, optimizer, range(3))
    state_dict = optimizer.state_dict()
    weights = copy.deepcopy([w.detach() for w in model.weights])
    train(rank, model, optimizer, range(3, 5))
    return state_dict, weights, [w.detach() for w in model.weights]


def resumed(rank, dtype, arguments, state_dict, weights, memory_format=torch.contiguous_format):
    model = Model(dtype, memory_format)
    optimizer = DistributedFusedAdam(groups(model), lr=7.0, bucket_cap_mb=1.0, **arguments)
    with torch.no_grad():
        for weight, value in zip(model.weights, weights, strict=True):
            weight.copy_(value)
    before = copy.deepcopy(state_dict)
    optimizer.load_state_dict(state_dict)
    assert same(before, state_dict)  # the caller's is left alone
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert same(optimizer.state_dict()["state"], state_dict["state"])
    train(rank, model, optimizer, range(3, 5))
    return [w.detach() for w in model.weights]


def test_after_consolidation_one_rank_alone_may_ask_for_the_state_dict():
    def check(rank):
        model = Model()
        optimizer = DistributedFusedAdam(groups(model), lr=0.1, bucket_cap_mb=1e-3)
        train(rank, model, optimizer, range(2))
        expected = optimizer.state_dict()
        optimizer.consolidate_state_dict()  # as Lightning does for any optimizer that has it
        if rank == 0:
            assert same(optimizer.state_dict(), expected)
        train(rank, model, optimizer, range(2, 3))
        assert optimizer.state_dict()["state"]["step"] == expected["state"]["step"] + 1

    on_ranks(2, check)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


WAYS = {
    "fp32": (torch.float32, {}, {}),
    "bf16, masters": (torch.bfloat16, {}, {}),
    "bf16, remainders": (torch.bfloat16, {"store_param_remainders": True}, {"store_param_remainders": True}),
    "bf16, from masters to remainders": (torch.bfloat16, {}, {"store_param_remainders": True}),
    "bf16, from remainders to masters, for capture": (
        torch.bfloat16,
        {"store_param_remainders": True},
        {"capturable": True},
    ),
    "bf16 moments": (torch.bfloat16, {"dtype": "bf16"}, {"dtype": "bf16"}),
}


@pytest.mark.parametrize(
    ("way", "before", "after"),
    [("fp32", 1, 2), ("fp32", 4, 2), *((way, 2, after) for way in WAYS for after in (1, 4))],
)
def test_training_goes_on_the_same_on_another_number_of_ranks(saved_once, way, before, after):
    dtype, arguments, other_arguments = WAYS[way]
    state_dict, weights, uninterrupted = saved_once(before, dtype, arguments)[0]
    for values in on_ranks(after, resumed, dtype, other_arguments, state_dict, weights):
        for ours, theirs in zip(values, uninterrupted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def saved_once():
    """What `saved` gives on some ranks, run once for all tests."""
    known = {}

    def on(ranks, dtype, arguments):
        key = (ranks, dtype, str(arguments))
        if key not in known:
            known[key] = on_ranks(ranks, saved, dtype, arguments)
        return known[key]

    return on


def test_the_dict_is_whole_and_the_same_on_every_rank(saved_once):
    (first, weights, _), (second, *_) = saved_once(2, torch.float32, {})
    assert same(first, second)
    assert set(first) == {"state", "param_groups", "format"}
    assert first["format"] == 2
    assert first["state"]["step"] == 3
    assert [group["params"] for group in first["param_groups"]] == [[0, 1], [2, 3]]
    for number, shape in enumerate(SHAPES):
        entry = first["state"][number]
        assert {name: tuple(entry[name].shape) for name in ("param", "exp_avg", "exp_avg_sq")} == {
            "param": shape,
            "exp_avg": shape,
            "exp_avg_sq": shape,
        }
        assert entry["exp_avg"].is_contiguous()
        assert torch.equal(entry["param"], weights[number])


def test_it_has_what_torch_has():
    model, other = Model(), Model()
    ours = DistributedFusedAdam(groups(model), lr=0.1)
    theirs = torch.optim.AdamW(groups(other), lr=0.1, weight_decay=0.0)
    train(0, model, ours, range(3))
    train(0, other, theirs, range(3))
    found, wanted = ours.state_dict(), theirs.state_dict()
    for number in range(len(SHAPES)):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found["state"][number][name], wanted["state"][number][name])
        assert found["state"][number]["step"] == wanted["state"][number]["step"] == 3


def test_torch_adamws_state_dict_is_taken():
    model, other = Model(), Model()
    theirs = torch.optim.AdamW(groups(other), lr=0.1, weight_decay=0.0)
    train(0, other, theirs, range(3))
    model.load_state_dict(other.state_dict())
    ours = DistributedFusedAdam(groups(model))
    ours.load_state_dict(theirs.state_dict())
    train(0, model, ours, range(3, 6))
    train(0, other, theirs, range(3, 6))
    for one, its in zip(model.weights, other.weights, strict=True):
        torch.testing.assert_close(one, its)


def test_what_apex_saves_is_taken_with_one_step_for_all():
    model, other = Model(), Model()
    theirs = torch.optim.AdamW(groups(other), lr=0.1, weight_decay=0.0)
    train(0, other, theirs, range(3))
    told = theirs.state_dict()
    state = {
        number: {"param": other.weights[number].detach().clone(), **{n: v for n, v in entry.items() if n != "step"}}
        for number, entry in told["state"].items()
    }
    ours = DistributedFusedAdam(groups(model))
    ours.load_state_dict({"state": {"step": 3, **state}, "param_groups": told["param_groups"]})
    train(0, model, ours, range(3, 6))
    train(0, other, theirs, range(3, 6))
    for one, its in zip(model.weights, other.weights, strict=True):
        torch.testing.assert_close(one, its)


def test_each_parameter_keeps_a_count_of_its_own():
    model = Model()
    optimizer = DistributedFusedAdam(groups(model))
    train(0, model, optimizer, range(2), but=(1, 3))
    train(0, model, optimizer, range(2, 3), but=(3,))
    state_dict = optimizer.state_dict()
    assert [state_dict["state"][number]["step"] for number in range(4)] == [3, 1, 3, 0]
    assert torch.equal(state_dict["state"][3]["exp_avg"], torch.zeros(()))
    again = DistributedFusedAdam(groups(Model()))
    again.load_state_dict(state_dict)
    assert same(again.state_dict()["state"], state_dict["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sd: sd.update(format=1), "format 2"),
        (lambda sd: sd["state"].update(buckets=[]), "format 2"),
        (lambda sd: sd.pop("state"), "format 2"),
        (lambda sd: sd["param_groups"].pop(), r"\[2, 2\] parameters, those of the state dict have \[2\]"),
        (lambda sd: sd["state"][1].pop("exp_avg"), "parameter 1 of group 0 has no exp_avg"),
        (lambda sd: sd["state"][1].update(exp_avg=None), "parameter 1 of group 0 has no exp_avg"),
        (lambda sd: sd["state"][1].update(step=float("nan")), "parameter 1 of group 0 has step nan"),
        (lambda sd: (sd["state"].pop("step"), sd["state"][1].pop("step")), "parameter 1 of group 0 has step None"),
        (lambda sd: sd["state"][2].update(param=torch.zeros(2)), "param of parameter 0 of group 1 has shape"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changed(change, message):
    model = Model()
    optimizer = DistributedFusedAdam(groups(model))
    train(0, model, optimizer, range(2))
    state_dict = optimizer.state_dict()
    changed = copy.deepcopy(state_dict)
    for entry in changed["state"].values():
        if isinstance(entry, dict):
            entry["param"] += 1
    change(changed)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(changed)
    assert same(optimizer.state_dict(), state_dict)


def test_format_1_is_not_written():
    with pytest.raises(ValueError, match="only 2 is written"):
        DistributedFusedAdam(groups(Model())).state_dict(state_dict_format=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_channels_last_model_is_resumed_by_an_unconverted_one_and_the_other_way(dtype):
    arguments = {"store_param_remainders": True}

    def there(rank, memory_format):
        model = Model(dtype, memory_format)
        optimizer = DistributedFusedAdam(groups(model), lr=0.1, **arguments)
        train(rank, model, optimizer, range(3))
        state_dict, weights = optimizer.state_dict(), copy.deepcopy([w.detach() for w in model.weights])
        train(rank, model, optimizer, range(3, 5))
        return state_dict, weights, [w.detach() for w in model.weights]

    formats = (torch.channels_last, torch.contiguous_format)
    for before, after in (formats, formats[::-1]):
        state_dict, weights, uninterrupted = on_ranks(2, there, before)[0]
        for values in on_ranks(2, resumed, dtype, arguments, state_dict, weights, after):
            for ours, theirs in zip(values, uninterrupted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
