"""What it can be asked to do, in one process."""

import pytest
import torch
from torch import nn

from stepstack_nemo import DistributedFusedAdam


@pytest.fixture
def three():
    return [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]


def backward(params, gradients=(1.0, 2.0, 3.0)):
    sum((p * value).sum() for p, value in zip(params, gradients, strict=True)).backward()


def test_each_norm_is_of_the_parameters_asked_for(three):
    optimizer = DistributedFusedAdam(three)
    backward(three)
    assert optimizer.grad_norm([three[0]]) ** 2 == pytest.approx(3)
    assert optimizer.grad_norm([three[1]]) ** 2 == pytest.approx(16)
    assert optimizer.grad_norm() ** 2 == pytest.approx(3 + 16 + 45)
    assert optimizer.grad_norm(norm_type=float("inf")) == 3
    assert optimizer.grad_norm(norm_type=1) == pytest.approx(3 + 8 + 15)
    with pytest.raises(ValueError, match="not trained by this optimizer"):
        optimizer.grad_norm([nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("max_norm", [4.0, 100.0])
def test_clipping_waits_for_the_step_and_gives_the_norm_before(three, max_norm):
    optimizer = DistributedFusedAdam(three, betas=(0.0, 0.0))
    backward(three)
    assert optimizer.clip_grad_norm(max_norm) == pytest.approx(8)
    assert optimizer.grad_norm() == pytest.approx(min(max_norm, 8))
    assert optimizer.param_groups[0]["params"][0].grad[0] == 1
    optimizer.step()
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"][0] == pytest.approx(min(max_norm / 8, 1))


def test_a_step_and_zero_grad_forget_a_clip(three):
    optimizer = DistributedFusedAdam(three, betas=(0.0, 0.0))
    for forget in (optimizer.step, optimizer.zero_grad):
        backward(three)
        optimizer.clip_grad_norm(1e-3)
        forget()
        optimizer.zero_grad()
        backward(three)
        assert optimizer.grad_norm() == pytest.approx(8)
        optimizer.step()
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"][0] == pytest.approx(1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_clipped_by_a_norm_that_is_not_finite_changes_nothing(three, bad):
    optimizer = DistributedFusedAdam(three, weight_decay=0.1)
    backward(three)
    optimizer.step()
    before = [p.detach().clone() for p in three]
    backward(three, (1.0, bad, 1.0))
    assert not optimizer.clip_grad_norm(1.0).isfinite()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, three, strict=True))
    backward(three)
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert not torch.equal(before[0], three[0])


def test_finite_gradients_whose_squares_are_not_are_no_overflow(three):
    optimizer = DistributedFusedAdam(three)
    backward(three, (1e20, 1e20, 1e20))
    assert optimizer.unscale_grads(torch.tensor(1.0)) == {torch.device("cpu"): torch.tensor(0.0)}
    assert optimizer.grad_norm() == pytest.approx(1e20 * 12**0.5)


def test_a_gradient_set_by_hand_counts_from_the_first_step_on(three):
    optimizer = DistributedFusedAdam(three)
    for p in three:
        p.grad = torch.full_like(p, torch.inf)
    assert optimizer.unscale_grads(torch.tensor(0.5))[torch.device("cpu")] == 1


def test_max_norm_must_be_above_zero(three):
    optimizer = DistributedFusedAdam(three)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be above 0"):
            optimizer.clip_grad_norm(bad)


def test_unscale_grads_takes_one_of_two(three):
    optimizer = DistributedFusedAdam(three)
    for arguments in ({}, {"inv_scale": torch.ones(()), "grad_scaler": torch.amp.GradScaler("cpu")}):
        with pytest.raises(ValueError, match="one of the two"):
            optimizer.unscale_grads(**arguments)
    assert optimizer.unscale_grads(grad_scaler=torch.amp.GradScaler("cpu", enabled=False)) == {}


def test_parameters_are_found_by_their_place(three):
    optimizer = DistributedFusedAdam([{"params": three[:2]}, {"params": three[2:]}])
    assert list(optimizer.parameters()) == three
    assert optimizer.parameter(0, 1) is three[1]
    assert optimizer.parameter(1, 0) is three[2]


def test_what_apex_lays_out_by_hand_is_laid_out_already(three):
    optimizer = DistributedFusedAdam(three)
    for initialise in (optimizer.init_params, optimizer.init_params_bucket, optimizer.try_grad_sync):
        initialise(three[0])
        initialise(three)
        with pytest.raises(ValueError, match="not trained by this optimizer"):
            initialise([nn.Parameter(torch.zeros(2))])
    optimizer.init_params()
    optimizer.init_param_buffer()
    optimizer.param_sync()
    with pytest.raises(ValueError, match="say it to the constructor"):
        optimizer.init_params(three, grad_sync_dtype=torch.bfloat16)
    first, *_, third = sorted(p.data_ptr() for p in three)
    assert third - first < 3 * 64 * three[0].element_size() + three[0].nbytes  # neighbours, by blocks of 64 elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["contiguous_grad_buffer", "capturable"])
def test_grad_buffer_view_is_where_gradients_accumulate(how, dtype):
    weight = nn.Parameter(torch.ones(4, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last))
    optimizer = DistributedFusedAdam([weight], **{how: True})
    view = optimizer.grad_buffer_view(weight)
    assert (view.shape, view.stride(), view.dtype) == (weight.shape, weight.stride(), torch.float32)
    assert hasattr(weight, "main_grad") == (how == "contiguous_grad_buffer")
    for times in (1, 2):
        weight.sum().backward()
        assert torch.equal(view, torch.full_like(view, times))
    optimizer.zero_grad()
    assert torch.equal(view, torch.zeros_like(view))


def test_a_parameter_added_later_has_its_view_too():
    optimizer = DistributedFusedAdam([nn.Parameter(torch.ones(3))], contiguous_grad_buffer=True)
    late = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [late]})
    late.sum().backward()
    assert late.main_grad.data_ptr() == late.grad.data_ptr()
    assert torch.equal(late.main_grad, torch.ones(5))


def test_without_a_buffer_there_is_no_view(three):
    with pytest.raises(RuntimeError, match="contiguous_grad_buffer"):
        DistributedFusedAdam(three).grad_buffer_view(three[0])


def test_what_is_written_to_main_grad_is_stepped_with_zero_fill_unused():
    used, fused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = DistributedFusedAdam([used, fused], lr=0.1, contiguous_grad_buffer=True, zero_fill_unused=True)
    used.register_hook(lambda _: fused.main_grad.add_(1.0))  # as a kernel does that adds its gradient by itself
    used.sum().backward()
    optimizer.step()
    torch.testing.assert_close(fused.detach(), torch.full((3,), -0.1))
