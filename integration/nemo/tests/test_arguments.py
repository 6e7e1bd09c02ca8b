"""Each argument of Apex's and NeMo's optimizers means what it means there, or is refused with what to do instead."""

import pytest
import torch
from torch import nn

from stepstack_nemo import DistributedFusedAdam


def params(dtype=torch.float32):
    return [nn.Parameter(torch.ones(4, 3, dtype=dtype)), nn.Parameter(torch.ones(5, dtype=dtype))]


@pytest.mark.parametrize(
    ("arguments", "dtype", "way_out"),
    [
        ({"with_scaled_states": True}, torch.bfloat16, "block8"),
        ({"nccl_ub": True}, torch.float32, "use_mem_pool"),
        ({"pipeline_size": 4}, torch.float32, "leave it out"),
        ({"lock_timeout": 3.0}, torch.float32, "leave it out"),
        ({"device": "cuda"}, torch.float32, "move the model"),
        ({"dtype": "fp16"}, torch.float16, "block8"),
        ({"dtype": torch.float64}, torch.float64, "float32 or bfloat16"),
        ({"dtype": "bfloat61"}, torch.float32, "no dtype"),
        ({"grad_sync_dtype": torch.float64}, torch.float32, "float32, bfloat16 or float16"),
        ({"param_sync_dtype": "bf16"}, torch.float32, "make the model bfloat16"),
        ({"param_sync_dtype": "fp16"}, torch.bfloat16, "make the model bfloat16"),
        ({"param_sync_dtype": torch.uint8}, torch.bfloat16, "make the model bfloat16"),
        ({"store_param_remainders": True, "store_params": True}, torch.bfloat16, "without store_params"),
        ({"store_param_remainders": True, "dtype": "bf16"}, torch.bfloat16, "dtype=float32"),
        ({"distributed_size": 0}, torch.float32, "1 or more"),
    ],
)
def test_what_it_does_not_do_is_refused_with_a_way_out(arguments, dtype, way_out):
    with pytest.raises(ValueError, match=way_out):
        DistributedFusedAdam(params(dtype), **arguments)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"param_sync_dtype": "bf16"}, torch.bfloat16),
        ({"param_sync_dtype": torch.float32}, torch.bfloat16),
        ({"param_sync_dtype": torch.int64}, torch.float32),
        ({"device": "cpu", "pipeline_size": 2, "contiguous_param_buffer": True}, torch.float32),
        ({"dtype": "torch.bfloat16", "grad_sync_dtype": "half"}, torch.float32),
        ({"distribute_within_nodes": True, "distributed_size": 8}, torch.float32),  # one process: nothing to spread
    ],
)
def test_what_comes_to_the_same_is_taken(arguments, dtype):
    optimizer = DistributedFusedAdam(params(dtype), lr=0.5, **arguments)
    sum(p.sum() for p in optimizer.parameters()).backward()
    optimizer.step()
    for p in optimizer.parameters():
        torch.testing.assert_close(p.detach(), torch.full_like(p, 0.5))


def test_the_first_eight_arguments_are_in_apexs_order():
    optimizer = DistributedFusedAdam(params(), 0.1, False, (0.5, 0.6), 0.3, False, 0.2, True)
    group = optimizer.param_groups[0]
    assert [group[key] for key in ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad")] == [
        0.1,
        False,
        (0.5, 0.6),
        0.3,
        0.2,
        True,
    ]
    assert not group["decoupled_weight_decay"]


@pytest.mark.parametrize(
    ("arguments", "dtype", "bytes_per_element"),
    [
        ({}, torch.float32, 8),
        ({}, torch.bfloat16, 12),
        ({"store_params": False}, torch.bfloat16, 8),
        ({"store_param_remainders": True}, torch.bfloat16, 10),
        ({"dtype": "bf16"}, torch.bfloat16, 4),
        ({"exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8", "store_params": False}, torch.bfloat16, 2.125),
    ],
)
def test_states_take_what_the_dtypes_say(arguments, dtype, bytes_per_element):
    optimizer = DistributedFusedAdam([nn.Parameter(torch.ones(64, 64, dtype=dtype))], **arguments)
    next(optimizer.parameters()).sum().backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    held = sum(value.numel() * value.element_size() for name, value in state.items() if name != "step")
    assert held == 64 * 64 * bytes_per_element


def test_gradients_are_held_in_the_dtype_of_the_states_unless_said_otherwise():
    for arguments, expected in (({}, torch.float32), ({"grad_sync_dtype": "bf16"}, torch.bfloat16)):
        optimizer = DistributedFusedAdam(params(torch.bfloat16), **arguments)
        sum(p.sum() for p in optimizer.parameters()).backward()
        assert {grad.dtype for grad in optimizer.grad_shards()} == {expected}


def test_unused_and_frozen_parameters_are_skipped_as_torch_does_or_filled_with_zeros_as_apex_does():
    for zero_fill in (False, True):
        used, unused, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = DistributedFusedAdam([used, unused, frozen], lr=0.1, weight_decay=0.5, zero_fill_unused=zero_fill)
        used.sum().backward()
        optimizer.step()
        assert torch.equal(frozen, torch.ones(3))
        assert torch.equal(unused, torch.full((3,), 0.95 if zero_fill else 1.0))


def test_a_parameter_that_is_unfrozen_is_added():
    first, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = DistributedFusedAdam([first, late], lr=0.1)
    first.sum().backward()
    optimizer.step()
    late.requires_grad_(True)
    optimizer.add_param_group({"params": [late], "lr": 0.2})
    assert list(optimizer.parameters()) == [first, late]
    (first.sum() + late.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((3,), 0.8))  # its own first step, not the second
    assert optimizer.state_dict()["state"][1]["step"] == 1


def test_nemos_hook_flags_are_heard():
    flagged = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    flagged._with_fp32_optimizer = True
    with pytest.raises(ValueError, match="set grad_sync_dtype to float32"):
        DistributedFusedAdam([flagged], grad_sync_dtype="bf16")
    DistributedFusedAdam([flagged])


def test_a_closure_gives_its_loss_in_a_skipped_step_too():
    p = nn.Parameter(torch.ones(3))
    optimizer = DistributedFusedAdam([p])

    def closure():
        loss = p.sum() * torch.inf
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        return loss

    assert optimizer.step(closure) == torch.inf
    assert torch.equal(p, torch.ones(3))
