"""What a step costs, counted: it doesn't depend on the number of parameters."""

import torch

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import HostSyncs, Operations, on_ranks


def test_a_sharded_step_never_waits_and_dispatches_as_much_for_ten_times_the_parameters():
    def cost(rank, count):
        params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(count // 2)]
        gains = [torch.nn.Parameter(torch.ones(4)) for _ in range(count // 2)]
        optimizer = ShardedOptimizer(
            [{"params": params, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}], FusedAdamW
        )
        scaler = GradScaler("cpu")
        optimizer_step = OptimizerStep(optimizer, max_norm=1.0, scaler=scaler, lr_scheduler=lambda steps: 0.5**steps)
        for _ in range(3):
            scaler.scale(sum(param.square().sum() for param in params + gains)).backward()
            with Operations() as operations, HostSyncs() as syncs:
                optimizer_step()
        return dict(operations), list(syncs)

    def costs(rank):
        return cost(rank, 100), cost(rank, 1000)

    for (few, syncs), (many, many_syncs) in on_ranks(2, costs):
        assert syncs == many_syncs == []
        assert few == many
        collectives = {name: count for name, count in few.items() if name.startswith("c10d.")}
        # One bucket's slices come from their two owners; one reduction of the norm, of which everybody makes the flag.
        assert collectives == {"c10d.broadcast_": 2, "c10d.allreduce_": 1}
