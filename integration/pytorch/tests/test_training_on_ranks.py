"""The demo's model, trained by several ranks as by one process that has plain torch and all of their text."""

from contextlib import nullcontext

import gpt
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

STEPS = 20
SEQUENCES = 12  # of all ranks and micro-batches
MAX_NORM = 0.5  # some of the norms are above, some below
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95)}
MESHES = {"2 ranks": (2,), "4 ranks": (4,), "2 pairs": (2, 2)}


def make_model():
    torch.manual_seed(0)
    return gpt.GPT(**gpt.SIZES["tiny"])


def text_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(256, (SEQUENCES, 33), generator=generator)


def groups_of(model):
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if param.ndim > 1], "weight_decay": 0.1},
        {"params": [(name, param) for name, param in named if param.ndim == 1], "weight_decay": 0.0},
    ]


def flat(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train(rank, shape, accumulation, steps=STEPS):
    """Norms and weights after each step."""
    model = make_model()
    mesh = init_device_mesh("cpu", shape)
    optimizer = ShardedOptimizer(groups_of(model), FusedAdamW, mesh=mesh, bucket_cap_mb=0.02, **OPTIONS)
    optimizer_step = OptimizerStep(optimizer, max_norm=MAX_NORM)
    norms, weights = [], []
    for step in range(steps):
        mine = text_of(step).chunk(dist.get_world_size())[rank]
        for number, micro_batch in enumerate(mine.chunk(accumulation)):
            with optimizer.no_sync() if number < accumulation - 1 else nullcontext():
                (model.loss(micro_batch) / accumulation).backward()
        norms.append(optimizer_step().grad_norm)
        weights.append(flat(model))
    return torch.stack(norms), torch.stack(weights)


@pytest.fixture(scope="module")
def reference():
    """`torch.optim.AdamW` and torch's clipping, in one process."""
    model = make_model()
    optimizer = torch.optim.AdamW(groups_of(model), **OPTIONS)
    norms, weights = [], []
    for step in range(STEPS):
        model.loss(text_of(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(flat(model))
    return torch.stack(norms), torch.stack(weights)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_ranks_train_as_one_process_with_torch_does(reference, shape, accumulation):
    (norms, weights), *others = on_ranks(torch.Size(shape).numel(), train, shape, accumulation)
    for other_norms, other_weights in others:
        assert torch.equal(other_norms, norms)
        assert torch.equal(other_weights, weights)
    assert 0 < (reference[0] > MAX_NORM).sum() < STEPS
    torch.testing.assert_close(norms, reference[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(weights, reference[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_the_same_run_twice_is_bitwise_the_same(shape):
    runs = on_ranks(torch.Size(shape).numel(), lambda rank: [train(rank, shape, 3, steps=5) for _ in range(2)])
    for (norms, weights), (norms_again, weights_again) in runs:
        assert torch.equal(norms, norms_again)
        assert torch.equal(weights, weights_again)
