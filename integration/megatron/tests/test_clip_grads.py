"""Clipping by a norm that is known, beside Megatron's arithmetic."""

import math

import pytest
import torch

from stepstack_megatron import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from stepstack_testing import HostSyncs


def parameters(*grads):
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return [*params, torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_gradients_are_multiplied_by_max_norm_over_norm(as_tensor):
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]).bfloat16()]
    params = parameters(*grads)
    with HostSyncs() as syncs:
        clip_grad_by_total_norm_fp32(params, 1.0, torch.tensor(5.0) if as_tensor else 5.0)
    assert syncs == []
    for param, grad in zip(params, grads, strict=False):
        torch.testing.assert_close(param.grad, grad * (1.0 / (5.0 + 1e-6)))


def test_a_single_parameter_is_taken_too():
    param = parameters(torch.tensor([3.0, 4.0]))[0]
    clip_grad_by_total_norm_fp32(param, 1.0, 5.0)
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("norm", [1.0, 0.5, math.nan, math.inf])
def test_at_or_below_the_limit_and_without_a_finite_norm_no_bit_changes(norm):
    grads = [torch.tensor([math.inf, 1.0, math.nan, -0.0])]
    params = parameters(*grads)
    clip_grad_by_total_norm_fp32(params, 1.0, torch.tensor(norm))
    assert torch.equal(params[0].grad.view(torch.int32), grads[0].view(torch.int32))


def test_a_decoupled_gradient_is_clipped_where_it_is():
    param = parameters(torch.tensor([3.0, 4.0]))[0]
    param.decoupled_grad = torch.tensor([30.0, 40.0]).bfloat16()
    clip_grad_by_total_norm_fp32([param, torch.nn.Parameter(torch.zeros(2))], 5.0, 50.0, use_decoupled_grad=True)
    assert torch.equal(param.decoupled_grad, torch.tensor([3.0, 4.0]).bfloat16())
    assert torch.equal(param.grad, torch.tensor([3.0, 4.0]))


def test_a_parameter_of_megatrons_fsdp_is_refused():
    param = parameters(torch.ones(2))[0]
    param.__dict__["__fsdp_param__"] = True
    with pytest.raises(TypeError, match="Megatron-FSDP"):
        clip_grad_by_total_norm_fp32([param], 1.0, 2.0)


def test_the_whole_world_needs_to_be_there():
    with pytest.raises(RuntimeError, match="not initialized"):
        get_grad_norm_fp32([torch.ones(2)])
