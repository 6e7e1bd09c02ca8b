"""In whatever order gradients are unscaled, clipped and stepped, the optimizer sees the same ones."""

import pytest
import torch

from stepstack_grad_scaler import GradScaler


class Seen(torch.optim.SGD):
    """Keeps the gradients that it was stepped with; it has no flag."""

    @torch.no_grad()
    def step(self):
        self.seen = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]


class SeenByContract(Seen):
    """Divides by `grad_scale` in fp32, as fused kernels do."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self):
        super().step()
        if self.grad_scale is not None:
            self.seen = [(seen.float() / self.grad_scale).to(seen.dtype) for seen in self.seen]


def coefficient(norm, max_norm):
    return torch.where(norm > max_norm, max_norm / norm, 1.0)


def norm_of(optimizer):
    return torch.stack([p.grad.float().norm() for group in optimizer.param_groups for p in group["params"]]).norm()


def multiply_(optimizer, factor):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.copy_(parameter.grad.float() * factor)


def unscale_clip_step(scaler, optimizer, max_norm):
    scaler.unscale_(optimizer)
    norm = norm_of(optimizer)
    multiply_(optimizer, coefficient(norm, max_norm))
    scaler.step(optimizer)
    return norm


def clip_scaled_step(scaler, optimizer, max_norm):
    norm = norm_of(optimizer) / scaler.scale_tensor
    multiply_(optimizer, coefficient(norm, max_norm))
    scaler.step(optimizer)
    return norm


def deferred_clip_step(scaler, optimizer, max_norm):
    norm = norm_of(optimizer) / scaler.scale_tensor
    optimizer.grad_scale = 1 / coefficient(norm, max_norm)
    scaler.step(optimizer)
    return norm


def unscale_deferred_clip_step(scaler, optimizer, max_norm):
    scaler.unscale_(optimizer)
    norm = norm_of(optimizer)
    optimizer.grad_scale = 1 / coefficient(norm, max_norm)
    scaler.step(optimizer)
    return norm


def by_hand(scaler, optimizer, max_norm):
    norm = norm_of(optimizer) / scaler.scale_tensor
    optimizer.grad_scale = scaler.scale_tensor / coefficient(norm, max_norm)
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    return norm


ORDERS = [unscale_clip_step, clip_scaled_step, deferred_clip_step, unscale_deferred_clip_step, by_hand]
CASES = [(order, kind) for order in ORDERS for kind in (SeenByContract, Seen) if (order, kind) != (by_hand, Seen)]
each_case = pytest.mark.parametrize(("order", "kind"), CASES, ids=lambda case: case.__name__)


def scaled_gradients(scaler, dtype=torch.float32):
    """Parameters with a gradient as a backward leaves it, and that gradient before the scale, in fp64."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((64,), (8, 16), ())]
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape) * scaler.scale_tensor).to(dtype)
    return parameters, [parameter.grad.double() / scaler.get_scale() for parameter in parameters]


def ulps(actual, expected):
    """How many units in the last place of the actual dtype they are apart, at most."""
    unit = torch.finfo(actual.dtype).eps * 2.0 ** expected.abs().log2().floor()
    return ((actual.double() - expected).abs() / unit).max().item()


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_clipping_no_bit_differs(order, kind, dtype):
    scaler = GradScaler("cpu", init_scale=2.0**10)
    parameters, true = scaled_gradients(scaler, dtype)
    optimizer = kind(parameters)
    order(scaler, optimizer, max_norm=100.0)
    assert [seen.tolist() for seen in optimizer.seen] == [gradient.to(dtype).tolist() for gradient in true]


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("init_scale", "max_norm", "bound"),
    [(2.0**10, 1.0, 2), (1000.0, 100.0, 2), (1000.0, 1.0, 4)],  # a scale that is no power of two rounds twice more
)
def test_clipped_they_are_as_near_as_their_roundings(order, kind, dtype, init_scale, max_norm, bound):
    scaler = GradScaler("cpu", init_scale=init_scale)
    parameters, true = scaled_gradients(scaler, dtype)
    optimizer = kind(parameters)
    true_coefficient = coefficient(order(scaler, optimizer, max_norm), max_norm).double()
    for seen, gradient in zip(optimizer.seen, true, strict=True):
        assert ulps(seen, gradient * true_coefficient) <= bound


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_adam_sees_the_clipped_norm_and_the_true_one_is_reported(order, fused):
    if order is by_hand and not fused:
        return  # that one knows no contract
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.AdamW([weight], betas=(0.5, 0.9), fused=fused)
    scaler = GradScaler("cpu", init_scale=65536.0)
    scaler.scale(weight.sum()).backward()
    norm = order(scaler, optimizer, max_norm=1.0)
    assert norm == 10
    seen = optimizer.state[weight]["exp_avg"] / (1 - 0.5)
    assert seen.norm().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_a_step_that_grows_the_scale_divides_by_the_one_it_multiplied_with(order):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = SeenByContract([weight])
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for scale in (4, 8, 16):
        assert scaler.get_scale() == scale
        scaler.scale(weight.sum()).backward()
        order(scaler, optimizer, max_norm=100.0)
        scaler.update(found_inf=torch.tensor(0.0) if order is by_hand else None)
        optimizer.zero_grad()
        assert optimizer.seen[0].tolist() == [1, 1, 1]


def test_what_an_optimizer_divides_by_is_not_the_scale_that_changes_later():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = SeenByContract([weight])
    optimizer.register_step_pre_hook(lambda optimizer, *_: kept.append(optimizer.grad_scale))
    scaler, kept = GradScaler("cpu", init_scale=4.0, growth_interval=1), []
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (kept[0].item(), scaler.get_scale()) == (4, 8)


@pytest.mark.parametrize("kind", [Seen, SeenByContract])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_deferred_clipping_leaves_nothing_on_the_optimizer(kind, enabled):
    scaler = GradScaler("cpu", init_scale=8.0, enabled=enabled)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = kind([weight])
    scaler.scale(weight.sum()).backward()
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(optimizer)
    assert optimizer.seen[0].tolist() == [0.25, 0.25, 0.25]
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("given", [0.0, float("inf"), float("nan")])
def test_a_grad_scale_that_leaves_nothing_of_a_gradient_skips_the_step(fused, unscale, given):
    """As one from a norm that overflows, where every gradient is finite."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(given)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1, 1]
    assert (scaler.get_scale(), scaler.skipped_steps.item()) == (4, 1)


def test_a_scale_that_overflows_with_the_clipping_skips_the_step():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**127)
    optimizer.grad_scale = torch.tensor(2.0)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1, 1]
    assert scaler.get_scale() == 2.0**126


def test_a_step_that_raises_leaves_nothing_on_the_optimizer():
    class Broken(SeenByContract):
        def step(self):
            raise KeyError("broken")

    optimizer = Broken([weight := torch.nn.Parameter(torch.zeros(3))])
    weight.grad = torch.zeros(3)
    with pytest.raises(KeyError, match="broken"):
        GradScaler("cpu").step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@pytest.mark.parametrize("kind", [Seen, SeenByContract])
def test_a_step_that_raised_is_unscaled_once_when_it_is_made_again(kind):
    class BrokenOnce(kind):
        def step(self):
            if not hasattr(self, "broken"):
                self.broken = True
                raise KeyError("broken")
            super().step()

    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer, scaler = BrokenOnce([weight]), GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(KeyError, match="broken"):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert optimizer.seen[0].tolist() == [1, 1, 1]


def test_a_grad_scale_of_fp64_or_a_number_reaches_the_optimizer_as_fp32():
    for given in (torch.tensor(4.0, dtype=torch.float64), torch.tensor([4.0]), 4.0):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([weight], betas=(0.5, 0.9), fused=True)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(weight.sum()).backward()
        optimizer.grad_scale = given
        scaler.step(optimizer)
        assert torch.allclose(optimizer.state[weight]["exp_avg"], torch.tensor(0.125))
