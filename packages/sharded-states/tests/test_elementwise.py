"""Whether an optimizer may step slices: it is tried, and what ends elsewhere on them is refused."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepstack_sharded_states import ShardedOptimizer


def params():
    return [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(5))]


class Sign(torch.optim.Optimizer):
    """The sign of the gradient; the base of the optimizers below, which say what each adds."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        p.sub_(p.grad.sign(), alpha=group["lr"])


class TrustRatio(Sign):
    def update(self, p, group):
        p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / p.grad.norm()))


class ByOption(Sign):
    def update(self, p, group):
        (TrustRatio if group.get("trust") else Sign).update(self, p, group)


class OneNormOfAll(Sign):
    """Clips by the norm of all of its gradients, where that is large."""

    @torch.no_grad()
    def step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / norm.clamp(min=1), alpha=group["lr"])


class FromStep(TrustRatio):
    def __init__(self, params, lr=0.1, warmup_steps=1000):
        super().__init__(params, lr, warmup_steps=warmup_steps)

    def update(self, p, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        (TrustRatio if state["step"] > group["warmup_steps"] else Sign).update(self, p, group)


class ByShape(Sign):
    def update(self, p, group):
        p.sub_(p.grad - p.grad.mean() if p.ndim > 1 else p.grad, alpha=group["lr"])


class Replacing(Sign):
    def update(self, p, group):
        p.data = p - group["lr"] * p.grad.sign()


class Idle(Sign):
    def update(self, p, group):
        pass


class Regrouping(Sign):
    def __init__(self, params, lr=0.1):
        super().__init__([{"params": [p]} for group in params for p in group["params"]], lr)


class OnlyMatrices(Sign):
    def update(self, p, group):
        if p.ndim != 2:
            raise ValueError("matrices, please")
        super().update(p, group)


class Closed(Sign):
    def step(self, closure):
        closure()


class Prodigy(Sign):
    pass


@pytest.mark.parametrize(
    ("optimizer_class", "options", "message"),
    [
        (TrustRatio, {}, "TrustRatio is not elementwise with these arguments.* of its way apart.*elementwise=True"),
        (TrustRatio, {"lr": 1e-9}, "TrustRatio is not elementwise"),
        (TrustRatio, {"lr": torch.tensor(0.0)}, "TrustRatio is not elementwise"),
        (OneNormOfAll, {}, "OneNormOfAll is not elementwise"),
        (FromStep, {}, "FromStep is not elementwise"),
        (ByShape, {}, "ByShape is not elementwise"),
        (ByOption, {"trust": True}, "ByOption is not elementwise"),
        (Replacing, {}, "Replacing can't step slices.* gives parameters other memory"),
        (Idle, {}, "Idle can't step slices.* it changed no weight in 14 steps"),
        (Regrouping, {}, "Regrouping can't step slices.* makes parameter groups of its own"),
        (OnlyMatrices, {}, r"OnlyMatrices can't step slices.* step 1 .* raised ValueError: matrices, please"),
        (Closed, {}, "Closed can't step slices.* missing 1 required positional argument: 'closure'"),
        (Prodigy, {}, "Prodigy is not elementwise: it estimates one step size from all parameters"),
        (Sign, {"model": nn.Linear(1, 1)}, "Sign is given a Linear"),
        (type("Mine", (torch.optim.Adafactor,), {}), {}, "Mine is not elementwise: it needs whole parameters"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_an_optimizer_that_would_end_elsewhere_is_refused_by_name(optimizer_class, options, message):
    for groups in (params(), [{"params": params()}]):
        with pytest.raises(TypeError, match=message):
            ShardedOptimizer(groups, optimizer_class, **options)


def test_each_group_is_tried_with_its_own_options():
    weight, bias = params()
    ShardedOptimizer([{"params": [weight]}, {"params": [bias], "trust": False}], ByOption)
    with pytest.raises(TypeError, match="ByOption is not elementwise"):
        ShardedOptimizer([{"params": [weight]}, {"params": [bias], "trust": True}], ByOption)


def test_a_group_added_later_is_tried_and_refused_with_nothing_changed():
    weight, bias = params()
    optimizer = ShardedOptimizer([weight], ByOption)
    with pytest.raises(TypeError, match="ByOption is not elementwise"):
        optimizer.add_param_group({"params": [bias], "trust": True})
    optimizer.add_param_group({"params": [bias], "trust": False})
    (weight.sum() + bias.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((5,), 0.9))


def test_who_says_that_it_is_elementwise_is_believed():
    ShardedOptimizer(params(), TrustRatio, elementwise=True)
    ShardedOptimizer(params(), type("Declared", (TrustRatio,), {"elementwise": True}))
    with pytest.raises(TypeError, match="Derived is not elementwise"):
        ShardedOptimizer(params(), type("Derived", (type("Declared", (TrustRatio,), {"elementwise": True}),), {}))


def test_what_the_constructor_raises_is_raised_as_it_is():
    with pytest.raises(TypeError, match="unexpected keyword argument 'lrr'"):
        ShardedOptimizer(params(), FromStep, lrr=0.1)


CALLS = []


class Recorded(Sign):
    def __init__(self, params, lr=0.1, **options):
        CALLS.append(options)
        super().__init__(params, lr, **options)


def test_a_class_is_tried_once_for_the_same_arguments():
    def calls(**options):
        CALLS.clear()
        groups = [{"params": [p], "lr": 0.01 * i} for i, p in enumerate(params())]
        assert [group["lr"] for group in ShardedOptimizer(groups, Recorded, **options).param_groups] == [0.0, 0.01]
        return len(CALLS)

    first = calls(betas=(0.9, 0.99))
    assert first > 1  # trial and optimizer
    assert calls(betas=(0.9, 0.99)) == 1
    assert calls(betas=[0.9, 0.99]) == first
    assert calls(betas=(0.9, 0.999)) == first


def test_torchs_own_elementwise_classes_are_not_tried(monkeypatch):
    monkeypatch.setattr("stepstack_sharded_states._elementwise.difference", lambda candidate: pytest.fail("tried"))
    for optimizer_class in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop):
        ShardedOptimizer(params(), optimizer_class)


class Loud(Sign):
    def __init__(self, params, lr=0.1, table=None):
        print("welcome")
        warnings.warn("experimental", stacklevel=1)
        super().__init__(params, lr, table=table)

    def update(self, p, group):
        noise = torch.rand(()) + random.random()
        group["table"]["scale"].add_(noise)
        type(self).steps = 1
        super().update(p, group)


def test_a_trial_leaves_no_trace(capsys, recwarn):
    warnings.simplefilter("error")
    table = {"scale": torch.zeros(())}
    hooked, random_state, torch_state = [], random.getstate(), torch.get_rng_state()
    handle = register_optimizer_step_pre_hook(lambda *_: hooked.append(1))
    try:
        with pytest.raises(UserWarning, match="experimental"):  # of the optimizer itself, after its trial
            ShardedOptimizer(params(), Loud, table=table)
    finally:
        handle.remove()
    assert capsys.readouterr().out == "welcome\n"
    assert table == {"scale": torch.zeros(())}
    assert hooked == []
    assert not hasattr(Loud, "steps")
    assert random.getstate() == random_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_options_of_a_trial_may_be_of_any_kind():
    for value in ({1: [torch.ones(2)]}, torch.max, {2, 3}, float("nan"), nn.functional.silu):
        ShardedOptimizer(params(), Sign, table=value)
