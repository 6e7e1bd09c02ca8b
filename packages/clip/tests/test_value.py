import math

import pytest
import torch
from torch import nn

from stepstack_clip import clip_grad_value_
from stepstack_testing import HostSyncs


def parameter_with(grad):
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_a_drop_in_for_torch(dtype):
    values = [torch.linspace(-3, 3, 13).to(dtype), torch.tensor([math.inf, -math.inf, math.nan]).to(dtype)]
    ours, theirs = [[parameter_with(value.clone()) for value in values] for _ in range(2)]
    with HostSyncs() as syncs:
        clip_grad_value_([*ours, nn.Parameter(torch.zeros(1))], 1.5)
    torch.nn.utils.clip_grad_value_(theirs, 1.5)
    assert syncs == []
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_a_value_beyond_the_dtype_leaves_what_is_finite():
    values = [torch.tensor([-6e4, 3.0]), torch.tensor([-6e4, 3.0], dtype=torch.float16)]
    grads = [value.clone() for value in values]
    clip_grad_value_([parameter_with(grad) for grad in grads], 1e5)
    assert all(torch.equal(grad, value) for grad, value in zip(grads, values, strict=True))


def test_fp8_and_expanded_gradients():
    small, base = torch.linspace(-3, 3, 13).to(torch.float8_e4m3fn), torch.tensor([[5.0], [-0.5]])
    clip_grad_value_([parameter_with(small), parameter_with(base.expand(2, 3))], 1.0)
    assert small.float().abs().max() == 1
    assert base.flatten().tolist() == [1, -0.5]


def test_the_sum_of_a_repeated_index_is_clipped():
    grad = torch.sparse_coo_tensor([[0, 0, 1]], torch.tensor([1.0, 2.0, -3.0]), (3,), check_invariants=True)
    clip_grad_value_(parameter_with(grad), 2.5)
    assert grad.to_dense().tolist() == [2.5, -2.5, 0]


def test_a_parameter_of_a_sharded_optimizer_is_followed():
    parameter = parameter_with(torch.tensor([9.0]))
    parameter.grad_shard = torch.tensor([5.0])
    clip_grad_value_([parameter], 2.0)
    assert parameter.grad_shard.tolist() == [2]
    assert parameter.grad.tolist() == [9]


@pytest.mark.parametrize("clip_value", [-1.0, math.nan])
def test_a_bad_value_touches_nothing(clip_value):
    parameter = parameter_with(torch.tensor([5.0]))
    with pytest.raises(ValueError, match="clip_value"):
        clip_grad_value_([parameter], clip_value)
    assert parameter.grad.tolist() == [5]


def test_complex_gradients_are_refused():
    parameters = [parameter_with(torch.tensor([5.0])), parameter_with(torch.tensor([5 + 1j]))]
    with pytest.raises(TypeError, match="complex"):
        clip_grad_value_(parameters, 1.0)
    assert parameters[0].grad.tolist() == [5]
