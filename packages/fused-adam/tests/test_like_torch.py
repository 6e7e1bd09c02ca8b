"""What users do around an optimizer ends as it does with torch's own class, or is refused in a sentence."""

import copy
import math

import pytest
import torch

from stepstack_fused_adam import FusedAdamW

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 3), (5,), (2, 3, 2)]]


def step(optimizer, params, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) if param.requires_grad else None
        optimizer.step()
    return [param.detach().clone() for param in params]


@case
def rates_of_other_shapes_and_dtypes(cls):
    ends = []
    for rate in (torch.tensor([[0.1]]), torch.tensor(0.1, dtype=torch.float64), torch.tensor(1), 1):
        ends += step(cls(params := parameters(), lr=rate), params, range(3))
    return ends


@case
def a_rate_that_becomes_a_tensor_is_filled_and_becomes_negative(cls):
    optimizer = cls(params := parameters(), lr=0.1)
    step(optimizer, params, range(2))
    for rate in (torch.tensor(0.3), 0.1, -0.1):
        optimizer.param_groups[0]["lr"] = rate
        step(optimizer, params, range(2))
        if isinstance(rate, torch.Tensor):
            rate.fill_(0.2)
        step(optimizer, params, range(2))
    return params


@case
def betas_in_a_list_that_is_edited(cls):
    optimizer = cls(params := parameters(), lr=0.1, betas=[0.8, 0.9])
    step(optimizer, params, range(2))
    betas = optimizer.param_groups[0]["betas"] = [0.5, 0.6]
    step(optimizer, params, range(2))
    betas[:] = [0.7, 0.8]
    return step(optimizer, params, range(2))


@case
def every_option_edited_in_turn(cls):
    optimizer = cls(params := parameters(), lr=0.1)
    for key, value in {"weight_decay": 0.5, "eps": 1e-2, "maximize": True, "decoupled_weight_decay": False}.items():
        step(optimizer, params, range(2))
        optimizer.param_groups[0][key] = value
    return step(optimizer, params, range(2))


@case
def a_closure_that_adds_and_deletes_groups(cls):
    params, more = parameters(), parameters()
    optimizer = cls([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params + more)
        loss.backward()
        if len(optimizer.param_groups) == 2:
            del optimizer.param_groups[0]
            optimizer.add_param_group({"params": more, "lr": 0.3})
            optimizer.add_param_group({"params": params[:1], "lr": 0.2})
        return loss.detach()

    return [optimizer.step(closure) for _ in range(3)], params, more


@case
def gradients_that_are_their_parameters_or_one_number(cls):
    optimizer = cls(params := parameters(), lr=0.1, weight_decay=0.1, maximize=True)
    for _ in range(2):
        for param in params:
            param.grad = param.detach()
        optimizer.step()
        for param in params:
            param.grad = torch.tensor(0.5).expand(param.shape)
        optimizer.step()
    return params


@case
def parameters_given_other_memory(cls):
    optimizer = cls(params := parameters(), lr=0.1)
    step(optimizer, params, range(2))
    for param in params:
        param.data = param.data.clone() * 2
    return step(optimizer, params, range(2))


@case
def one_frozen_for_a_while(cls):
    optimizer = cls(params := parameters(), lr=0.1)
    for trained in (True, False, True):
        params[0].requires_grad_(trained)
        step(optimizer, params, range(2))
    return params


@case
def frozen_codes_and_layers_that_are_lazy_at_first(cls):
    codes = torch.nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    lazy = torch.nn.LazyLinear(2)
    optimizer = cls([codes, *lazy.parameters()], lr=0.1)
    lazy(torch.ones(1, 3))
    for param in lazy.parameters():
        param.data.fill_(0.5)
    return step(optimizer, list(lazy.parameters()), range(2))


@case
def hooks_of_a_step_that_change_its_arguments_and_gradients(cls):
    optimizer = cls(params := parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args[:1], {"closure": lambda: 7}))
    optimizer.register_step_pre_hook(lambda *_: [param.grad.mul_(2) for param in params] and None)
    step(optimizer, params, range(2))
    return optimizer.step(), params


@case
def an_overriding_step_with_an_argument_of_its_own(cls):
    class Own(cls):
        def step(self, closure=None, kwarg=None):
            super().step(closure)
            kwarg.append(5)

    optimizer = Own(params := parameters(), lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step(None, kwarg=(called := []))
    return called, params


@case
def a_copy_of_model_and_optimizer(cls):
    optimizer = cls(params := parameters(), lr=0.1, weight_decay=0.3)
    step(optimizer, params, range(2))
    twin, its = copy.deepcopy((optimizer, params))
    step(twin, its, range(2, 4))
    return its, step(optimizer, params, range(1))


@case
def groups_and_states_replaced_whole(cls):
    optimizer = cls(params := parameters(), lr=0.1)
    step(optimizer, params, range(2))
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.01}]
    step(optimizer, params, range(2))
    optimizer.state = type(optimizer.state)(dict)
    return step(optimizer, params, range(2))


@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_torchs_does(name):
    ours, theirs = CASES[name](FusedAdamW), CASES[name](torch.optim.AdamW)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("lr", math.inf, "lr of group 0 is inf"),
        ("lr", "0.1", "lr of group 0 is '0.1'; a step needs a number"),
        ("lr", None, "lr of group 0 is None"),
        ("betas", (1.0, 0.9), "beta1 of group 0 is 1.0; a step needs a number less than 1"),
        ("betas", (0.9, 1), "beta2 of group 0 is 1"),
        ("differentiable", True, "group 0 asks for a differentiable step"),
    ],
)
def test_an_option_that_no_step_can_be_made_by_is_refused_before_it_spoils_the_weights(option, value, reason):
    optimizer = FusedAdamW(params := parameters(), lr=0.1)
    before = step(optimizer, params, range(2))
    optimizer.param_groups[0][option] = value
    with pytest.raises(ValueError, match=reason):
        optimizer.step()
    torch.testing.assert_close([param.detach() for param in params], before, rtol=0, atol=0)


def test_a_differentiable_group_is_refused_when_it_is_given():
    with pytest.raises(ValueError, match="group 0 asks for a differentiable step"):
        FusedAdamW([{"params": parameters(), "differentiable": True}])


@pytest.mark.parametrize("count", [-1, math.nan])
def test_a_count_below_zero_is_refused_by_name(count):
    optimizer = FusedAdamW(params := parameters(), lr=0.1)
    before = step(optimizer, params, range(2))
    saved = optimizer.state_dict()
    optimizer.state[params[1]]["step"].fill_(count)
    with pytest.raises(ValueError, match=r"the step of parameter 1 of group 0 is .* at least 0"):
        optimizer.step()
    torch.testing.assert_close([param.detach() for param in params], before, rtol=0, atol=0)
    saved["state"][2]["step"] = torch.tensor(float(count))
    with pytest.raises(ValueError, match=r"the step of the saved state of parameter 2 of group 0 is"):
        optimizer.load_state_dict(saved)


def test_what_torch_refuses_is_refused_with_torchs_error():
    optimizer, theirs = FusedAdamW(parameters()), torch.optim.AdamW(parameters())
    for call in (
        lambda each: each.step(None, kwarg=[]),
        lambda each: each.step(None, None),
        lambda each: each.add_param_group(parameters()),
        lambda each: type(each)([{"params": []}, {"params": {torch.ones(2)}}]),
    ):
        errors = []
        for each in (optimizer, theirs):
            with pytest.raises(TypeError) as caught:
                call(each)
            errors.append(str(caught.value).replace("FusedAdamW.", "Adam."))
        assert errors[0] == errors[1]
