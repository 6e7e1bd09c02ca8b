"""What is refused, and in which words."""

import math

import pytest
import torch

from stepstack_fused_adam import FusedAdamW, adamw_


def parameters(*shapes):
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


def test_bad_input_is_refused_by_name():
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 is .* of torch.complex64"):
        FusedAdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    for overlapping in (torch.zeros(1).expand(3), torch.zeros(9).as_strided((3, 3), (1, 1))):
        with pytest.raises(ValueError, match="elements of parameter 'w' share memory"):
            FusedAdamW([("w", torch.nn.Parameter(overlapping))])
    with pytest.raises(ValueError, match="backend must be one of"):
        FusedAdamW(parameters((2,)), backend="cuda")
    with pytest.raises(ValueError, match="differentiable"):
        FusedAdamW(parameters((2,)), differentiable=True)
    (param,) = parameters((2, 3))
    param.grad = torch.zeros(2, 3).to_sparse()
    with pytest.raises(TypeError, match=r"the gradient of parameter 0 of group 0 is torch\.sparse"):
        FusedAdamW([param]).step()
    zeros = [torch.zeros(2, 3)]
    with pytest.raises(ValueError, match="exp_avg of parameter 0"):
        adamw_([param], zeros, [torch.zeros(3, 2)], zeros, [torch.zeros(())])
    with pytest.raises(ValueError, match="a step is 0-d fp32"):
        adamw_([param], zeros, zeros, zeros, [torch.zeros(1)])
    wide = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="or fp64 where the parameter is"):
        adamw_([param], zeros, zeros, [wide], [torch.zeros(())])
    with pytest.raises(ValueError, match="lists of one length"):
        adamw_([param], zeros, zeros, [], [torch.zeros(())])


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"lr": -0.1}, "lr of group 1 is -0.1; it is at least 0 and less than inf"),
        ({"lr": math.nan}, "lr of group 1 is nan"),
        ({"lr": torch.ones(2)}, "lr of group 1 has 2 elements, not one"),
        ({"betas": (1.0, 0.9)}, "the first of betas of group 1 is 1.0; it is at least 0 and less than 1"),
        ({"betas": (0.9, -0.1)}, "the second of betas of group 1 is -0.1"),
        ({"eps": -1e-8}, "eps of group 1 is -1e-08"),
        ({"weight_decay": -1}, "weight_decay of group 1 is -1"),
    ],
)
def test_numbers_of_a_group_are_checked_as_the_constructors_are(numbers, reason):
    one, other = parameters((2,), (3,))
    with pytest.raises(ValueError, match=reason):
        FusedAdamW([{"params": [one]}, {"params": [other], **numbers}])
    optimizer = FusedAdamW([one])
    with pytest.raises(ValueError, match=reason):
        optimizer.add_param_group({"params": [other], **numbers})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_the_contract_has_one_number_for_all(name):
    optimizer = FusedAdamW(parameters((2,)))
    setattr(optimizer, name, torch.ones(2))
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\); it is one number"):
        optimizer.step()


@pytest.mark.parametrize(("master_weights", "held"), [("fp32", "master_weight"), ("remainder", "remainder_high")])
def test_a_model_that_was_cast_after_its_first_step_is_refused(master_weights, held):
    def stepped(param):
        param.grad = torch.ones_like(param)
        optimizer.step()

    narrowed, widened = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).bfloat16()
    optimizer = FusedAdamW(narrowed.parameters(), master_weights=master_weights)
    stepped(narrowed.weight)
    saved = optimizer.state_dict()
    narrowed.zero_grad()
    narrowed.bfloat16()
    before = narrowed.weight.detach().clone()
    with pytest.raises(ValueError, match=rf"parameter 0 of group 0 is torch.bfloat16.*{held}.*but its state has no"):
        stepped(narrowed.weight)
    assert torch.equal(narrowed.weight, before)
    optimizer = FusedAdamW(narrowed.parameters(), master_weights=master_weights)
    optimizer.load_state_dict(saved)
    stepped(narrowed.weight)
    assert optimizer.state[narrowed.weight]["step"] == 2
    optimizer = FusedAdamW(widened.parameters(), master_weights=master_weights)
    stepped(widened.weight)
    widened.zero_grad()
    widened.float()
    with pytest.raises(ValueError, match=rf"is torch.float32, so .* no master weight, but its state has .*{held}"):
        stepped(widened.weight)


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_a_number_that_becomes_nan_is_refused_before_it_spoils_the_weights(name):
    (param,) = parameters((2,))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(2)
    optimizer.param_groups[0][name] = (0.9, math.nan) if name == "betas" else math.nan
    with pytest.raises(ValueError, match=rf"{'beta2' if name == 'betas' else name} of group 0 is nan"):
        optimizer.step()
    assert torch.equal(param, torch.ones(2))
