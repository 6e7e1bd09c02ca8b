"""It trains as replicated torch does, whatever way of holding, sending and rounding is asked for."""

import traceback

import pytest
import torch
import torch.distributed as dist

from stepstack_testing import on_ranks

FP32, FP16, BF16 = 1e-6, 2e-3, 2e-2
WAYS = {
    "as it comes": ({}, FP32),
    "L2 decay": ({"adam_w_mode": False, "adam_class": torch.optim.Adam}, FP32),
    "no overlap": ({"overlap_grad_sync": False}, FP32),
    "reduced in each backward": ({"sync_always": True}, FP32),
    "no overlap, reduced at the end of all": ({"overlap_grad_sync": False, "sync_always": True}, FP32),
    "contiguous buffers": ({"contiguous_grad_buffer": True, "contiguous_param_buffer": True}, FP32),
    "contiguous, reduced in each backward": ({"contiguous_grad_buffer": True, "sync_always": True}, FP32),
    "capturable": ({"capturable": True}, FP32),
    "replicas of shards of two": ({"distributed_size": 2}, FP32),
    "replicas only": ({"disable_distributed_parameters": True}, FP32),
    "within nodes": ({"distribute_within_nodes": True}, FP32),
    "fp64 model": ({"dtype": torch.float64}, FP32),
    "fp16 model": ({"dtype": torch.float16}, FP16),
    "bf16 model": ({"dtype": torch.bfloat16}, BF16),
    "bf16 model, bf16 gradients": ({"dtype": torch.bfloat16, "grad_sync_dtype": "bf16"}, BF16),
    "bf16 model, remainders": (
        {"dtype": torch.bfloat16, "param_sync_dtype": "bf16", "store_params": False, "store_param_remainders": True},
        BF16,
    ),
    "bf16 model, remainders, capturable": (
        {"dtype": torch.bfloat16, "store_param_remainders": True, "capturable": True},
        BF16,
    ),
    "bf16 gradients": ({"grad_sync_dtype": torch.bfloat16}, BF16),
    "bf16 moments": ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, BF16),
    "8-bit moments": ({"exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8"}, 5e-2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_trains_as_replicated_torch_does(trained, way, ranks):
    if way == "replicas of shards of two" and ranks == 1:
        pytest.skip("one rank has no neighbour")
    worst = trained(ranks)[way]
    assert isinstance(worst, float), worst
    assert worst < WAYS[way][1]


def test_models_that_are_not_stepped_alike_differ(side_by_side):
    assert on_ranks(1, lambda rank: side_by_side(rank, weight_decay=0.3))[0] > 1e-3


@pytest.fixture(scope="module")
def trained(side_by_side):
    """By number of ranks: by way, the largest difference or a traceback. All ways in one launch: processes are dear."""
    known = {}

    def all_ways(rank):
        differences = {}
        for way, (arguments, _) in WAYS.items():
            if way != "replicas of shards of two" or dist.get_world_size() > 1:
                try:
                    differences[way] = side_by_side(rank, **arguments)
                except Exception:
                    differences[way] = traceback.format_exc()
        return differences

    def on(ranks):
        if ranks not in known:
            per_rank = on_ranks(ranks, all_ways, timeout=30.0)
            known[ranks] = {
                way: max((one[way] for one in per_rank), key=lambda found: (isinstance(found, str), found))
                for way in per_rank[0]
            }
        return known[ranks]

    return on
