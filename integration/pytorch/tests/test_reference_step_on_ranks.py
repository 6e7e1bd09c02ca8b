"""The plain step of docs/examples/reference_step.py trains as `OptimizerStep` and `ShardedOptimizer` do."""

import pytest
import torch
from reference_step import ReferenceStep

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SCALE = {"growth_interval": 3}
MAX_NORM = 0.2  # some of the norms are above, some below
OVERFLOW = 4  # the step of which one rank's gradient is not finite


def make_model(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).to(dtype)


def loss_of(model, rank, number, dtype):
    generator = torch.Generator().manual_seed(10 * number + rank)
    loss = model(torch.randn(8, 16, generator=generator).to(dtype)).float().square().mean() / (1 + number)
    return loss * (float("inf") if number == OVERFLOW and rank == 0 else 1)


def train(rank, dtype):
    """For each of the two, by step: weights, norm, whether it was skipped, and the loss scale after it."""
    plain, model = make_model(dtype), make_model(dtype)
    reference = ReferenceStep(plain.parameters(), max_norm=MAX_NORM, bucket_numel=200, **ADAM, **SCALE)
    masters = {"inner_dtype": torch.float32} if dtype == torch.bfloat16 else {}
    optimizer = ShardedOptimizer(model.named_parameters(), FusedAdamW, bucket_cap_mb=0.001, **masters, **ADAM)
    scaler = GradScaler("cpu", **SCALE)
    optimizer_step = OptimizerStep(optimizer, max_norm=MAX_NORM, scaler=scaler)
    theirs, ours = [], []
    for number in range(10):
        (loss_of(plain, rank, number, dtype) * reference.loss_scale).backward()
        norm, skipped = reference()
        theirs.append((weights_of(plain), norm, skipped, reference.loss_scale))
        scaler.scale(loss_of(model, rank, number, dtype)).backward()
        result = optimizer_step()
        ours.append((weights_of(model), result.grad_norm, bool(result.skipped), scaler.get_scale()))
    return theirs, ours


def weights_of(model):
    return torch.cat([param.detach().flatten().float() for param in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 with masters"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_step_trains_as_the_product(ranks, dtype):
    for theirs, ours in on_ranks(ranks, train, dtype):
        assert [skipped for _, _, skipped, _ in ours] == [number == OVERFLOW for number in range(10)]
        clipped = {bool(norm > MAX_NORM) for _, norm, skipped, _ in theirs if not skipped}
        assert clipped == {True, False}
        for (plain, plain_norm, *plain_said), (weights, norm, *said) in zip(theirs, ours, strict=True):
            assert said == plain_said
            torch.testing.assert_close(norm, plain_norm, rtol=1e-6, atol=0, equal_nan=True)
            torch.testing.assert_close(weights, plain, rtol=0, atol=1e-6)
