"""adam.c beside the definition, in every form; the same bits however runs are cut and threads are many."""

import itertools
import threading

import pytest
import torch

from stepstack_fused_adam import FusedAdamW, _native, backends
from stepstack_fused_adam._definition import update_, weight
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._native import NativeStep
from stepstack_fused_adam._run import run_of
from stepstack_fused_adam._state import Precision, create, states_here
from stepstack_testing import HostSyncs, on_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MOMENTS = (FP32, BF16, "block8")
NUMEL = 1000  # three whole blocks of the kernel, and a rest that is no whole block of a scale


@pytest.fixture(autouse=True)
def library():
    if not _native.is_here():
        pytest.skip(f"adam.c can't be used: {backends('cpu')['native']}")


def forms():
    for param, grad, first, second in itertools.product((FP32, BF16, FP16), (FP32, BF16, FP16), MOMENTS, MOMENTS):
        for master in (None, "fp32", "remainder"):
            if (master != "remainder" or param == BF16) and (master is None or param != FP32):
                yield param, grad, Precision(master, first, second)


def numbers(seed, *, spread=3.0, numel=NUMEL):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** (spread * torch.randn(numel, generator=generator) / 3)


def begun(param_dtype, grad_dtype, precision, amsgrad, numel=NUMEL, steps=2):
    """A parameter and its run after some steps of the definition, and a gradient."""
    param = torch.nn.Parameter(numbers(0, numel=numel).to(param_dtype))
    (state,) = create([param], precision, amsgrad)
    run = run_of(param, state["step"], states_here(state))
    for seed in range(1, steps + 1):
        run.step.add_(1)
        through_definition(run, param.detach(), numbers(seed, numel=numel).to(grad_dtype), HYPERPARAMETERS)
    return run, param.detach(), numbers(9, numel=numel).to(grad_dtype)


HYPERPARAMETERS = Hyperparameters(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


def through_definition(run, param, grad, by):
    count = run.step if by.bias_correction else torch.full((), torch.inf)
    update_(param, grad, run.flat.states, count, by.scalars(FP32, param.device), by.decoupled)


def natively(run, param, grad, by):
    NativeStep([run], grad.dtype)([param], [grad], by)


def everything(run, param):
    return {"param": param, **{name: tensor for name, tensor in run.states._asdict().items() if tensor is not None}}


def assert_close(run, param, other_run, other_param, grad):
    """To 4 ulp of the arithmetic, and one of what it was rounded to; codes to one, of few elements.

    An ulp is that of the numbers that are added up: they may be larger than what is left of them.
    """
    for (name, ours), theirs in zip(
        everything(run, param).items(), everything(other_run, other_param).values(), strict=True
    ):
        if ours.is_floating_point():
            summed = grad.double().abs() + weights_of(run, param).double().abs()  # a gradient, and a decay of L2
            added = {"exp_avg": 0.2 * summed, "exp_avg_sq": 1e-3 * summed**2}.get(name, 1e-2)
            size = theirs.double().abs() + added
            ulp = max(4 * torch.finfo(FP32).eps, 1.01 * torch.finfo(ours.dtype).eps * (ours.dtype != FP32))
            assert ((ours.double() - theirs.double()).abs() <= ulp * size).all(), name
            if ours.dtype != FP32:
                assert (ours != theirs).float().mean() <= 0.01, name
        elif not name.startswith("remainder"):
            assert ((ours.int() - theirs.int()).abs() <= 1).all(), name
            assert (ours != theirs).float().mean() <= 0.05, name  # second moments are rounded by their own low bits
    if run.states.remainder_high is not None:
        ours, theirs = (weights_of(one, tensor) for one, tensor in ((run, param), (other_run, other_param)))
        torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(FP32).eps, atol=4e-2 * torch.finfo(FP32).eps)


def weights_of(run, param):
    return weight(param, run.states)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_every_form_is_the_definition(decoupled, amsgrad):
    by = Hyperparameters(
        lr=torch.tensor(1e-2, dtype=torch.float64),
        beta1=torch.tensor(0.9),
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=decoupled,
        maximize=amsgrad,
        bias_correction=not amsgrad or decoupled,
        grad_scale=torch.tensor(3.0),
    )
    for form in forms():
        (run, param, grad), (twin, twin_param, _) = (begun(*form, amsgrad) for _ in range(2))
        run.step.add_(1)
        twin.step.add_(1)
        natively(run, param, grad, by)
        through_definition(twin, twin_param, grad, by)
        assert_close(run, param, twin, twin_param, grad)


def test_a_skipped_step_changes_no_bit():
    by = Hyperparameters(**{**vars(HYPERPARAMETERS), "skip": torch.tensor(1.0)})
    for form in forms():
        run, param, grad = begun(*form, False)
        before = {name: tensor.clone() for name, tensor in everything(run, param).items()}
        grad[3] = torch.inf
        natively(run, param, grad, by)
        for name, tensor in everything(run, param).items():
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    "form",
    [
        (FP32, FP32, Precision()),
        (BF16, BF16, Precision("fp32")),
        (FP16, FP16, Precision("fp32", BF16, BF16)),
        (BF16, FP32, Precision("remainder", "block8", "block8")),
    ],
)
def test_no_cut_of_runs_and_no_number_of_threads_changes_a_bit(form, monkeypatch):
    numel = 2**17 + 1000
    whole, param, grad = begun(*form, False, numel=numel, steps=1)
    natively(whole, param, grad, HYPERPARAMETERS)
    expected = {name: tensor.clone() for name, tensor in everything(whole, param).items()}

    def check(run, param):
        for name, tensor in everything(run, param).items():
            assert torch.equal(tensor, expected[name]), name

    threads = torch.get_num_threads()
    monkeypatch.setattr(_native, "_WORTH_A_THREAD", 2**12)
    for count in (2, 3, 7):
        run, param, grad = begun(*form, False, numel=numel, steps=1)  # torch's bits may depend on the threads
        torch.set_num_threads(count)
        try:
            natively(run, param, grad, HYPERPARAMETERS)
        finally:
            torch.set_num_threads(threads)
        check(run, param)
    for limit in (64, 640, 100 * 64, 2**16):
        run, param, grad = begun(*form, False, numel=numel, steps=1)
        parts = run.cut(limit)
        NativeStep(parts, grad.dtype)(param.split(limit), grad.split(limit), HYPERPARAMETERS)
        check(run, param)


SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    6e-8,
    6e-5,
    65504.0,
    65519.9,
    65520.0,
    1e30,
    3e38,
    torch.inf,
    -torch.inf,
    torch.nan,
]


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_numbers_at_the_edge_are_the_definitions(eps):
    by = Hyperparameters(**{**vars(HYPERPARAMETERS), "eps": eps})
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    for param_dtype, grad_dtype, precision in (
        (FP32, FP32, Precision()),
        (FP16, FP16, Precision("fp32")),
        (BF16, BF16, Precision("remainder")),
        (BF16, FP16, Precision(None, BF16, BF16)),
    ):
        found = []
        for step in (natively, through_definition):
            param = torch.nn.Parameter(pairs[:, 0].clone().to(param_dtype))
            (state,) = create([param], precision, False)
            run = run_of(param, state["step"].add_(1), states_here(state))
            step(run, param.detach(), pairs[:, 1].clone().to(grad_dtype), by)
            found.append((weights_of(run, param.detach()).clone(), run.states.exp_avg, run.states.exp_avg_sq))
        for ours, theirs in zip(*found, strict=True):
            tolerance = {"rtol": 4 * torch.finfo(ours.dtype).eps, "atol": 1e-44}
            torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bit_number_is_widened_exactly_and_rounded_as_torch_rounds(dtype):
    param = torch.nn.Parameter(torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype))
    halfway = (
        param.detach().float().view(torch.int32)
        + torch.tensor([[0], [0xFFF], [0x1000], [0x7FFF], [0x8000]], dtype=torch.int32)
    ).view(FP32)
    by = Hyperparameters(**{**vars(HYPERPARAMETERS), "lr": 0.0})
    for masters in halfway:
        (state,) = create([param], Precision("fp32"), False)
        state["master_weight"].copy_(masters)
        run = run_of(param, state["step"].add_(1), states_here(state))
        written = param.detach().clone()
        natively(run, written, torch.zeros_like(written), by)
        expected = masters.to(dtype)
        assert torch.equal(written.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(written.signbit() | written.isnan(), expected.signbit() | expected.isnan())


def test_no_step_reads_a_number_on_the_host():
    run, param, grad = begun(BF16, BF16, Precision("fp32"), False)
    step = NativeStep([run], grad.dtype)
    by = Hyperparameters(**{**vars(HYPERPARAMETERS), "lr": torch.tensor(0.1), "skip": torch.tensor(0.0)})
    with HostSyncs() as syncs:
        step([param], [grad], by)
    assert syncs == []


def trained(rank=None):
    param = torch.nn.Parameter(torch.linspace(-1, 1, 2**20).bfloat16())
    optimizer = FusedAdamW([param], lr=0.1, master_weights="fp32", backend="native")
    param.grad = param.detach().clone()
    optimizer.step()
    return optimizer.state[param]["master_weight"]


def test_a_child_of_a_process_with_threads_steps_and_several_threads_of_python_may():
    expected = trained()
    assert all(torch.equal(master, expected) for master in on_ranks(2, trained))
    found = []
    threads = [threading.Thread(target=lambda: found.append(trained())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(master, expected) for master in found] == [True] * 4


def test_fp64_is_left_to_torch():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    FusedAdamW([param]).step()
    with pytest.raises(ValueError, match=r"backend 'native' does not do this step: parameters of torch.float64"):
        FusedAdamW([param], backend="native").step()
