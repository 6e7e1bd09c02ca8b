"""What tests share: a model, trained side by side with a replica; and a trainer beside NeMo.

The model is y = Σ (i + 1)·pᵢ·x. Its parameters take turns in two groups and are cut by slices.
"""

import os
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepstack_nemo
from stepstack_nemo import DistributedFusedAdam

ADAM = {"betas": (0.1, 0.2), "eps": 0.25, "weight_decay": 0.1}
BUCKET = 71 * 4 / 2**20  # MiB: buckets of about 71 elements, parameters of 7


class Interleaved(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.rand(1, 7, generator=generator) for _ in range(11)]
        self.params = nn.ParameterList(nn.Parameter(value.to(dtype)) for value in values)

    def forward(self, x):
        return sum((i + 1) * param * x for i, param in enumerate(self.params))

    def groups(self):
        params = list(self.params)
        return [{"params": params[::2], "lr": 0.05}, {"params": params[1::2], "lr": 0.2}]


def batch(step, micro, rank, dtype=torch.float32):
    """An input and what its output is multiplied by, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x, dy = (torch.rand(5, 7, generator=generator) - 0.5 for _ in range(2))
    return x.to(dtype).requires_grad_(), dy.to(dtype)


class Replicated:
    """The reference: fp32 weights on every rank, averaged gradients, torch's Adam, a copy in the model's dtype."""

    def __init__(self, dtype=torch.float32, adam_class=torch.optim.AdamW):
        self.model, master = Interleaved(dtype), torch.promote_types(dtype, torch.float32)
        groups = self.model.groups()
        self.pairs = [(param, param.detach().to(master, copy=True)) for group in groups for param in group["params"]]
        masters = iter(weight for _, weight in self.pairs)
        for group in groups:
            group["params"] = [next(masters) for _ in group["params"]]
        self.adam = adam_class(groups, **ADAM)

    def step(self):
        for param, weight in self.pairs:
            weight.grad = param.grad.to(weight.dtype)
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
            param.grad = None
        self.adam.step()
        for param, weight in self.pairs:
            param.data.copy_(weight)


@pytest.fixture(scope="session")
def side_by_side():
    return _side_by_side


def _side_by_side(rank, sync_always=False, adam_class=torch.optim.AdamW, dtype=torch.float32, **arguments):
    """The largest relative difference in outputs, input gradients and parameters, in three steps of three backwards."""
    theirs, model = Replicated(dtype, adam_class), Interleaved(dtype)
    ours = DistributedFusedAdam(model.groups(), bucket_cap_mb=BUCKET, **{**ADAM, **arguments})
    worst = 0.0
    for step in range(3):
        for micro in range(3):
            x, dy = batch(step, micro, rank, dtype)
            their_x = x.detach().clone().requires_grad_()
            y, their_y = model(x), theirs.model(their_x)
            (their_y * dy).sum().backward()
            if micro < 2 and not sync_always:
                with ours.no_sync():
                    (y * dy).sum().backward()
            else:
                (y * dy).sum().backward()
            worst = max(worst, furthest([y, x.grad], [their_y, their_x.grad]))
        ours.step()
        theirs.step()
        ours.zero_grad()
        worst = max(worst, furthest(model.parameters(), theirs.model.parameters()))
    return worst


def furthest(ours, theirs):
    """The largest difference, as a part of the largest number among what it is in."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.fixture(scope="session")
def fit_beside_nemo():
    return _fit_beside_nemo


def _fit_beside_nemo(
    rank,
    ranks,
    make_model,
    *,
    precision="32-true",
    clip=None,
    ours=True,
    steps=8,
    hook=False,
    save_to=None,
    resume=None,
    **more,
):
    """Losses, parameters, loss scale and learning rate after `steps` of Lightning's trainer, which `more` goes to.

    `save_to`: a checkpoint of the end of the second epoch.
    """
    lightning = pytest.importorskip("lightning.pytorch")
    precisions = pytest.importorskip("lightning.pytorch.plugins.precision")
    os.environ |= {  # as torchrun would have it, and Lightning then takes it
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29400",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    lightning.seed_everything(0, verbose=False)
    losses = []

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *_):
            losses.append(float(outputs["loss"]))

        def on_train_epoch_end(self, trainer, module):
            # In the middle of an epoch Lightning would begin its data again, and schedulers keep their max_steps.
            if save_to is not None and trainer.current_epoch == 1:
                trainer.save_checkpoint(save_to)

    plugins, scaler = [], None
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        if ours:
            scaler = stepstack_nemo.GradScaler(1024.0, growth_interval=3, device="cpu")
        plugins, precision = [precisions.MixedPrecision("16-mixed", device="cpu", scaler=scaler)], None
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="stepstack" if ours else "ddp",
        precision=precision,
        plugins=plugins,
        max_steps=steps,
        gradient_clip_val=clip,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    model = make_model(trainer)
    if hook:
        model.configure_gradient_clipping = types.MethodType(stepstack_nemo.configure_gradient_clipping, model)
    trainer.fit(model, ckpt_path=resume)
    values = torch.cat([p.detach().float().contiguous().flatten() for p in model.parameters()])
    return (
        losses,
        values,
        None if scaler is None else scaler.get_scale(),
        float(trainer.optimizers[0].param_groups[0]["lr"]),
    )
