"""States as numbers, in stretches: for who saves and loads them in pieces."""

import pytest
import torch
from torch import nn

from stepstack_fused_adam import FusedAdamW

FORMS = [
    {"master_weights": master, "exp_avg_dtype": form, "exp_avg_sq_dtype": form}
    for master in (None, "fp32", "remainder")
    for form in (torch.float32, torch.bfloat16, "block8")
]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))


def trained(form, steps=3):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n).bfloat16()) for n in (200, 64)]
    optimizer = FusedAdamW(params, lr=0.1, **form)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return params, optimizer


def read(numbers, start, stop):
    return numbers[start:stop] if isinstance(numbers, torch.Tensor) else numbers.read(start, stop)


@each_form
def test_stretches_are_what_the_state_dict_has(form):
    params, optimizer = trained(form)
    saved = optimizer.state_dict()["state"][0]
    numbers = optimizer.numbers(params[0])
    assert numbers.keys() == saved.keys() - {"step"}
    for name, whole in numbers.items():
        assert whole.dtype == saved[name].dtype
        for start, stop in ((0, 200), (64, 128), (3, 199), (130, 131)):
            assert torch.equal(read(whole, start, stop), saved[name][start:stop])


@each_form
def test_what_is_written_into_new_states_goes_on_alike(form):
    params, optimizer = trained(form)
    others, fresh = trained(form, steps=0)
    fresh.create_states(others)
    for param, other in zip(params, others, strict=True):
        with torch.no_grad():
            other.copy_(param)
        for name, numbers in fresh.numbers(other).items():
            values = read(optimizer.numbers(param)[name], 0, param.numel())
            if isinstance(numbers, torch.Tensor):
                numbers.copy_(values)
            elif len(values) > 64:
                numbers.write(64, values[64:])
                numbers.write(0, values[:64])
            else:
                numbers.write(0, values)
                numbers.write(0, values[:64])
        fresh.state[other]["step"].fill_(3)
    for param, other in zip(params, others, strict=True):
        param.grad = other.grad = torch.randn_like(param)
    optimizer.step()
    fresh.step()
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)


def test_creating_states_makes_no_step_and_leaves_others_alone():
    (first, second), optimizer = trained({"master_weights": "fp32"}, steps=0)
    before = first.detach().clone()
    optimizer.create_states([first])
    assert torch.equal(first, before)
    assert optimizer.state[first]["step"] == 0
    assert not optimizer.numbers(first)["exp_avg"].any()
    assert optimizer.numbers(second) == {}
