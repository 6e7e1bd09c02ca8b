"""A step of FusedAdamW against torch's AdamW: values, counts, numbers, and the contract."""

import math

import pytest
import torch

from stepstack_fused_adam import FusedAdamW, adamw_
from stepstack_testing import HostSyncs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def fill_gradients(*all_params, seed, scale=1.0):
    """The same gradients for every list of parameters."""
    for params in all_params:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = torch.empty_like(param).copy_(grad.to(param.dtype) * scale)


def copies(params, dtype=None):
    return [torch.nn.Parameter(param.detach().clone().to(dtype or param.dtype)) for param in params]


@pytest.mark.parametrize("numbers", [{}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.0, 0.5), "eps": 0.1}])
def test_it_is_adamw(numbers):
    ours = parameters((3, 5), (7,), ())
    theirs = copies(ours)
    optimizer = FusedAdamW(ours, lr=0.1, **numbers)
    reference = torch.optim.AdamW(theirs, lr=0.1, foreach=False, **numbers)
    for seed in range(5):
        fill_gradients(ours, theirs, seed=seed)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", [None, *DTYPES])
@pytest.mark.parametrize("master_weights", [None, "fp32"])
def test_every_pair_of_dtypes_is_adamw_in_wide_arithmetic(dtype, grad_dtype, master_weights):
    ours = parameters((4, 6), (9,), dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    theirs = copies(ours, wide)
    optimizer = FusedAdamW(ours, lr=0.01, master_weights=master_weights)
    reference = torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    for seed in range(4):
        fill_gradients(theirs, seed=seed)
        for param, twin in zip(ours, theirs, strict=True):
            param.grad_dtype = grad_dtype or dtype
            param.grad = twin.grad.to(param.grad_dtype)
            twin.grad = param.grad.to(wide)
        optimizer.step()
        reference.step()
        if master_weights is None:
            for twin in theirs:
                twin.data.copy_(twin.to(dtype))
    for param, twin in zip(ours, theirs, strict=True):
        state, twin_state = optimizer.state[param], reference.state[twin]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wide
        torch.testing.assert_close(state["exp_avg"], twin_state["exp_avg"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(state["exp_avg_sq"], twin_state["exp_avg_sq"], rtol=1e-6, atol=1e-7)
        if master_weights and dtype.itemsize == 2:
            torch.testing.assert_close(state["master_weight"], twin.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(param, state["master_weight"].to(dtype))
        else:
            torch.testing.assert_close(param, twin.to(dtype))


def test_a_master_weight_keeps_what_bf16_loses():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedAdamW([param], lr=1e-4, weight_decay=0.0, master_weights="fp32")
    for _ in range(50):
        param.grad = torch.ones_like(param)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["master_weight"], torch.full((3,), 0.995), rtol=0, atol=1e-6)
    assert param.tolist() == [0.99609375] * 3


def test_a_decoupled_gradient_is_read_where_there_is_no_other():
    (param,) = ours = parameters((5,), dtype=torch.bfloat16)
    (twin,) = copies(ours)
    param.decoupled_grad = torch.linspace(-1, 1, 5)
    twin.grad_dtype = torch.float32
    twin.grad = torch.linspace(-1, 1, 5)
    optimizer = FusedAdamW([param])
    optimizer.step()
    FusedAdamW([twin]).step()
    assert torch.equal(param, twin)
    optimizer.zero_grad(set_to_none=False)
    assert param.decoupled_grad.count_nonzero() == 0
    optimizer.zero_grad()
    assert param.decoupled_grad is None


def snapshot(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.detach().clone() for param in params], optimizer.state_dict()["state"]


def assert_same_bits(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("master_weights", [None, "fp32"])
@pytest.mark.parametrize("found_inf", [1.0, 2.0, 0.5, math.nan, -1.0])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_skipped_step_changes_nothing(dtype, master_weights, found_inf, steps_before):
    ours, theirs = parameters((3, 4), (5,), dtype=dtype), parameters((3, 4), (5,), dtype=dtype)
    optimizer = FusedAdamW(ours, lr=0.1, master_weights=master_weights)
    twin = FusedAdamW(theirs, lr=0.1, master_weights=master_weights)
    for seed in range(steps_before):
        fill_gradients(ours, theirs, seed=seed)
        optimizer.step()
        twin.step()
    params, _ = snapshot(optimizer)
    fill_gradients(ours, seed=9)
    ours[0].grad.view(-1)[1] = math.inf
    optimizer.found_inf = torch.tensor(found_inf)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    if steps_before:
        assert_same_bits(snapshot(optimizer), snapshot(twin))
    assert_same_bits(snapshot(optimizer)[0], params)
    fill_gradients(ours, theirs, seed=10)
    optimizer.step()
    twin.step()
    assert_same_bits(snapshot(optimizer), snapshot(twin))


def test_a_skipped_step_leaves_a_parameter_that_is_not_its_master():
    (param,) = ours = parameters((5,), dtype=torch.bfloat16)
    optimizer = FusedAdamW(ours, master_weights="fp32")
    fill_gradients(ours, seed=0)
    optimizer.step()
    param.data.fill_(3.0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert param.tolist() == [3.0] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("found_inf", [None, 0.0])
def test_the_grad_scale_divides(dtype, found_inf):
    ours, theirs = parameters((3, 4), dtype=dtype), parameters((3, 4), dtype=dtype)
    optimizer, twin = FusedAdamW(ours, lr=0.1), FusedAdamW(theirs, lr=0.1)
    for seed in range(3):
        fill_gradients(ours, seed=seed, scale=8.0)
        fill_gradients(theirs, seed=seed)
        optimizer.grad_scale = torch.tensor(8.0)
        optimizer.found_inf = None if found_inf is None else torch.tensor([found_inf])
        optimizer.step()
        twin.step()
    assert_same_bits(snapshot(optimizer), snapshot(twin))


def test_torchs_scaler_steps_it_without_waiting():
    ours = parameters((4, 3))
    optimizer = FusedAdamW(ours, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = ours[0].detach().clone()
    for gradient in (1.0, math.inf, 1.0):
        scaler.scale(ours[0].sum()).backward()
        ours[0].grad.mul_(gradient)
        with HostSyncs() as syncs:
            scaler.step(optimizer)
            scaler.update()
        assert syncs == []
        optimizer.zero_grad()
    assert optimizer.state[ours[0]]["step"] == 2
    assert not hasattr(optimizer, "found_inf")
    assert torch.isfinite(ours[0]).all()
    assert not torch.equal(ours[0], before)


def test_an_infinite_gradient_is_as_if_it_never_happened():
    ours, theirs = parameters((3, 4), (5,), dtype=torch.bfloat16), parameters((3, 4), (5,), dtype=torch.bfloat16)
    optimizer, twin = FusedAdamW(ours, master_weights="fp32"), FusedAdamW(theirs, master_weights="fp32")
    for seed in range(4):
        fill_gradients(ours, theirs, seed=seed)
        if seed == 2:
            ours[1].grad[3] = math.inf
        norm = torch.nn.utils.get_total_norm([param.grad for param in ours])
        optimizer.grad_scale = norm.clamp(min=1)
        optimizer.found_inf = (~norm.isfinite()).float()
        optimizer.step()
        if seed != 2:
            twin.grad_scale = norm.clamp(min=1)
            twin.step()
    assert_same_bits(snapshot(optimizer), snapshot(twin))


def test_a_parameter_without_gradient_keeps_its_count_and_values():
    ours = parameters((3,), (4,))
    theirs = copies(ours)
    optimizer, reference = FusedAdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for seed in range(6):
        fill_gradients(ours, theirs, seed=seed)
        if seed == 5:
            ours[1].grad = theirs[1].grad = None
            before = ours[1].detach().clone()
        optimizer.step()
        reference.step()
    assert [optimizer.state[param]["step"].item() for param in ours] == [6, 5]
    assert torch.equal(ours[1], before)
    fill_gradients(ours, theirs, seed=7)
    optimizer.step()
    reference.step()
    assert [optimizer.state[param]["step"].item() for param in ours] == [7, 6]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("master_weights", [None, "fp32"])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_numbers_may_change_at_any_time(kind, master_weights):
    dtype = torch.bfloat16 if master_weights else torch.float32
    ours = parameters((3, 4), dtype=dtype)
    theirs = copies(ours, torch.float32)
    optimizer = FusedAdamW(ours, lr=kind(0.1), weight_decay=0.1, master_weights=master_weights)
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1, foreach=False)
    changes = [
        {"lr": 0.1},
        {"lr": 0.05},
        {"weight_decay": 0.5},
        {"betas": (0.8, 0.9)},
        {"lr": 0.0, "weight_decay": 0.0},
        {"lr": 0.2},
    ]
    for seed, change in enumerate(changes):
        fill_gradients(ours, theirs, seed=seed)
        theirs[0].grad = ours[0].grad.float()
        for name, value in change.items():
            reference.param_groups[0][name] = value
            as_kind = tuple(map(kind, value)) if isinstance(value, tuple) else kind(value)
            optimizer.param_groups[0][name] = as_kind
        with HostSyncs() as syncs:
            optimizer.step()
        assert syncs == []
        reference.step()
    weight = optimizer.state[ours[0]]["master_weight"] if master_weights else ours[0].detach()
    torch.testing.assert_close(weight, theirs[0].detach(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6),
    ],
    ids=["lambda", "cosine", "one cycle, which moves a beta too"],
)
def test_torchs_schedulers_drive_the_rate(schedule, kind):
    ours = parameters((3, 4))
    theirs = copies(ours)
    optimizer, reference = FusedAdamW(ours, lr=kind(0.1)), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    schedulers = schedule(optimizer), schedule(reference)
    rate = optimizer.param_groups[0]["lr"]
    for seed in range(5):
        fill_gradients(ours, theirs, seed=seed)
        optimizer.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert kind is float or optimizer.param_groups[0]["lr"] is rate
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [0, 1, 7])
def test_odd_sizes_are_right(numel):
    ours = parameters((numel,))
    theirs = copies(ours)
    optimizer, reference = FusedAdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for seed in range(2):
        fill_gradients(ours, theirs, seed=seed)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert optimizer.state[ours[0]]["step"] == 2


def test_the_function_is_the_optimizer():
    ours = parameters((3, 4), (5,), dtype=torch.bfloat16)
    theirs = copies(ours)
    optimizer = FusedAdamW(ours, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, master_weights="fp32")
    params = [param.detach() for param in theirs]
    masters = [param.float() for param in params]
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    steps = [torch.zeros(()) for _ in params]
    for seed in range(3):
        fill_gradients(ours, theirs, seed=seed)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.step()
        adamw_(
            params,
            [param.grad for param in theirs],
            exp_avgs,
            exp_avg_sqs,
            steps,
            masters=masters,
            lr=0.1,
            betas=(0.8, 0.9),
            weight_decay=0.2,
            grad_scale=torch.tensor(2.0),
        )
    assert torch.equal(ours[0], params[0])
    assert torch.equal(ours[1], params[1])
    assert torch.equal(optimizer.state[ours[1]]["exp_avg_sq"], exp_avg_sqs[1])


def test_a_closure_gives_the_loss():
    ours = parameters((3,))
    optimizer = FusedAdamW(ours)

    def closure():
        loss = ours[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.state[ours[0]]["step"] == 1


def test_autograd_sees_that_a_step_changed_the_weights():
    ours = parameters((3,))
    loss = ours[0].square().sum()
    fill_gradients(ours, seed=0)
    FusedAdamW(ours).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "betas"])
@pytest.mark.parametrize(
    "kind",
    [
        lambda number: torch.tensor(number, dtype=torch.float64),
        lambda number: torch.tensor([number], dtype=torch.float64),
        lambda number: torch.tensor(number, dtype=torch.float32),
        lambda number: torch.tensor(number, dtype=torch.bfloat16),
        lambda number: torch.tensor(number, dtype=torch.float64).numpy()[()],
        lambda number: torch.tensor(number, dtype=torch.float32).numpy()[()],
    ],
    ids=["fp64", "fp64 of one dim", "fp32", "bf16", "numpy's fp64", "numpy's fp32"],
)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_number_of_any_kind_is_taken_with_all_of_its_digits(dtype, name, kind, backend):
    numbers = {"lr": 0.03, "weight_decay": 0.1, "eps": 0.01, "betas": (0.9, 0.95)}
    if name == "betas" and type(kind(0.5)).__name__ == "float32":
        pytest.skip("torch's constructor refuses betas that are neither floats nor tensors")
    value = numbers[name]
    given = tuple(map(kind, value)) if name == "betas" else kind(value)
    exact = tuple(map(float, given)) if name == "betas" else float(given)
    ours = parameters((3, 5), dtype=dtype)
    theirs = copies(ours)
    optimizer = FusedAdamW(ours, **numbers | {name: given}, backend=backend)
    reference = torch.optim.AdamW(theirs, **numbers | {name: exact}, foreach=False)
    for seed in range(4):
        fill_gradients(ours, theirs, seed=seed)
        with HostSyncs() as syncs:
            optimizer.step()
        assert syncs == []
        reference.step()
    tolerance = 1e-14 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)
