"""Whole states that are malformed, or of an optimizer with other options: all ranks say so, or all take them."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from small import make, params_of, step
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

SHAPES = {"w": (9, 7), "b": (5,), "s": ()}


class Subclass(torch.Tensor):
    pass


def malformed():
    """How to spoil a good state dict, and what is said of it."""
    nan = torch.tensor(float("nan"))
    return {
        "'state' must be a dict, and it has none": lambda w: w.pop("state"),
        "this is no whole state dict: it has 'state', but neither": lambda w: w.pop("param_groups"),
        "the states of 'w' must be a dict, got None": lambda w: w["state"].update({0: None}),
        "it has no step of 'w'": lambda w: w["state"][0].update(step=None),
        "its step of 'w' must be a tensor or a number, got str": lambda w: w["state"][0].update(step="3"),
        "its step of 'w' has shape (2,), and is one number": lambda w: w["state"][0].update(step=torch.ones(2)),
        "it has x of 'w', which this optimizer has not": lambda w: w["state"][0].update(x=nan),
        "the state dict has states of 7, which none": lambda w: w["state"].update({7: {}}),
        "has 'a.b', where the name of a state": lambda w: w["state"][0].update({"a.b": 1}),
        "its exp_avg of 'w' is of layout torch.sparse_coo": lambda w: w["state"][0].update(
            exp_avg=torch.ones(9, 7).to_sparse()
        ),
        "its exp_avg of 'b' is on the meta device": lambda w: w["state"][1].update(exp_avg=nan.to("meta")),
        "Subclass: it must be a plain tensor": lambda w: w["state"][1].update(
            exp_avg=torch.ones(5).as_subclass(Subclass)
        ),
        "its exp_avg of 'b' is torch.complex64": lambda w: w["state"][1].update(exp_avg=torch.ones(5) * 1j),
        "its exp_avg of 'b' is torch.int64, here torch.float32": lambda w: w["state"][1].update(
            exp_avg=torch.ones(5, dtype=torch.int64)
        ),
        "(torch.from_numpy makes one), got ndarray": lambda w: w["state"][1].update(exp_avg=torch.ones(5).numpy()),
        "its lr of 'w' is None, here it is 0.1": lambda w: w["param_groups"][0].update(lr=None),
        "its betas of 'w' is (0.9,), here it is": lambda w: w["param_groups"][0].update(betas=(0.9,)),
        "its x of 'w' can't be sent to other ranks": lambda w: w["param_groups"][0].update(x=lambda: 1),
        "must be a list of dicts": lambda w: w.update(param_groups=[None]),
        "must have a list of numbers or names in 'params', and": lambda w: w["param_groups"][0].pop("params"),
        "has 3 params, and must have as many names": lambda w: w["param_groups"][0].update(param_names=["w"]),
        "lists 0 for a second time": lambda w: w["param_groups"][0].update(params=[0, 0, 2]),
        "this is one rank's share": lambda w: w.update(cut=[]),
    }


def everything(params, optimizer):
    whole = optimizer.full_state_dict(rank0_only=False)
    return copy.deepcopy((whole["state"], [param.detach() for param in params.values()])), repr(whole["param_groups"])


def test_a_malformed_state_dict_on_one_rank_is_refused_on_all_and_changes_nothing():
    def check(rank):
        params = params_of(**SHAPES)
        optimizer = make(params)
        step(params, optimizer)
        good = optimizer.full_state_dict()
        before, said = everything(params, optimizer), []
        for spoil in malformed().values():
            given = copy.deepcopy(good)
            if rank == 0:
                spoil(given)
            with pytest.raises(ValueError, match="rank 0: ") as error:
                optimizer.load_full_state_dict(given or None)
            said.append(str(error.value))
        for given in ([1], 3.0, "text", torch.ones(2)):
            with pytest.raises(TypeError, match="rank 0: a whole state dict must be a dict, or None; got"):
                optimizer.load_full_state_dict(given if rank == 0 else None)
        (numbers, options), (numbers_before, options_before) = everything(params, optimizer), before
        torch.testing.assert_close(numbers, numbers_before, rtol=0, atol=0)
        assert options == options_before
        return said

    for said in on_ranks(2, check):
        for expected, words in zip(malformed(), said, strict=True):
            assert expected in words


class Interrupted(dict):
    """What is read of it is a Ctrl-C."""

    def __getitem__(self, key):
        raise KeyboardInterrupt


def test_an_interrupt_stays_one_on_its_rank_and_the_others_hear_of_it():
    def check(rank):
        optimizer = make(params_of(**SHAPES))
        whole = optimizer.full_state_dict(rank0_only=False)
        with pytest.raises(KeyboardInterrupt if rank == 1 else ValueError) as error:
            optimizer.load_full_state_dict(Interrupted(whole) if rank == 1 else whole)
        return str(error.value)

    assert on_ranks(2, check) == ["rank 1: KeyboardInterrupt: ", ""]


def mutated(whole, generator):
    """A state dict with one part of it gone, replaced, renamed, or of another dtype or shape."""
    values = [None, -1.5, float("nan"), "text", [], {}, (1, 2), torch.ones(2), nan_of(9, 7).to_sparse(), object, 1j]
    *path, key = generator.choice(list(paths(whole)))
    part = whole
    for step_down in path:
        part = part[step_down]
    value, how = part[key], generator.choice(["gone", "replaced", "renamed", "dtype", "shape"])
    if how == "gone" or (how == "renamed" and isinstance(part, dict)):
        part.pop(key)
    if how == "renamed" and isinstance(part, dict):
        part[generator.choice(["x", 1, "exp_avg"])] = value
    elif how == "replaced":
        part[key] = generator.choice(values)
    elif how == "dtype" and isinstance(value, torch.Tensor):
        part[key] = value.to(generator.choice([torch.float64, torch.int32, torch.float8_e5m2, torch.complex64]))
    elif how == "shape" and isinstance(value, torch.Tensor):
        part[key] = generator.choice(
            [value.reshape(-1), value[None], value.T.contiguous().T if value.ndim > 1 else value]
        )
    return whole


def nan_of(*shape):
    return torch.full(shape, float("nan"))


def paths(part, above=()):
    for key in part if isinstance(part, dict) else range(len(part)):
        yield (*above, key)
        if isinstance(part[key], dict | list):
            yield from paths(part[key], (*above, key))


def test_random_state_dicts_are_taken_by_all_ranks_or_refused_by_all():
    def check(rank):
        params = params_of(**SHAPES)
        optimizer = make(params)
        step(params, optimizer)
        good = optimizer.full_state_dict(rank0_only=False)
        generator, taken = random.Random(0), 0
        for _ in range(60):
            given = mutated(copy.deepcopy(good), generator)
            try:
                optimizer.load_full_state_dict(given if rank == 0 else None)
                outcome = "taken"
            except (TypeError, ValueError) as error:
                outcome = str(error)
            outcomes = [None] * 2
            dist.all_gather_object(outcomes, outcome)
            assert outcomes[0] == outcomes[1]
            if outcome == "taken":
                taken += 1
                optimizer.load_full_state_dict(copy.deepcopy(good))
            now = optimizer.full_state_dict(rank0_only=False)
            torch.testing.assert_close(now["state"], good["state"], rtol=0, atol=0)
        return taken

    assert 0 < on_ranks(2, check)[0] < 60


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_options_that_bring_states_come_from_the_checkpoint_as_in_torch(optimizer_class):
    having, lacking = {
        torch.optim.AdamW: ({"amsgrad": True}, {}),
        torch.optim.SGD: ({"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.5}),
        torch.optim.RMSprop: ({"centered": True, "momentum": 0.9}, {}),
    }[optimizer_class]

    def plain(options, times):
        params = params_of(**SHAPES)
        optimizer = optimizer_class(params.items(), lr=0.1, **options)
        step(params, optimizer, times)
        return params, optimizer

    def check(rank, saved_with, made_with, whole):
        params, reference = plain(made_with, 3)
        reference.load_state_dict(copy.deepcopy(whole))
        step(params, reference, 2)
        ours, _ = plain(made_with, 0)
        optimizer = ShardedOptimizer(ours.items(), optimizer_class, lr=0.1, bucket_cap_mb=0.001, **made_with)
        step(ours, optimizer, 3)
        optimizer.load_full_state_dict(copy.deepcopy(whole) if rank == 0 else None)
        assert optimizer.full_state_dict(rank0_only=False)["state"][0].keys() == whole["state"][0].keys()
        step(ours, optimizer, 2)
        torch.testing.assert_close([*ours.values()], [*params.values()], rtol=1e-6, atol=1e-6)

    def both_ways(rank):
        for saved_with, made_with in ((having, lacking), (lacking, having)):
            check(rank, saved_with, made_with, plain(saved_with, 2)[1].state_dict())

    on_ranks(2, both_ways)


class Odd(torch.optim.SGD):
    """Keeps what a checkpoint can't hold, of one parameter."""

    odd = staticmethod(lambda param: torch.zeros_like(param).as_subclass(Subclass))

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() == 64:
                    self.state[param]["odd"] = self.odd(param)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (Odd.odd, "Subclass"),
        (lambda param: torch.zeros(3), "a tensor of shape (3,)"),
        (lambda param: {"a": 1}, "a dict"),
        (lambda param: torch.zeros_like(param).to_sparse(), "of layout torch.sparse_coo"),
    ],
    ids=["subclass", "shape", "dict", "sparse"],
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_by_name_on_all_ranks(monkeypatch, odd, words):
    monkeypatch.setattr(Odd, "odd", staticmethod(odd))

    def check(rank):
        params = params_of(w=(50, 7), b=(5,))
        optimizer = make(params, Odd, momentum=0.9)
        step(params, optimizer)
        with pytest.raises(TypeError, match="rank 1: odd of 'b' is ") as error:
            optimizer.full_state_dict()
        again = make(params_of(w=(50, 7), b=(5,)), Odd, momentum=0.9)
        again.load_state_dict(optimizer.local_state_dict())  # on the same ranks anything goes
        return str(error.value)

    for said in on_ranks(2, check):
        assert words in said


def test_parameters_without_names_go_by_their_places():
    def check(rank):
        params = params_of(**SHAPES)
        optimizer = ShardedOptimizer(params.values(), torch.optim.AdamW, lr=0.1)
        step(params, optimizer)
        whole = optimizer.full_state_dict(rank0_only=False)
        assert "param_names" not in whole["param_groups"][0]
        plain = torch.optim.AdamW(nn.ParameterList(params_of(**SHAPES).values()).parameters())
        plain.load_state_dict(whole)
        again = ShardedOptimizer(params_of(**SHAPES).values(), torch.optim.AdamW)
        again.load_full_state_dict(plain.state_dict() if rank == 0 else None)
        loaded = again.full_state_dict(rank0_only=False)
        torch.testing.assert_close(loaded["state"], whole["state"], rtol=0, atol=0)

    on_ranks(2, check)
