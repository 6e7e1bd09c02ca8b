"""Stages, precisions, offload, clipping and accumulation, all with all, against plain torch in one process."""

from itertools import product

import pytest
import torch
from plain import DTYPES, RANKS, Trained, batch, config, net, train_plainly, weights

from stepstack_deepspeed import initialize
from stepstack_testing import on_ranks

STEPS = 3
CLIPS = {"binding": 0.1, "loose": 1e4, "off": 0.0}
CASES = list(product(range(4), ("fp32", "bf16", "fp16"), (False, True), CLIPS, (1, 2)))
"""Stage, dtype, offload, clipping, accumulation."""

NORM = {"fp32": 1e-6, "bf16": 5e-4, "fp16": 5e-4}
"""Of itself."""
UPDATE = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 2e-3}
"""How far apart two ends may be, as a part of the way from the start: gradients of 8 or 11 bits are summed in another
order, and what they say of a small one is rounded."""


@pytest.fixture(scope="module")
def trained():
    """All in one launch: an engine takes less time than starting ranks for it."""
    first, _ = on_ranks(RANKS, lambda rank: [train(rank, *case) for case in CASES], timeout=60.0)
    return dict(zip(CASES, first, strict=True))


@pytest.fixture(scope="module")
def plainly_trained():
    return {
        case: train_plainly(case[0], CLIPS[case[1]], case[2], STEPS)
        for case in product(("fp32", "bf16", "fp16"), CLIPS, (1, 2))
    }


@pytest.mark.parametrize(("stage", "dtype", "offload", "clip", "accumulation"), CASES)
def test_an_engine_trains_as_torch_does(trained, plainly_trained, stage, dtype, offload, clip, accumulation):
    ours, theirs = trained[stage, dtype, offload, clip, accumulation], plainly_trained[dtype, clip, accumulation]
    assert ours.norms == pytest.approx(theirs.norms, rel=NORM[dtype])
    assert (ours.norms[0] > CLIPS[clip] > 0) == (clip == "binding")
    start = net().to(DTYPES[dtype]).parameters()
    assert distance(ours.params, theirs.params) < UPDATE[dtype] * distance(start, theirs.params)


def train(rank, stage, dtype, offload, clip, accumulation):
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = initialize(
        model=net(),
        config=config(dtype=dtype, clip=CLIPS[clip], accumulation=accumulation, zero_optimization=zero),
    )
    norms = []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(*batch(rank, step, micro)))
            engine.step()
        norms.append(engine.get_global_grad_norm().item())
    return Trained(norms, weights(engine))


def distance(ours, theirs):
    return torch.cat([(a.float() - b.float()).flatten() for a, b in zip(ours, theirs, strict=True)]).norm().item()
