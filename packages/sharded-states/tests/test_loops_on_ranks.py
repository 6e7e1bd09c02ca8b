"""The loops that trainers have, in their shape: a sharded optimizer ends in them where torch's ends.

Lightning and Accelerate themselves aren't here. These are the calls they make, in their order: Lightning hands a
closure to `optimizer.step`, in which it runs the model, zeroes gradients, calls backward and clips what is in
`param_groups`; Accelerate loads an optimizer's own state into it, wraps its `step`, and unscales, clips and steps on
the last of some micro-batches only.
"""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

STEPS, MICROS, MAX_NORM = 3, 3, 0.05


class Training:
    """A model, its optimizer, sharded or torch's, and the data of this rank, or of all."""

    def __init__(self, rank):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3))
        self.ranks = (0, 1) if rank is None else (rank,)
        options = {"lr": 0.05, "weight_decay": 0.1, "fused": True}
        if rank is None:
            self.optimizer, self.no_sync = torch.optim.AdamW(self.model.parameters(), **options), nullcontext
        else:
            self.optimizer = ShardedOptimizer(
                self.model.named_parameters(), torch.optim.AdamW, bucket_cap_mb=2e-4, **options
            )
            self.no_sync = self.optimizer.no_sync

    def loss(self, step, micro):
        seeds = [100 * step + 10 * micro + rank for rank in self.ranks]
        data = [torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return self.model(torch.cat(data)).square().mean() / MICROS

    def clip(self):
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)


def lightning(training, syncing, scaler):
    """Its loop over batches, with automatic optimization and `accumulate_grad_batches`."""
    optimizer = training.optimizer
    for step in range(STEPS):
        for micro in range(MICROS):

            def closure(step=step, micro=micro):
                loss = training.loss(step, micro)
                if micro == 0:
                    optimizer.zero_grad()
                scaler.scale(loss).backward()
                return loss

            def clipped_closure(closure=closure):
                loss = closure()
                training.clip()
                return loss

            if micro < MICROS - 1:
                with syncing():
                    closure()
            elif not scaler.is_enabled():
                assert isinstance(optimizer.step(closure=clipped_closure), torch.Tensor)
            else:  # with a scaler it runs the closure itself
                closure()
                scaler.unscale_(optimizer)
                training.clip()
                scaler.step(optimizer)
                scaler.update()


def accelerate(training, syncing, scaler):
    """`with accelerator.accumulate(model):` and what it makes of `backward`, `clip_grad_norm_`, `step`, `zero_grad`."""
    optimizer = training.optimizer
    optimizer.load_state_dict(optimizer.state_dict())
    stepped, step_itself = [], optimizer.step

    def step_noted(*args, **kwargs):
        stepped.append(True)
        return step_itself(*args, **kwargs)

    for step in range(STEPS):
        for micro in range(MICROS):
            last = micro == MICROS - 1
            with nullcontext() if last else syncing():
                scaler.scale(training.loss(step, micro)).backward()
            if last:
                scaler.unscale_(optimizer)
                training.clip()
                optimizer.step = step_noted
                scaler.step(optimizer)
                optimizer.step = step_itself
                scaler.update()
                optimizer.zero_grad()
    assert len(stepped) == STEPS


@pytest.mark.parametrize("loop", [lightning, accelerate])
def test_a_trainer_s_loop_ends_where_it_ends_with_torch_s_optimizer(loop):
    def run(rank, scaled, sync_always=False):
        training = Training(rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        loop(training, nullcontext if sync_always else training.no_sync, scaler)
        return [p.detach().clone() for p in training.model.parameters()]

    ways = [*product((True, False), (True, False))]
    expected = {scaled: run(None, scaled) for scaled in (True, False)}
    for results in on_ranks(2, lambda rank: [run(rank, *way) for way in ways]):
        for (scaled, _), result in zip(ways, results, strict=True):
            for ours, theirs in zip(result, expected[scaled], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
