"""A trainer's wrapper around an optimizer is stepped as the optimizer inside it is."""

import math

import pytest
import torch

from stepstack_grad_scaler import GradScaler
from stepstack_testing import HostSyncs


class Forwarding(torch.optim.Optimizer):
    """Asks the optimizer inside for everything."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)


def resembling(optimizer):
    """Is of the optimizer's class, with copies of its attributes."""
    wrapper = object.__new__(
        type("Resembling", (type(optimizer),), {"step": lambda self, closure=None: self.inside.step(closure)})
    )
    vars(wrapper).update(vars(optimizer))
    wrapper.inside = optimizer
    return wrapper


def resembling_before_a_load(optimizer):
    wrapper = resembling(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # which gives it other groups
    return wrapper


WRAPPERS = [Forwarding, resembling, resembling_before_a_load, lambda optimizer: Forwarding(resembling(optimizer))]
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=["forwarding", "resembling", "old groups", "two"])
each_optimizer = pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=["fused", "plain"])


def made(options):
    param = torch.nn.Parameter(torch.arange(1.0, 6.0))
    return param, torch.optim.AdamW([param], lr=0.1, **options)


def backward(scaler, param, number, bad=False):
    grad = torch.arange(5.0) + number
    scaler.scale((param * (grad if not bad else grad * math.inf)).sum()).backward()


@each_optimizer
@each_wrapper
@pytest.mark.parametrize("unscale", ["", "wrapper", "inside"])
def test_a_wrapped_optimizer_gets_unscaled_gradients_and_skips(wrap, options, unscale):
    (param, optimizer), (reference, bare) = made(options), made(options)
    wrapper, scalers = wrap(optimizer), [GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for number, bad in enumerate((False, True, False)):
        backward(scalers[0], param, number, bad)
        backward(scalers[1], reference, number, bad)
        if unscale:
            scalers[0].unscale_(wrapper if unscale == "wrapper" else optimizer)
            scalers[1].unscale_(bare)
            assert torch.equal(param.grad.nan_to_num(), reference.grad.nan_to_num())
        scalers[0].step(wrapper)
        scalers[1].step(bare)
        for scaler in scalers:
            scaler.update()
        assert torch.equal(param, reference)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        param.grad = reference.grad = None
    assert not {"grad_scale", "found_inf"} & (vars(wrapper).keys() | vars(optimizer).keys())


@each_wrapper
@pytest.mark.parametrize("place", ["wrapper", "inside"])
def test_deferred_clipping_may_be_said_to_either(wrap, place):
    (param, optimizer), (reference, bare) = made({"fused": True}), made({"fused": True})
    wrapper, scaler = wrap(optimizer), GradScaler("cpu", init_scale=8.0)
    backward(scaler, param, 1)
    backward(scaler, reference, 1)
    (wrapper if place == "wrapper" else optimizer).grad_scale = bare.grad_scale = torch.tensor(3.0)
    for one in (wrapper, bare):
        scaler.step(one)
    assert torch.equal(param, reference)


def test_two_scales_for_one_step_are_refused():
    param, optimizer = made({"fused": True})
    wrapper, scaler = resembling(optimizer), GradScaler("cpu", init_scale=8.0)
    backward(scaler, param, 1)
    wrapper.grad_scale, optimizer.grad_scale = torch.tensor(3.0), torch.tensor(2.0)
    with pytest.raises(ValueError, match="grad_scale is set on a Resembling and, to something else, on the optimizer"):
        scaler.step(wrapper)
    assert param.tolist() == [1, 2, 3, 4, 5]


def test_a_fused_optimizer_in_a_wrapper_is_not_waited_for():
    param, optimizer = made({"fused": True})
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, param, 1)
    wrapper = Forwarding(optimizer)
    with HostSyncs() as syncs:
        scaler.step(wrapper)
    assert syncs == []


@each_optimizer
def test_a_wrapper_that_asks_the_scaler_itself_is_refused_and_divides_nothing_twice(options):
    param, optimizer = made(options)
    scaler = GradScaler("cpu", init_scale=8.0)

    class Asking(Forwarding):
        def step(self, closure=None):
            return scaler.step(self.optimizer)

    backward(scaler, param, 1)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(Asking(optimizer))
    assert param.tolist() == [1, 2, 3, 4, 5]


def test_a_step_that_failed_may_be_tried_again():
    param, optimizer = made({"fused": True})
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, param, 1)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    scaler.step(optimizer)
    assert param.tolist() != [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


@each_optimizer
def test_a_gradient_that_torchs_optimizers_do_not_read_is_refused(options):
    param, optimizer = made(options)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, param, 1)
    param.decoupled_grad, param.grad = param.grad, None
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ValueError, match="has its gradient in `decoupled_grad`, and AdamW reads `grad` alone"):
            call(optimizer)
