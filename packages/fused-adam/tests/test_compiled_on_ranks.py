"""Compiled steps in processes that were forked."""

import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_testing import on_ranks


def stepped(rank=None):
    param = torch.nn.Parameter(torch.ones(150, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdamW([param], lr=0.1, master_weights="fp32", backend="compiled")
    optimizer.step()
    return optimizer.state[param]["master_weight"]


def test_a_child_forked_after_a_compiled_step_steps_in_one_thread():
    expected = stepped()
    assert all(torch.equal(master, expected) for master in on_ranks(2, stepped))
