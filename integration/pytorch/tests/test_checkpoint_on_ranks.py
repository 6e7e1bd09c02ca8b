"""A run that is saved on some ranks goes on, on others, as if nothing had been."""

import gpt
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepstack import CheckpointError, OptimizerStep, async_save_checkpoint, load_checkpoint, save_checkpoint
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import RankError, on_ranks

SEQUENCES = 12  # of all ranks
BEFORE, AFTER = 3, 20
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95)}


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return gpt.GPT(**gpt.SIZES["tiny"]).to(dtype)


def groups_of(model):
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if param.ndim > 1], "weight_decay": 0.1},
        {"params": [(name, param) for name, param in named if param.ndim == 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def sharded(mesh=None, dtype=torch.float32, optimizer_class=FusedAdamW, **options):
    model = make_model(dtype)
    mesh = init_device_mesh("cpu", mesh) if mesh else None
    return model, ShardedOptimizer(groups_of(model), optimizer_class, mesh=mesh, **OPTIONS, **options)


def replicated():
    model = DistributedDataParallel(make_model())
    return model, torch.optim.AdamW(groups_of(model), fused=True, **OPTIONS)


def fsdp2(mesh):
    model = make_model()
    for block in (*model.blocks, model):
        fully_shard(block, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)]))
    return model, torch.optim.AdamW(groups_of(model), fused=True, **OPTIONS)


def alone():
    model = make_model()
    return model, torch.optim.AdamW(groups_of(model), fused=True, **OPTIONS)


WAYS = {
    "sharded over 1": (1, lambda: sharded(bucket_cap_mb=0.02)),
    "sharded over 2": (2, lambda: sharded(bucket_cap_mb=0.05, optimizer_class=torch.optim.AdamW, fused=True)),
    "sharded over 3": (3, lambda: sharded(bucket_cap_mb=0.01)),
    "sharded over 2, twice": (4, lambda: sharded((2, 2), bucket_cap_mb=0.02)),
    "DDP over 2": (2, replicated),
    "FSDP2 over 2": (2, lambda: fsdp2((2,))),
    "FSDP2 over 2, twice": (4, lambda: fsdp2((2, 2))),
    "plain AdamW": (1, alone),
}


def train(model, optimizer, steps):
    """The loss of all ranks in each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = OptimizerStep(optimizer, max_norm=0.5)
    losses = []
    for number in steps:
        text = torch.randint(256, (SEQUENCES, 33), generator=torch.Generator().manual_seed(number))
        mine = text.tensor_split(ranks)[rank]
        logits = model(mine[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / ranks


def run_on(way, function, *arguments):
    ranks, make = WAYS[way]
    return on_ranks(ranks, lambda rank: function(*make(), *arguments))[0]


def save(model, optimizer, folder):
    losses = train(model, optimizer, range(BEFORE))
    save_checkpoint(folder, model=model, optimizer=optimizer, step=BEFORE, extra=losses)


def go_on(model, optimizer, folder):
    step, losses, _ = load_checkpoint(folder, model=model, optimizer=optimizer)
    return torch.cat([losses, train(model, optimizer, range(step, step + AFTER))])


@pytest.fixture(scope="module")
def unbroken():
    """The losses of one process with torch's own optimizer."""
    return run_on("plain AdamW", train, range(BEFORE + AFTER))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder that somebody has saved into."""
    folders = {}

    def folder(way):
        if way not in folders:
            folders[way] = tmp_path_factory.mktemp("run")
            run_on(way, save, folders[way])
        return folders[way]

    return folder


@pytest.mark.parametrize("reader", WAYS)
@pytest.mark.parametrize("writer", WAYS)
def test_a_run_goes_on_in_any_other_way(written, unbroken, writer, reader):
    losses = run_on(reader, go_on, written(writer))
    torch.testing.assert_close(losses, unbroken, rtol=0, atol=1e-5)
