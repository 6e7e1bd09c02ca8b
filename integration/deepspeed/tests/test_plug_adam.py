"""FusedAdamW on the states and by the numbers of another Adam."""

from copy import deepcopy

import pytest
import torch

from stepstack_deepspeed._plug_adam import InnerAdam
from stepstack_fused_adam import FusedAdamW

KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "maximize": lambda params: torch.optim.AdamW(params, lr=0.1, maximize=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.2),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def params_and_grads(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (3, 70)]
    return params, [[torch.randn(len(param), generator=generator).to(dtype) for param in params] for _ in range(6)]


def step(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.float().clone()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_ours_and_of_its_own_make_one_training(kind):
    params, grads = params_and_grads()
    expected, _ = params_and_grads()
    mixed, plain = KINDS[kind](params), KINDS[kind](expected)
    inner = InnerAdam(mixed)
    for number, now in enumerate(grads):
        step(plain, expected, now)
        if number in (0, 3):
            step(mixed, params, now)
        else:
            for param, grad in zip(params, now, strict=True):
                param.grad = 4 * grad
            inner.step_("all", params, mixed.param_groups[0], mixed, torch.tensor(4.0))
    torch.testing.assert_close(params, expected, rtol=1e-6, atol=1e-6)
    for param, other in zip(params, expected, strict=True):
        assert mixed.state[param].keys() == plain.state[other].keys()
        torch.testing.assert_close(mixed.state[param], plain.state[other], rtol=1e-5, atol=1e-6)


def test_it_goes_by_what_the_group_says_now():
    params, grads = params_and_grads()
    optimizer = KINDS["AdamW"](params)
    inner = InnerAdam(optimizer)
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0]["lr"] = 0.0
    for param, grad in zip(params, grads[0], strict=True):
        param.grad = grad
    inner.step_("all", params, optimizer.param_groups[0], optimizer, None)
    assert all(map(torch.equal, params, before))


def test_loaded_states_are_taken_over():
    params, grads = params_and_grads()
    optimizer = KINDS["AdamW"](params)
    inner = InnerAdam(optimizer)

    def three_steps():
        for now in grads[:3]:
            for param, grad in zip(params, now, strict=True):
                param.grad = grad
            inner.step_("all", params, optimizer.param_groups[0], optimizer, None)

    three_steps()
    saved, weights = deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    three_steps()
    once = [param.detach().clone() for param in params]
    optimizer.load_state_dict(saved)
    for param, weight in zip(params, weights, strict=True):
        param.data.copy_(weight)
    three_steps()
    torch.testing.assert_close([param.detach() for param in params], once, rtol=0, atol=0)


def test_counts_that_are_numbers_stay_numbers():
    class Owner:
        def __init__(self):
            self.state = {}

    params, grads = params_and_grads(torch.bfloat16)
    optimizer, owner = KINDS["AdamW"](params), Owner()
    owner.state = {param: {} for param in params}
    inner = InnerAdam(optimizer)
    expected, _ = params_and_grads()
    plain = KINDS["AdamW"](expected)
    for number, now in enumerate(grads):
        step(plain, expected, now)
        for param, grad in zip(params, now, strict=True):
            param.grad, param.decoupled_grad = None, grad
        inner.step_("all", params, optimizer.param_groups[0], owner, None)
        assert [owner.state[param]["step"] for param in params] == [number + 1] * 2
    assert {type(owner.state[param]["step"]) for param in params} == {int}
    torch.testing.assert_close(params, expected, rtol=1e-6, atol=1e-6)


def test_one_of_ours_steps_itself():
    params, grads = params_and_grads()
    expected, _ = params_and_grads()
    ours = FusedAdamW(params, lr=0.1, exp_avg_sq_dtype=torch.bfloat16)
    plain = FusedAdamW(expected, lr=0.1, exp_avg_sq_dtype=torch.bfloat16)
    inner = InnerAdam(ours)
    for now in grads:
        step(plain, expected, now)
        for param, grad in zip(params, now, strict=True):
            param.grad = 4 * grad
        for number, param in enumerate(params):
            inner.step_(number, [param], ours.param_groups[0], ours, torch.tensor(4.0))
    torch.testing.assert_close(params, expected, rtol=1e-6, atol=1e-6)
    assert len(ours.param_groups[0]["params"]) == 2
    assert ours.state[params[0]]["exp_avg_sq"].dtype == torch.bfloat16


def test_other_optimizers_are_refused_by_name():
    params, _ = params_and_grads()
    with pytest.raises(TypeError, match=r"torch.optim.sgd.SGD can't be stepped by FusedAdamW.*optimizer=False"):
        InnerAdam(torch.optim.SGD(params))
