"""What user code does to states and groups between steps has the effect that it has on torch.optim.AdamW."""

import copy
import random

import pytest
import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_testing import HostSyncs, Operations

SHAPES = [(6, 3), (6,), (6, 2), (), (3, 0), (64,)]


class Side:
    """Parameters with an optimizer, to be edited beside another; in one buffer, as pieces, or each on its own."""

    def __init__(self, cls, in_one_buffer=False, shapes=SHAPES):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        if in_one_buffer:
            buffer = torch.cat([value.flatten() for value in values])
            parts = buffer.split([value.numel() for value in values])
            values = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.params = [torch.nn.Parameter(value) for value in values]
        self.cls = cls
        self.optimizer = self.new([{"params": list(self.params)}])
        self.saved = []

    def new(self, groups):
        return self.cls(groups, lr=0.1)

    def step(self, seed, without=()):
        generator = torch.Generator().manual_seed(seed)
        grads = torch.randn(sum(param.numel() for param in self.params), generator=generator)
        parts = grads.split([param.numel() for param in self.params])
        for place, (param, part) in enumerate(zip(self.params, parts, strict=True)):
            param.grad = None if place in without else part.view(param.shape)
        self.optimizer.step()

    def state(self, place):
        return self.optimizer.state[self.params[place]]

    def counts(self):
        return [float(self.optimizer.state.get(param, {}).get("step", -1)) for param in self.params]


def zero_in_place(side, place):
    for value in side.state(place).values():
        value.zero_()


def move_to_a_new_group(side, place):
    param = side.params[place]
    for group in side.optimizer.param_groups:
        group["params"] = [other for other in group["params"] if other is not param]
    side.optimizer.add_param_group({"params": [param], "lr": 0.05})


def leave_for_three_steps(side, place):
    (group,) = side.optimizer.param_groups
    everything = group["params"]
    group["params"] = [param for param in everything if param is not side.params[place]]
    for seed in (21, 22, 23):
        side.step(seed)
    group["params"] = everything


def restore_after_two_steps(side, place):
    saved = copy.deepcopy(side.state(place))
    side.step(31)
    side.step(32)
    side.optimizer.state[side.params[place]] = saved


def restore_in_place(side, place):
    saved = copy.deepcopy(side.state(place))
    side.step(31)
    for key, value in saved.items():
        side.state(place)[key].copy_(value)


def a_new_optimizer_takes_the_states(side, place):
    old = side.optimizer
    others = [param for param in side.params if param is not side.params[place]]
    side.optimizer = side.new([{"params": others}, {"params": [side.params[place]], "lr": 0.05}])
    for param in side.params:
        side.optimizer.state[param] = old.state[param]


def load_one_state(side, place):
    saved = copy.deepcopy(side.optimizer.state_dict())
    side.step(31)
    number = side.optimizer.state_dict()["param_groups"][0]["params"][place]
    later = side.optimizer.state_dict()
    later["state"][number] = saved["state"][number]
    side.optimizer.load_state_dict(later)


EDITS = {
    "its count is filled": lambda side, place: side.state(place)["step"].fill_(7),
    "its count is added to": lambda side, place: side.state(place)["step"].add_(2),
    "its count is added to by name": lambda side, place: side.state(place).__setitem__(
        "step", side.state(place)["step"].__iadd__(3)
    ),
    "its count is another tensor": lambda side, place: side.state(place).__setitem__("step", torch.tensor(4.0)),
    "all of its state is zeroed": zero_in_place,
    "its state is cleared": lambda side, place: side.state(place).clear(),
    "its state is deleted": lambda side, place: side.optimizer.state.pop(side.params[place]),
    "all states are cleared": lambda side, place: side.optimizer.state.clear(),
    "it moves to a new group": move_to_a_new_group,
    "it is left out for three steps": leave_for_three_steps,
    "its state is replaced by an older one": restore_after_two_steps,
    "an older state is copied into its own": restore_in_place,
    "a new optimizer takes the states": a_new_optimizer_takes_the_states,
    "an older state of it alone is loaded": load_one_state,
    "the optimizer is copied": lambda side, place: setattr(side, "params", copied(side)),
}


def copied(side):
    side.optimizer, params = copy.deepcopy((side.optimizer, side.params))
    return params


@pytest.mark.parametrize("in_one_buffer", [False, True], ids=["tensors", "pieces"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_one_parameters_state_is_an_edit_of_no_other(edit, in_one_buffer):
    ours, theirs = Side(FusedAdamW, in_one_buffer), Side(torch.optim.AdamW)
    for side in (ours, theirs):
        for seed in range(3):
            side.step(seed)
        EDITS[edit](side, 1)
        for seed in range(3, 6):
            side.step(seed)
    assert ours.counts() == theirs.counts()
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("script", range(24))
def test_edits_at_random_end_where_torchs_adamw_ends(script):
    ours, theirs = Side(FusedAdamW, in_one_buffer=bool(script % 2)), Side(torch.optim.AdamW)
    of_one_group = ("it is left out for three steps", "an older state of it alone is loaded")
    names = [name for name in EDITS if name not in of_one_group]
    choose = random.Random(script)
    for turn in range(8):
        without = {place for place in range(len(SHAPES)) if choose.random() < 0.15}
        edit, place = choose.choice(names), choose.randrange(len(SHAPES))
        for side in (ours, theirs):
            side.step(turn, without)
            if side.optimizer.state.get(side.params[place]):
                EDITS[edit](side, place)
        assert ours.counts() == theirs.counts(), (turn, edit, place)
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-4, atol=1e-5)


def test_pieces_whose_counts_are_equal_again_are_one_run_again():
    side = Side(FusedAdamW, in_one_buffer=True, shapes=[(64,)] * 20)
    side.step(0)
    side.step(1)
    with Operations() as alike:
        side.step(2)
    side.state(3)["step"].zero_()
    side.step(3)
    side.state(3)["step"].fill_(4)
    side.step(4)
    with Operations() as joined, HostSyncs() as syncs:
        side.step(5)
    assert dict(joined) == dict(alike)
    assert syncs == []


@pytest.mark.parametrize("count", [3, torch.tensor([3]), torch.tensor(3.0, dtype=torch.float64), torch.tensor([3.0])])
def test_a_count_may_be_given_as_any_number(count):
    side, twin = Side(FusedAdamW), Side(FusedAdamW)
    for each in (side, twin):
        each.step(0)
    side.state(1)["step"] = count
    twin.state(1)["step"].fill_(3)
    for each in (side, twin):
        each.step(1)
    assert side.counts() == twin.counts() == [2, 4, 2, 2, 2, 2]
    torch.testing.assert_close(side.params, twin.params, rtol=0, atol=0)


def test_a_parameter_that_a_group_names_twice_makes_two_steps():
    ours, theirs = Side(FusedAdamW), Side(torch.optim.AdamW)
    for side in (ours, theirs):
        first, second = side.params[:2]
        with pytest.warns(UserWarning, match="duplicate"):
            side.optimizer = side.new([{"params": [first, second, first]}])
        for seed in range(3):
            side.step(seed)
    assert ours.counts() == theirs.counts() == [6, 3, -1, -1, -1, -1]
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-6, atol=1e-6)


def test_amsgrad_that_is_turned_off_is_off_and_on_asks_for_its_state():
    ours, theirs = Side(FusedAdamW), Side(torch.optim.AdamW)
    for side in (ours, theirs):
        side.optimizer = side.cls(side.params, lr=0.1, amsgrad=True)
        for seed in range(2):
            side.step(seed)
        side.optimizer.param_groups[0]["amsgrad"] = False
        for seed in range(2, 5):
            side.step(seed)
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-6, atol=1e-6)
    side = Side(FusedAdamW)
    side.step(0)
    side.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="the state of parameter 0 of group 0 has no max_exp_avg_sq"):
        side.step(1)


def test_a_state_without_a_part_is_refused_by_name():
    side = Side(FusedAdamW)
    side.step(0)
    del side.state(2)["step"]
    with pytest.raises(ValueError, match="the state of parameter 2 of group 0 has no step, only"):
        side.step(1)


def test_counts_that_part_while_amsgrad_is_on_stay_apart_when_it_is_off_again():
    ours, theirs = Side(FusedAdamW, in_one_buffer=True), Side(torch.optim.AdamW)
    for side in (ours, theirs):
        side.optimizer = side.cls(side.params, lr=0.1, amsgrad=True)
        side.step(0)
        for amsgrad, without in ((False, ()), (True, (1, 2)), (False, ()), (False, ())):
            side.optimizer.param_groups[0]["amsgrad"] = amsgrad
            side.step(1, without)
    assert ours.counts() == theirs.counts()
    torch.testing.assert_close(ours.params, theirs.params, rtol=1e-6, atol=1e-6)
