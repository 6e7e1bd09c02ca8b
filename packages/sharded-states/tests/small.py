"""A few small parameters, a sharded optimizer of them, its steps and its checkpoints."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from stepstack_sharded_states import ShardedLoadPlanner, ShardedOptimizer


def params_of(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def make(params, optimizer_class=torch.optim.AdamW, **options):
    if optimizer_class is torch.optim.AdamW:
        options.setdefault("fused", True)
    return ShardedOptimizer(params.items(), optimizer_class, lr=0.1, bucket_cap_mb=0.001, **options)


def step(params, optimizer, times=1):
    for _ in range(times):
        sum((p.pow(2) * (i + 1)).sum() for i, p in enumerate(params.values())).backward()
        optimizer.step()
        optimizer.zero_grad()


def load(optimizer, folder):
    state_dict = optimizer.sharded_state_dict()
    dcp.load(state_dict, checkpoint_id=folder, planner=ShardedLoadPlanner())
    optimizer.load_sharded_state_dict(state_dict)
