"""What checkpoints refuse, and how they are at the edges: before a first step, in mid-accumulation, of others."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small import load, make, params_of, step
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from stepstack_sharded_states import ShardedLoadPlanner, ShardedOptimizer
from stepstack_testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def states_of(optimizer):
    return copy.deepcopy(optimizer.local_state_dict()["state"])


def refusal(function, *arguments):
    """What DCP says on this rank: the words of all ranks that failed."""
    with pytest.raises(CheckpointException) as error:
        function(*arguments)
    return str(error.value)


def equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


def test_names_are_those_inside_of_wrappers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = make(dict(model.named_parameters())).sharded_state_dict()
    model[0] = torch.compile(model[0], backend="eager")
    compiled = torch.compile(model, backend="eager")
    params = dict(compiled.named_parameters())
    assert "_orig_mod.0._orig_mod.weight" in params
    optimizer = make(params)
    assert optimizer.sharded_state_dict().keys() == plain.keys()
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in plain_names(model)]


def plain_names(model):
    return [(name.replace("_orig_mod.", ""), param) for name, param in model.named_parameters()]


def test_a_checkpoint_that_does_not_fit_changes_nothing_on_any_rank(tmp_path):
    others = {
        "another": ({"w": (9, 20), "b": (20,), "more": (3,)}, torch.optim.AdamW, {}),
        "one less": ({"w": (9, 20)}, torch.optim.AdamW, {}),
        "wide": ({"w": (9, 30), "b": (20,)}, torch.optim.AdamW, {}),
        "sgd": ({"w": (9, 20), "b": (20,)}, torch.optim.SGD, {"momentum": 0.9}),
        "amsgrad": ({"w": (9, 20), "b": (20,)}, torch.optim.AdamW, {"amsgrad": True}),
    }
    words = {
        "another": "its parameter 'more' is not in this optimizer",
        "one less": "it has no parameter 'b'",
        "wide": r"its exp_avg of 'w' has shape \(9, 30\), the parameter \(9, 20\)",
        "sgd": "it has no exp_avg of 'w'",
        "amsgrad": "it has max_exp_avg_sq of 'w', which this optimizer has not",
        "whole numbers": "its exp_avg of 'b' is torch.int64, here torch.float32",
    }

    def check(rank):
        for name, (shapes, optimizer_class, options) in others.items():
            params = params_of(**shapes)
            other = make(params, optimizer_class, **options)
            step(params, other)
            dcp.save(other.sharded_state_dict(), checkpoint_id=tmp_path / name)
        params = params_of(w=(9, 20), b=(20,))
        optimizer = make(params)
        step(params, optimizer)
        dcp.save(
            optimizer.sharded_state_dict() | {"state.b.exp_avg": torch.zeros(20, dtype=torch.int64)},
            checkpoint_id=tmp_path / "whole numbers",
        )
        before, weights = states_of(optimizer), [p.detach().clone() for p in params.values()]
        said = {name: refusal(load, optimizer, tmp_path / name) for name in words}
        assert equal(states_of(optimizer), before)
        assert equal([p.detach() for p in params.values()], weights)
        return said

    for said in on_ranks(2, check):
        for name, expected in words.items():
            assert re.search(f"rank 0: the checkpoint doesn't fit, nothing has been loaded: {expected}", said[name])


def test_a_state_dict_that_nobody_has_filled_is_refused_on_all_ranks(tmp_path):
    def check(rank):
        params = params_of(w=(9, 20), b=(20,))
        optimizer = make(params)
        step(params, optimizer)
        before, refusals = states_of(optimizer), []
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
        filled = optimizer.sharded_state_dict()
        dcp.load(filled, checkpoint_id=tmp_path)
        for given in (optimizer.sharded_state_dict(), {"optimizer": filled} if rank else filled):
            with pytest.raises(ValueError, match="rank") as error:
                optimizer.load_sharded_state_dict(given)
            refusals.append(str(error.value))
        assert equal(states_of(optimizer), before)
        return refusals

    for unfilled, wrapped in on_ranks(2, check):
        assert re.search(r"rank 0: \d states have not been loaded, exp_avg of 'w' for one", unfilled)
        assert "rank 1: this is no sharded_state_dict()" in wrapped


def test_before_a_first_step_there_is_nothing_and_it_stays_so(tmp_path):
    def check(rank):
        params = params_of(w=(9, 20), b=(20,))
        fresh = make(params)
        before = [p.detach().clone() for p in params.values()]
        dcp.save(fresh.sharded_state_dict(), checkpoint_id=tmp_path)
        assert fresh.local_state_dict()["state"] == {}
        assert equal([p.detach() for p in params.values()], before)
        saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
        assert not [key for key in saved if key.startswith("state.")]
        step(params, fresh, 2)
        load(fresh, tmp_path)
        assert fresh.local_state_dict()["state"] == {}
        assert not fresh.state
        with torch.no_grad():
            for p, value in zip(params.values(), before, strict=True):
                p.copy_(value)
        step(params, fresh)  # as a first step is
        return [p.detach().clone() for p in params.values()]

    def alone():
        params = params_of(w=(9, 20), b=(20,))
        optimizer = torch.optim.AdamW(params.values(), lr=0.1, fused=True)
        step(params, optimizer)
        return [p.detach() for p in params.values()]

    for result in on_ranks(2, check):
        torch.testing.assert_close(result, alone(), rtol=0, atol=1e-6)


def test_a_skipped_first_step_and_a_parameter_never_used_are_what_they_are(tmp_path):
    def check(rank, folder):
        params = params_of(w=(9, 20), b=(20,), unused=(70,))
        optimizer = make(params)
        params["w"].sum().backward()
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.zero_grad()
        (params["w"] * 2).sum().backward()
        optimizer.step()
        params["b"].sum().backward()
        optimizer.step()
        (params["b"] * 3).sum().backward()
        optimizer.step()
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
        optimizer = make(params)
        load(optimizer, folder)
        return {i: float(state["step"]) for i, state in optimizer.local_state_dict()["state"].items()}

    steps = {}
    for of_rank in on_ranks(3, check, tmp_path):
        steps |= of_rank
    assert steps == {0: 1.0, 1: 2.0}


def test_gradients_that_wait_for_a_step_are_not_lost_in_silence(tmp_path):
    def check(rank):
        params = params_of(w=(9, 20), b=(20,))
        optimizer = make(params)
        step(params, optimizer)
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "0")
        with optimizer.no_sync():
            params["w"].sum().backward()
        said = refusal(lambda: dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "1"))
        load(optimizer, tmp_path / "0")  # reading is another thing
        optimizer.step()
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "2")
        for set_to_none in (True, False):
            params["b"].sum().backward()
            optimizer.zero_grad(set_to_none)
            dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / f"3{set_to_none}")
        return said

    for said in on_ranks(2, check):
        assert re.search("rank 0: parameter 'w' has a gradient that no step has used", said)


def test_saving_in_the_background_takes_a_picture(tmp_path):
    def check(rank):
        params = params_of(w=(9, 20), b=(20,))
        optimizer = make(params)
        step(params, optimizer)
        before = states_of(optimizer)
        group = dist.new_group()  # what the other thread says must not come between what this one says
        future = dcp.async_save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "one", process_group=group)
        step(params, optimizer, 3)
        params["w"].sum().backward()  # the picture has been taken: this is no concern of its
        future.result()
        optimizer.step()
        load(optimizer, tmp_path / "one")
        assert equal(states_of(optimizer), before)
        with pytest.raises(TypeError, match=r"async_stager=DefaultStager\(StagingOptions"):
            dcp.async_save(optimizer.sharded_state_dict(), storage_writer=FileSystemWriter(tmp_path / "two"))

    on_ranks(2, check)


def test_torchs_own_planner_wants_every_key_and_knows_a_fresh_optimizers_states(tmp_path):
    def check(rank):
        params = params_of(w=(9, 20), b=(20,))
        fresh = make(params)
        dcp.save(fresh.sharded_state_dict(), checkpoint_id=tmp_path / "fresh")
        trained = make(params)
        step(params, trained)
        dcp.save(trained.sharded_state_dict(), checkpoint_id=tmp_path / "trained")
        before = states_of(trained)
        state_dict = make(params).sharded_state_dict()
        said = refusal(lambda: dcp.load(state_dict, checkpoint_id=tmp_path / "fresh"))
        assert "Missing key in checkpoint state_dict: state.b.exp_avg" in said
        dcp.load(state_dict, checkpoint_id=tmp_path / "trained")
        resumed = make(params)
        with pytest.raises(ValueError, match="have not been loaded"):  # it is the other one's
            resumed.load_sharded_state_dict(state_dict)
        state_dict = resumed.sharded_state_dict()
        assert not resumed._inner.state
        dcp.load(state_dict, checkpoint_id=tmp_path / "trained")
        resumed.load_sharded_state_dict(state_dict)
        assert equal(states_of(resumed), before)

    on_ranks(2, check)


def test_states_are_read_into_their_place_and_shown(tmp_path):
    def check(rank):
        params = params_of(w=(9, 20), b=(20,))
        optimizer = make(params)
        step(params, optimizer)
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
        addresses = {name: value.data_ptr() for state in optimizer.state.values() for name, value in state.items()}
        before = states_of(optimizer)
        step(params, optimizer, 3)
        load(optimizer, tmp_path)
        assert equal(states_of(optimizer), before)
        shown = list(optimizer.state.values())
        assert {name: value.data_ptr() for state in shown for name, value in state.items()} == addresses

    on_ranks(2, check)


def test_names_are_needed_and_each_is_one_parameters():
    unnamed = ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD)
    twice = ShardedOptimizer([("w", nn.Parameter(torch.ones(3))), ("w", nn.Parameter(torch.ones(4)))], torch.optim.SGD)
    with pytest.raises(ValueError, match=r"make the optimizer with ShardedOptimizer\(model.named_parameters\(\), …\)"):
        unnamed.sharded_state_dict()
    with pytest.raises(ValueError, match="two parameters are named 'w'"):
        twice.sharded_state_dict()


def test_a_parameter_without_elements_has_the_states_that_torchs_has(tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, param in params_of(w=(9, 20), empty=(0, 4), b=(20,)).items():
                setattr(self, name, param)

    def plain():
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(dict(model.named_parameters()), optimizer)
        return model, optimizer

    def check(rank):
        model = Model()
        params = dict(model.named_parameters())
        optimizer = make(params)
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "fresh")
        step(params, optimizer, 2)
        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=tmp_path / "stepped")
        before = states_of(optimizer)
        state_dict = {"optimizer": optimizer.sharded_state_dict()}
        dcp.load(state_dict, checkpoint_id=tmp_path / "stepped", planner=ShardedLoadPlanner())
        optimizer.load_sharded_state_dict(state_dict["optimizer"])
        optimizer.load_full_state_dict(optimizer.full_state_dict())
        assert equal(states_of(optimizer), before)
        optimizer.load_full_state_dict(plain()[1].state_dict())
        load(optimizer, tmp_path / "fresh")
        assert optimizer.local_state_dict()["state"] == {}

    on_ranks(2, check)
    saved = FileSystemReader(tmp_path / "fresh").read_metadata().state_dict_metadata
    assert not [key for key in saved if key.startswith("state.")]
    model, optimizer = plain()
    state_dict = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state_dict, checkpoint_id=tmp_path / "stepped")
    set_optimizer_state_dict(model, optimizer, state_dict["optimizer"], options=options)
    assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [2, 2, 2]
