"""How the scale follows overflows: right values, models of each engine's rule, and torch itself."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepstack_grad_scaler import GradScaler

OVERFLOWS = [1, 0, 1, 1, 0, 0, 0, 1, 1]
SMALL = {"init_scale": 1024.0, "growth_interval": 3, "hysteresis": 2}
FLOOR = 2.0**-126


class Torch:
    """Backs off at each overflow, grows after `interval` clean steps in a row, unless that is infinite."""

    def __init__(self, interval, hysteresis):
        self.scale, self.interval, self.full = 1024.0, interval, hysteresis
        self.growth, self.left = 0, hysteresis

    def update(self, overflow):
        if overflow:
            self.scale, self.growth = max(self.scale / 2, FLOOR), 0
        elif (growth := self.growth + 1) == self.interval:
            self.scale, self.growth = self.scale * 2 if self.scale < 2.0**127 else self.scale, 0
        else:
            self.growth = growth


class Megatron(Torch):
    """Overflows use hysteresis up, growth alone brings it back."""

    def update(self, overflow):
        if overflow:
            self.growth = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, 1.0)
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.left, self.scale = 0, self.full, self.scale * 2


class Apex(Torch):
    """Overflows use hysteresis up, any clean step brings it back."""

    def update(self, overflow):
        if overflow:
            self.left -= 1
            self.growth = 0
            if self.left <= 0:
                self.scale = max(self.scale / 2, FLOOR)
            return
        self.growth += 1
        if self.growth == self.interval:
            self.scale, self.growth = self.scale * 2, 0
        self.left = self.full


class DeepSpeed(Torch):
    """Counts steps from the last overflow on, so that the step after it is number 0."""

    consecutive_hysteresis = False
    step, last_overflow = 0, -1

    def update(self, overflow):
        if overflow:
            if self.full == 1 or self.left == 1:
                self.scale = max(self.scale / 2, 1.0)
            else:
                self.left -= 1
            self.last_overflow = self.step
        else:
            if self.consecutive_hysteresis:
                self.left = self.full
            stable = self.step - self.last_overflow - 1
            if stable > 0 and stable % self.interval == 0:
                if not self.consecutive_hysteresis:
                    self.left = self.full
                self.scale *= 2
        self.step += 1


class DeepSpeedConsecutive(DeepSpeed):
    consecutive_hysteresis = True


MODELS = {
    "torch": (Torch, {"preset": "torch"}),
    "megatron": (Megatron, {"preset": "megatron"}),
    "apex": (Apex, {"preset": "apex"}),
    "deepspeed": (DeepSpeed, {"preset": "deepspeed"}),
    "deepspeed, consecutive": (DeepSpeedConsecutive, {"preset": "deepspeed", "refill_hysteresis": "on_clean_step"}),
}


def scales_after(scaler, overflows):
    scales = []
    for overflow in overflows:
        scaler.update(found_inf=torch.tensor(float(overflow)))
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    ("chosen", "scales"),
    [
        ({"refill_hysteresis": "on_growth"}, [1024, 1024, 512, 256, 256, 256, 512, 512, 256]),
        ({"refill_hysteresis": "on_clean_step"}, [1024, 1024, 1024, 512, 512, 512, 1024, 1024, 512]),
        ({"preset": "megatron"}, [1024, 1024, 512, 256, 256, 256, 512, 512, 256]),
        ({"preset": "apex"}, [1024, 1024, 1024, 512, 512, 512, 1024, 1024, 512]),
        ({"preset": "deepspeed"}, [1024, 1024, 512, 256, 256, 256, 256, 128, 64]),
        (
            {"preset": "deepspeed", "refill_hysteresis": "on_clean_step"},
            [1024, 1024, 1024, 512, 512, 512, 512, 512, 256],
        ),
    ],
    ids=str,
)
def test_the_scales_of_a_known_sequence_are_right(chosen, scales):
    assert scales_after(GradScaler("cpu", **SMALL, **chosen), OVERFLOWS) == scales


@pytest.mark.parametrize("name", MODELS)
@given(overflows=st.lists(st.booleans(), max_size=40), interval=st.integers(1, 5), hysteresis=st.integers(1, 4))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_each_preset_follows_its_engine(name, overflows, interval, hysteresis):
    make, chosen = MODELS[name]
    if name == "torch":
        hysteresis = 1  # torch has none
    model = make(interval, hysteresis)
    expected = [(model.update(overflow), model.scale)[1] for overflow in overflows]
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=interval, hysteresis=hysteresis, **chosen)
    assert scales_after(scaler, overflows) == expected


@pytest.mark.parametrize(
    ("preset", "init_scale", "interval", "hysteresis", "min_scale"),
    [
        ("torch", 2.0**16, 2000, 1, FLOOR),
        ("megatron", 2.0**32, 1000, 2, 1.0),
        ("apex", 2.0**16, 2000, 2, FLOOR),
        ("deepspeed", 2.0**16, 1000, 2, 1.0),
    ],
)
def test_a_preset_has_its_engines_numbers(preset, init_scale, interval, hysteresis, min_scale):
    scaler = GradScaler("cpu", preset=preset)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (init_scale, interval)
    assert (scaler.hysteresis, scaler.min_scale) == (hysteresis, min_scale)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)


def gradients(steps, probability):
    """One gradient for each of the steps: finite, infinite or NaN."""
    chance = random.Random(0)
    return [chance.choice([float("inf"), float("nan")]) if chance.random() < probability else 1.0 for _ in range(steps)]


class Trained:
    """A scaler with an optimizer of its own, stepped with given gradients."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, fused=True)
        scaler.scale(torch.ones(()))

    def step(self, gradient):
        self.weight.grad = torch.full((1,), gradient)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.6)], ids=str)
@pytest.mark.parametrize(("probability", "interval"), [(0.3, 2), (0.5, 1), (0.35, 1)])  # the last meets the ceiling
def test_a_thousand_scales_equal_torchs(factors, probability, interval):
    settings = {"growth_factor": factors[0], "backoff_factor": factors[1], "growth_interval": interval}
    ours, torchs = Trained(GradScaler("cpu", **settings)), Trained(torch.amp.GradScaler("cpu", **settings))
    for gradient in gradients(1000, probability):
        scale = torchs.step(gradient)
        assert scale > FLOOR
        assert ours.step(gradient) == scale
    assert torch.equal(ours.weight, torchs.weight)


def test_torchs_scale_is_followed_down_to_the_floor_and_held_there():
    ours, torchs = Trained(GradScaler("cpu")), Trained(torch.amp.GradScaler("cpu"))
    for gradient in gradients(1000, 0.9):
        scale = torchs.step(gradient)
        assert ours.step(gradient) == max(scale, FLOOR)
    assert scale == 0


def test_state_dicts_go_both_ways_in_the_middle_of_a_thousand_steps():
    settings = {"growth_interval": 3}
    ours, torchs = Trained(GradScaler("cpu", **settings)), Trained(torch.amp.GradScaler("cpu", **settings))
    for step, gradient in enumerate(gradients(1000, 0.3)):
        if step % 100 == 50:  # each goes on from where the other was
            states = ours.scaler.state_dict(), torchs.scaler.state_dict()
            ours, torchs = Trained(GradScaler("cpu")), Trained(torch.amp.GradScaler("cpu"))
            ours.scaler.load_state_dict(states[1])
            torchs.scaler.load_state_dict(states[0])
        assert ours.step(gradient) == torchs.step(gradient)


def test_two_hundred_overflows_stop_at_the_floor():
    scaler = GradScaler("cpu")
    scales = scales_after(scaler, [1] * 200)
    assert scales[-1] == FLOOR
    assert min(scales) > 0
    assert scales_after(GradScaler("cpu", init_scale=8.0, min_scale=3.0), [1] * 3) == [4, 3, 3]


def test_the_scale_stops_at_the_ceiling():
    assert scales_after(GradScaler("cpu", init_scale=8.0, max_scale=20.0, growth_interval=1), [0] * 3) == [16, 20, 20]
    assert scales_after(GradScaler("cpu", init_scale=2.0**126, growth_interval=1), [0] * 3) == [2.0**127] * 3


def test_at_the_floor_it_raises_if_asked_to():
    scaler = GradScaler("cpu", init_scale=4.0, min_scale=2.0, hysteresis=2, at_min_scale="raise")
    assert scales_after(scaler, [1, 1]) == [4, 2]
    with pytest.raises(OverflowError, match=r"min_scale, 2\.0: the step was skipped"):
        scaler.update(found_inf=torch.tensor(1.0))
    scaler.update(found_inf=torch.tensor(0.0))
    assert scaler.skipped_steps == 3
    assert scales_after(GradScaler("cpu", init_scale=4.0, min_scale=2.0), [1, 1, 1]) == [2, 2, 2]


def test_hysteresis_at_the_floor_is_used_up_before_it_raises():
    scaler = GradScaler("cpu", init_scale=1.0, min_scale=1.0, hysteresis=2, at_min_scale="raise")
    assert scales_after(scaler, [1, 0]) == [1, 1]
    with pytest.raises(OverflowError):
        scaler.update(found_inf=torch.tensor(1.0))


def test_an_interval_made_shorter_ends_with_the_next_clean_step():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scales_after(scaler, [0] * 10)
    scaler.set_growth_interval(5)
    assert scales_after(scaler, [0]) == [16]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"preset": "nobody"}, "preset is 'nobody'; it must be one of torch, megatron, apex, deepspeed"),
        ({"hysteresis": 0}, "hysteresis is 0; it must be at least 1"),
        ({"hysteresis": 1.5}, "hysteresis is 1.5; it must be a whole number"),
        ({"growth_factor": float("inf")}, "growth_factor is inf; it must be at least 1, and finite"),
        ({"growth_factor": "2"}, "growth_factor is '2'; it must be a number"),
        ({"init_scale": float("nan")}, "init_scale is nan; it must be in"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be at least 1"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0; it must be above 0"),
        ({"refill_hysteresis": "never"}, "refill_hysteresis is 'never'; it must be on_growth or on_clean_step"),
        ({"min_scale": 0.0}, "min_scale is 0.0; it must be at least 2"),
        ({"max_scale": float("inf")}, "max_scale is inf; it must be at least min_scale, and finite"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "max_scale is 2.0; it must be at least min_scale"),
        ({"min_scale": 4.0, "init_scale": 2.0}, r"init_scale is 2.0; it must be in \[min_scale, max_scale\] = \[4.0"),
        ({"at_min_scale": "stop"}, "at_min_scale is 'stop'; it must be hold or raise"),
    ],
    ids=str,
)
def test_a_bad_number_is_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        GradScaler("cpu", **bad)


def test_what_torch_refuses_is_refused_as_torch_does():
    with pytest.raises(AssertionError, match="growth factor must be > 1"):
        GradScaler("cpu", growth_factor=1.0)
