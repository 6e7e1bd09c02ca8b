import math

import pytest
import torch

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_gradnorm import grads_of
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import HostSyncs

SCALERS = {
    "no scaler": lambda: None,
    "torch's scaler": lambda: torch.amp.GradScaler("cpu", init_scale=4.0),
    "our scaler": lambda: GradScaler("cpu", init_scale=4.0),
}
FUSED = {
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "FusedAdamW": lambda params: FusedAdamW(params, lr=0.1),
}
OPTIMIZERS = {
    **FUSED,
    "an optimizer without the flag": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
}
each_scaler = pytest.mark.parametrize("make_scaler", SCALERS.values(), ids=SCALERS)
each_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (7,), ())]


def backward(params, scaler, number, bad=False):
    """A gradient of norm about 5, another one for each number."""
    generator = torch.Generator().manual_seed(number)
    loss = sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params)
    if bad:
        loss = loss + params[1][2] * math.inf
    (loss if scaler is None else scaler.scale(loss)).backward()


def snapshot(params, optimizer):
    """Values that a step may change, by name."""
    states = {(i, key): value for i, p in enumerate(params) for key, value in optimizer.state[p].items()}
    return {name: value.clone() for name, value in {**dict(enumerate(params)), **states}.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@each_scaler
@each_optimizer
def test_a_step_is_the_loop_that_unscales_and_clips(make_optimizer, make_scaler):
    params, reference = parameters(), parameters()
    optimizer, torch_optimizer = make_optimizer(params), torch.optim.AdamW(reference, lr=0.1)
    scaler, torch_scaler = make_scaler(), torch.amp.GradScaler("cpu", init_scale=4.0)
    step = OptimizerStep(optimizer, max_norm=1.0, scaler=scaler)
    for number in range(5):
        backward(params, scaler, number)
        result = step()

        backward(reference, torch_scaler, number)
        torch_scaler.unscale_(torch_optimizer)
        norm = torch.nn.utils.clip_grad_norm_(reference, 1.0)
        torch_scaler.step(torch_optimizer)
        torch_scaler.update()
        torch_optimizer.zero_grad()

        torch.testing.assert_close(result.grad_norm, norm)
        torch.testing.assert_close(result.clip_coefficient, 1 / norm)
        torch.testing.assert_close(params, reference, rtol=1e-5, atol=1e-6)
    assert all(param.grad is None for param in params)
    assert step.applied_steps == 5


@pytest.mark.parametrize("make_optimizer", FUSED.values(), ids=FUSED)
def test_the_step_composed_by_hand_is_the_same_bit_for_bit(make_optimizer, step_by_hand):
    params, by_hand = parameters(), parameters()
    composed, optimizer = make_optimizer(params), make_optimizer(by_hand)
    composed_scaler, scaler = GradScaler("cpu", init_scale=4.0), GradScaler("cpu", init_scale=4.0)
    step = OptimizerStep(composed, max_norm=1.0, scaler=composed_scaler)
    for number in range(6):
        backward(params, composed_scaler, number, bad=number == 3)
        result = step()

        backward(by_hand, scaler, number, bad=number == 3)
        norm, found_inf = step_by_hand(optimizer, scaler, grads_of(by_hand))

        assert torch.equal(result.grad_norm, norm) or number == 3
        assert torch.equal(result.skipped, found_inf)
        assert torch.equal(composed_scaler.scale_tensor, scaler.scale_tensor)
        assert same(snapshot(params, composed), snapshot(by_hand, optimizer))


@each_scaler
@each_optimizer
def test_a_skipped_step_changes_nothing_but_the_scale(make_optimizer, make_scaler):
    params, scaler = parameters(), make_scaler()
    optimizer = make_optimizer(params)
    step = OptimizerStep(optimizer, max_norm=1.0, scaler=scaler)
    backward(params, scaler, 0)
    assert step().skipped == 0
    before = snapshot(params, optimizer)

    backward(params, scaler, 1, bad=True)
    result = step()
    assert result.skipped == 1
    assert not result.grad_norm.isfinite()
    assert result.clip_coefficient == 1
    assert same(snapshot(params, optimizer), before)
    assert step.applied_steps == 1
    assert all(param.grad is None for param in params)
    assert scaler is None or scaler.get_scale() == 2.0

    backward(params, scaler, 2)
    assert step().skipped == 0
    assert not same(snapshot(params, optimizer), before)


@each_scaler
def test_a_norm_beyond_fp32_skips_too(make_scaler):
    param, scaler = torch.nn.Parameter(torch.zeros(2)), make_scaler()
    step = OptimizerStep(FusedAdamW([param]), max_norm=1.0, scaler=scaler)
    if scaler is not None:
        scaler.scale(param.sum().detach())
    param.grad = torch.full((2,), 3e38)
    assert step().skipped == 1
    assert param.count_nonzero() == 0
    assert scaler is None or scaler.get_scale() == 2.0


@each_scaler
@each_optimizer
def test_fp64_gradients_keep_range_and_digits(make_optimizer, make_scaler):
    params, reference = ([torch.nn.Parameter(torch.tensor([1.0, 2.0]).double())] for _ in range(2))
    scaler = make_scaler()
    step = OptimizerStep(make_optimizer(params), max_norm=0.3, scaler=scaler)
    expected = torch.optim.AdamW(reference, lr=0.1, foreach=False)
    for size in (1.0, 2e200, math.nan, 1.0):
        if scaler is not None:
            scaler.scale(torch.ones(()))
        scale = 1.0 if scaler is None else scaler.get_scale()
        reference[0].grad = torch.tensor([3.0, -4.0]).double() * size
        params[0].grad = reference[0].grad * scale
        result = step()
        assert result.skipped == math.isnan(size)
        if not math.isnan(size):
            assert result.grad_norm.item() == pytest.approx(5 * size, rel=1e-14)
            reference[0].grad *= 0.3 / (5 * size + 1e-6)
            expected.step()
        torch.testing.assert_close(params, reference, rtol=1e-14, atol=0)


@each_scaler
def test_the_norm_is_measured_without_a_max_norm(make_scaler):
    params, scaler = parameters(), make_scaler()
    step = OptimizerStep(FusedAdamW(params), scaler=scaler)
    backward(params, scaler, 0)
    scale = 1.0 if scaler is None else scaler.get_scale()
    expected = torch.cat([param.grad.flatten().double() for param in params]).norm() / scale
    result = step()
    torch.testing.assert_close(result.grad_norm.double(), expected)
    assert result.clip_coefficient == 1


@each_scaler
@pytest.mark.parametrize("make_optimizer", FUSED.values(), ids=FUSED)
def test_nothing_waits_for_the_device(make_optimizer, make_scaler):
    params, scaler = parameters(), make_scaler()
    step = OptimizerStep(make_optimizer(params), max_norm=1.0, scaler=scaler)
    for number in range(2):
        backward(params, scaler, number)
        with HostSyncs() as syncs:
            step()
        assert syncs == []


def test_an_optimizer_without_the_flag_is_waited_for_once():
    params = parameters()
    step = OptimizerStep(torch.optim.SGD(params, lr=0.1, foreach=False), max_norm=1.0)
    backward(params, None, 0)
    with HostSyncs() as syncs:
        step()
    assert syncs == ["aten._local_scalar_dense"]


class Forwarding(torch.optim.Optimizer):
    """A trainer's wrapper that asks the optimizer inside for everything."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def resembling(optimizer):
    """A trainer's wrapper that is of the optimizer's class, with copies of its attributes."""
    wrapper = object.__new__(
        type("Resembling", (type(optimizer),), {"step": lambda self, closure=None: self.inside.step(closure)})
    )
    vars(wrapper).update(vars(optimizer))
    wrapper.inside = optimizer
    return wrapper


@pytest.mark.parametrize("wrap", [Forwarding, resembling, lambda optimizer: Forwarding(resembling(optimizer))])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@each_optimizer
def test_a_wrapped_optimizer_is_clipped_and_skipped(make_optimizer, sharded, wrap):
    params, reference = parameters(), parameters()
    optimizers = [
        ShardedOptimizer(several, FusedAdamW, lr=0.1) if sharded else make_optimizer(several)
        for several in (params, reference)
    ]
    wrapped, bare = OptimizerStep(wrap(optimizers[0]), max_norm=1.0), OptimizerStep(optimizers[1], max_norm=1.0)
    for number, bad in enumerate((False, True, False)):
        backward(params, None, number, bad)
        backward(reference, None, number, bad)
        assert wrapped().skipped == bare().skipped == bad
        assert all(map(torch.equal, params, reference))
    assert not {"grad_scale", "found_inf"} & (vars(wrapped.optimizer).keys() | vars(optimizers[0]).keys())


@pytest.mark.parametrize("wrap", [Forwarding, resembling])
def test_a_wrapper_made_before_a_load_is_still_one(wrap):
    params, reference = parameters(), parameters()
    optimizers = [torch.optim.AdamW(several, lr=0.1, fused=True) for several in (params, reference)]
    wrapper = wrap(optimizers[0])
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # which gives it other groups
    wrapped, bare = OptimizerStep(wrapper, max_norm=1.0), OptimizerStep(optimizers[1], max_norm=1.0)
    backward(params, None, 0)
    backward(reference, None, 0)
    wrapped()
    bare()
    assert all(map(torch.equal, params, reference))


def test_a_schedule_reaches_the_optimizer_that_steps_though_its_wrapper_has_old_groups():
    optimizer = torch.optim.AdamW(parameters(), lr=0.1, fused=True)
    wrapper = resembling(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    OptimizerStep(wrapper, lr_scheduler=lambda steps: steps * 0 + 0.5)()
    assert optimizer.param_groups[0]["lr"] == 0.05
    schedule = torch.optim.lr_scheduler.StepLR(wrapper, 1)
    with pytest.raises(ValueError, match="make the scheduler for the one inside"):
        OptimizerStep(wrapper, lr_scheduler=schedule)


def test_a_closure_is_refused_and_changes_nothing():
    params = parameters()
    step = OptimizerStep(torch.optim.SGD(params, lr=0.1))
    backward(params, None, 0)
    with pytest.raises(TypeError, match="this process: OptimizerStep takes no closure"):
        step(lambda: None)
    assert all(map(torch.equal, params, parameters()))
    assert all(param.grad is not None for param in params)


def test_an_optimizer_that_can_not_step_without_a_closure_is_refused():
    with pytest.raises(TypeError, match=r"LBFGS.step needs closure"):
        OptimizerStep(torch.optim.LBFGS(parameters()))


@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["torch's AdamW"], lambda params: torch.optim.SGD(params)])
@pytest.mark.parametrize("place", ["decoupled_grad", "grad_shard"])
def test_a_gradient_that_torchs_optimizers_do_not_read_is_refused(make_optimizer, place):
    params = parameters()
    step = OptimizerStep(make_optimizer(params))
    backward(params, None, 0)
    setattr(params[1], place, params[1].grad)
    params[1].grad = None
    with pytest.raises(ValueError, match=rf"parameter 1 of the optimizer, of shape \(7,\), has its.*`{place}`"):
        step()
    assert all(map(torch.equal, params, parameters()))


def test_grad_goes_before_decoupled_grad_with_torchs_optimizers_too():
    params, reference = parameters(), parameters()
    steps = [OptimizerStep(torch.optim.AdamW(several), max_norm=1.0) for several in (params, reference)]
    for several in (params, reference):
        backward(several, None, 0)
    params[1].decoupled_grad = torch.full((7,), torch.inf)
    norm, expected = (step().grad_norm for step in steps)
    assert torch.equal(norm, expected)
    assert all(map(torch.equal, params, reference))


def test_an_optimizer_that_reads_decoupled_grad_itself_is_trusted():
    class Reading(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad, param.decoupled_grad = param.decoupled_grad, None
            super().step()

    params, reference = parameters(), parameters()
    read, bare = OptimizerStep(Reading(params, lr=0.1)), OptimizerStep(torch.optim.SGD(reference, lr=0.1))
    for several in (params, reference):
        backward(several, None, 0)
    for param in params:
        param.decoupled_grad, param.grad = param.grad, None
    assert torch.equal(read().grad_norm, bare().grad_norm)
    assert all(map(torch.equal, params, reference))


def test_a_schedule_may_belong_to_the_optimizer_in_a_wrapper():
    params = parameters()
    optimizer = FusedAdamW(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = OptimizerStep(Forwarding(optimizer), lr_scheduler=schedule)
    for number in range(3):
        backward(params, None, number)
        step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.025


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_what_others_have_set_for_the_step_is_refused_and_not_lost(name):
    params = parameters()
    optimizer = FusedAdamW(params, lr=0.1)
    step = OptimizerStep(optimizer)
    setattr(optimizer, name, torch.ones(()))
    backward(params, None, 0)
    with pytest.raises(ValueError, match=f"this process: {name} is set on the optimizer"):
        step()
    assert all(map(torch.equal, params, parameters()))
    delattr(optimizer, name)
    assert step().skipped == 0


def test_two_optimizers_with_one_scaler_step_and_skip_apart():
    one, other, scaler = parameters(), parameters(), GradScaler("cpu", init_scale=4.0)
    steps = [OptimizerStep(FusedAdamW(params, lr=0.1), scaler=scaler) for params in (one, other)]
    backward(one, scaler, 0)
    assert steps[0]().skipped == 0
    backward(other, scaler, 0, bad=True)
    assert steps[1]().skipped == 1
    assert scaler.get_scale() == 2.0
    assert not any(map(torch.equal, one, parameters()))
    assert all(map(torch.equal, other, parameters()))


def test_a_step_without_a_backward_changes_no_weight():
    params = parameters()
    result = OptimizerStep(FusedAdamW(params, lr=0.1), max_norm=1.0)()
    assert (result.grad_norm, result.clip_coefficient, result.skipped) == (0, 1, 0)
    assert all(map(torch.equal, params, parameters()))


def test_a_disabled_scaler_is_none():
    params, reference = parameters(), parameters()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = OptimizerStep(FusedAdamW(params), max_norm=1.0, scaler=scaler)
    without = OptimizerStep(FusedAdamW(reference), max_norm=1.0)
    for bad in (False, True, False):
        backward(params, scaler, 0, bad)
        backward(reference, None, 0, bad)
        assert step().skipped == without().skipped == bad
    assert all(map(torch.equal, params, reference))


def test_grad_scale_and_found_inf_are_gone_after_a_step_that_fails():
    class Failing(FusedAdamW):
        def step(self, closure=None):
            raise RuntimeError("out of luck")

    optimizer = Failing(parameters())
    with pytest.raises(RuntimeError, match="out of luck"):
        OptimizerStep(optimizer)()
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.nan])
def test_a_max_norm_that_is_none_is_refused(max_norm):
    with pytest.raises(ValueError, match=f"max_norm.*{max_norm}"):
        OptimizerStep(FusedAdamW(parameters()), max_norm=max_norm)


def test_what_is_not_an_optimizer_or_a_scaler_is_refused():
    with pytest.raises(TypeError, match=r"optimizer must be .* got list"):
        OptimizerStep(parameters())
    with pytest.raises(TypeError, match=r"scaler must be .* got float"):
        OptimizerStep(FusedAdamW(parameters()), scaler=4.0)


@pytest.mark.parametrize("master_weights", ["fp32", "remainder"])
def test_weights_loaded_into_a_sharded_model_reach_the_masters_of_the_optimizer_inside(master_weights):
    p = torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = ShardedOptimizer([p], FusedAdamW, lr=1e-3, master_weights=master_weights, backend="torch")
    p.sum().backward()
    optimizer.step()
    with torch.no_grad():
        p.fill_(2.0)
    optimizer.refresh_from_model()
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p, torch.full_like(p, 2.0))
