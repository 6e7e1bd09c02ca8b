"""The definition against fp64 and torch; the backends against the definition."""

import pytest
import torch

from stepstack_fused_adam._definition import Scalars, adam, first_moment, second_moment, update_, weight
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, run_of
from stepstack_fused_adam._state import Precision, create, states_here
from stepstack_fused_adam._torch import TorchStep

NUMEL = 200


def numbers(seed, dtype=torch.float32):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def scalars(dtype, **changed):
    by = {"lr": 0.1, "alpha1": 0.1, "alpha2": 0.001, "eps": 1e-8, "weight_decay": 0.1, "divisor": 1.0, "skip": 0.0}
    return Scalars(**{name: torch.tensor(value, dtype=dtype) for name, value in (by | changed).items()})


def reference(optimizer_class, steps, **options):
    """(theta, m, v) of torch's for-loop in fp64."""
    param = torch.nn.Parameter(numbers(0, torch.float64))
    optimizer = optimizer_class([param], lr=0.1, weight_decay=0.1, foreach=False, **options)
    for seed in range(1, steps + 1):
        param.grad = numbers(seed, torch.float64)
        optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_definition_is_adam(dtype, tolerance, decoupled, amsgrad):
    theta, m, v = numbers(0, dtype), torch.zeros(NUMEL, dtype=dtype), torch.zeros(NUMEL, dtype=dtype)
    v_max = torch.zeros(NUMEL, dtype=dtype) if amsgrad else None
    for step in range(1, 6):
        t = torch.tensor(float(step), dtype=dtype)
        theta, m, v, v_max = adam(theta, numbers(step, dtype), m, v, v_max, t, scalars(dtype), decoupled)
    expected = reference(torch.optim.AdamW if decoupled else torch.optim.Adam, 5, amsgrad=amsgrad)
    torch.testing.assert_close((theta.double(), m.double(), v.double()), expected, rtol=tolerance, atol=tolerance)


def test_the_bias_correction_has_all_its_digits():
    grad = torch.full((1,), 1e-3)
    zero = torch.zeros(1)
    for alpha2 in (1e-3, 1e-4, 1e-5):
        theta, *_ = adam(zero, grad, zero, zero, None, torch.tensor(1.0), scalars(torch.float32, alpha2=alpha2), True)
        torch.testing.assert_close(theta, torch.tensor([-0.1]), rtol=1.5e-5, atol=0)  # eps is 1e-5 of the gradient


FORMS = {
    "fp32": (torch.float32, Precision()),
    "fp64": (torch.float64, Precision()),
    "bf16": (torch.bfloat16, Precision()),
    "fp16": (torch.float16, Precision()),
    "bf16 + fp32 master": (torch.bfloat16, Precision("fp32")),
    "fp16 + fp32 master": (torch.float16, Precision("fp32")),
    "bf16 + remainder": (torch.bfloat16, Precision("remainder")),
    "bf16 moments": (torch.bfloat16, Precision("fp32", torch.bfloat16, torch.bfloat16)),
    "all bf16": (torch.bfloat16, Precision(None, torch.bfloat16, torch.bfloat16)),
    "fp32 with bf16 moments": (torch.float32, Precision(None, torch.bfloat16, torch.bfloat16)),
    "block8 moments": (torch.bfloat16, Precision("fp32", "block8", "block8")),
}


class Trained:
    """A parameter in one of the forms, with its states."""

    def __init__(self, form, amsgrad=False):
        dtype, precision = FORMS[form]
        self.param = numbers(0, dtype)
        (state,) = create([self.param], precision, amsgrad)
        self.run: Run = run_of(self.param, state["step"], states_here(state))

    def through_definition(self, grad, by, decoupled=True):
        update_(self.param, grad, self.run.states, self.run.step, by, decoupled)

    def through_torch(self, grad, by):
        TorchStep([self.run], grad.dtype)([self.param], [grad], by)

    def tensors(self):
        return [tensor for tensor in (self.param, *self.run.states) if tensor is not None]

    def numbers(self):
        """(weight, first moment, second moment)."""
        states = self.run.states
        return weight(self.param, states), first_moment(states), second_moment(states)


def ulps(one, other):
    """The largest difference in units of the last place, where numbers smaller than their mean count as that."""
    magnitude = torch.maximum(one.abs(), other.abs()).double()
    unit = torch.finfo(one.dtype).eps * magnitude.clamp(min=magnitude.mean())
    return ((one.double() - other.double()).abs() / unit).max().item()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_the_torch_backend_is_the_definition(form, grad_dtype, amsgrad, decoupled):
    one, other = Trained(form, amsgrad), Trained(form, amsgrad)
    by = Hyperparameters(0.01, 0.9, 0.999, 1e-8, 0.1, decoupled=decoupled, grad_scale=torch.tensor(4.0))
    dtype = torch.float64 if form == "fp64" else torch.float32
    for step in range(1, 4):
        grad = numbers(step, grad_dtype)
        for trained in (one, other):
            trained.run.step.fill_(step)
        one.through_definition(grad.clone(), by.scalars(dtype, torch.device("cpu")), decoupled)
        other.through_torch(grad.clone(), by)
        for a, b in zip(one.numbers(), other.numbers(), strict=True):
            distance = ulps(a, b)
            assert distance <= 4


@pytest.mark.parametrize("form", FORMS)
def test_a_skip_changes_no_bit_of_any_form(form):
    trained = Trained(form)
    by = scalars(torch.float64 if form == "fp64" else torch.float32)
    trained.run.step.fill_(1)
    trained.through_definition(numbers(1), by)
    before = [tensor.clone() for tensor in trained.tensors()]
    grad = numbers(2)
    grad[3] = torch.inf
    trained.through_definition(grad, by._replace(skip=torch.ones_like(by.skip)))
    assert all(map(torch.equal, before, trained.tensors()))


def test_the_torch_backend_cuts_what_is_large(monkeypatch):
    whole, cut = Trained("bf16 + fp32 master"), Trained("bf16 + fp32 master")
    by = Hyperparameters(0.01, 0.9, 0.999, 1e-8, 0.1)
    for trained in (whole, cut):
        trained.run.step.fill_(1)
    whole.through_torch(numbers(1, torch.bfloat16), by)
    monkeypatch.setattr(Run, "batch", 64)
    cut.through_torch(numbers(1, torch.bfloat16), by)
    for a, b in zip(whole.numbers(), cut.numbers(), strict=True):
        distance = ulps(a, b)
        assert distance <= 1


def test_two_runs_are_the_same_bits():
    one, other = Trained("block8 moments"), Trained("block8 moments")
    for trained in (one, other):
        trained.run.step.fill_(1)
        trained.through_definition(numbers(1, torch.bfloat16), scalars(torch.float32))
    assert all(map(torch.equal, one.tensors(), other.tensors()))
