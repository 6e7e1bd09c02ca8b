"""Ours and torch's scaler and AdamW in every combination, each of which keeps torch's contract between the two."""

import math

import pytest
import torch
import torch.distributed as dist

from stepstack import OptimizerStep
from stepstack_clip import clip_coefficient
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_gradnorm import grads_of, total_norm
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import HostSyncs, on_ranks

SCALERS = {"torch's scaler": torch.amp.GradScaler, "our scaler": GradScaler}
ADAMS = {"torch's AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}


def adam_alone(params, adam):
    return adam(params, lr=0.1, fused=True)


def sharded_adam(params, adam):
    return ShardedOptimizer(params, adam, lr=0.1, fused=True)


def scaler_step(optimizer, scaler):
    """The scaler's own `step`, with clipping as one number."""

    def step():
        sharded = isinstance(optimizer, ShardedOptimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        norm = total_norm(optimizer.grad_shards() if sharded else grads_of(params)) / scaler.scale(torch.ones(()))
        optimizer.grad_scale = 1 / clip_coefficient(norm, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def optimizer_step(optimizer, scaler):
    return OptimizerStep(optimizer, max_norm=1.0, scaler=scaler)


@pytest.mark.parametrize("make_step", [scaler_step, optimizer_step])
@pytest.mark.parametrize("make_optimizer", [adam_alone, sharded_adam])
@pytest.mark.parametrize("adam", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("scaler_class", SCALERS.values(), ids=SCALERS)
def test_an_inf_on_one_rank_skips_the_step_on_all(scaler_class, adam, make_optimizer, make_step):
    def run(rank, batches):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 5), (70,), ())]
        optimizer = make_optimizer(params, adam)
        scaler = scaler_class("cpu", init_scale=2.0**10)
        step = make_step(optimizer, scaler)
        snapshots = []
        for batch in batches:
            generator = torch.Generator().manual_seed(2 * (batch or 0) + rank)
            loss = sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params)
            if batch is None and rank == 1:
                loss = loss + params[1][3] * math.inf
            scaler.scale(loss).backward()
            if make_optimizer is adam_alone:  # what DistributedDataParallel does
                for param in params:
                    dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
            with HostSyncs() as syncs:
                step()
            assert syncs == []
            states = getattr(optimizer, "local_state_dict", optimizer.state_dict)()["state"]
            values = {(i, key): value for i, state in states.items() for key, value in state.items()}
            values |= dict(enumerate(params)) | {"scale": torch.tensor(scaler.get_scale())}
            snapshots.append({name: value.detach().clone() for name, value in values.items()})
        return snapshots

    def run_both(rank):
        return run(rank, [1, None, 2]), run(rank, [1, 2])

    for (first, skipped, last), (reference_first, reference_last) in on_ranks(2, run_both):
        assert first.pop("scale") == 2.0**10
        assert skipped.pop("scale") == last.pop("scale") == 2.0**9  # it backed off, and once
        assert reference_first.pop("scale") == reference_last.pop("scale") == 2.0**10
        assert_same(first, reference_first)
        assert_same(skipped, first)  # nothing has changed
        assert_same(last, reference_last)  # and it goes on as if it had not been
        assert not torch.equal(last[0], first[0])


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
