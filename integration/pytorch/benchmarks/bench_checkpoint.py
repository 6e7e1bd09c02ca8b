"""Saving and loading a checkpoint on two ranks of one machine: ours, and others' ways, side by side in one run.

    python bench_checkpoint.py [--layers 8] [--width 512] [--rounds 3] [--folder /tmp]

Every way saves and loads an fp32 GPT and its two moments, in turns, on the same disk. Printed are medians: MB of
weights and moments a second, and how much a rank's memory (resident pages, as the kernel counts) rises above what it
was. A save ends when all is on the disk, for every way: where one leaves that to the kernel, the benchmark asks for it.
Loading comes from the page cache. The floor is a plain file for each rank, from memory and back. DeepSpeed takes part
where it is installed.
"""

import argparse
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from statistics import median

import engines
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stepstack import async_save_checkpoint, load_checkpoint, save_checkpoint
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))
from gpt import GPT

RANKS, CONTEXT = 2, 64
ADAM = {"lr": 1e-4, "weight_decay": 0.1}


class Sharded:
    """A `ShardedOptimizer` with `save_checkpoint`."""

    def __init__(self, model):
        self.model, self.optimizer = model, ShardedOptimizer(model.named_parameters(), FusedAdamW, **ADAM)

    def train(self, text):
        self.model.loss(text).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder):
        save_checkpoint(folder, model=self.model, optimizer=self.optimizer, step=1)

    def load(self, folder):
        load_checkpoint(folder, model=self.model, optimizer=self.optimizer)


class ShardedBesideTraining(Sharded):
    """The same, with `async_save_checkpoint`: the time is that until training goes on."""

    def save(self, folder):
        self.pending = async_save_checkpoint(folder, model=self.model, optimizer=self.optimizer, step=1)

    def finish(self):
        self.pending.result()


class Fsdp2(Sharded):
    """FSDP2 and torch's AdamW with `save_checkpoint`."""

    def __init__(self, model):
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def train(self, text):
        logits = self.model(text[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fsdp2ByDcp(Fsdp2):
    """The same with torch.distributed.checkpoint, as its documentation has it."""

    def save(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "step_1")

    def load(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder / "step_1")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Zero:
    """DeepSpeed's ZeRO stage 1 with its own checkpoints."""

    def __init__(self, model):
        self.engine, self.backward, self.step = engines.zero(model, torch.float32, ADAM, stage=1)

    def train(self, text):
        logits = self.engine(text[:, :-1]).flatten(0, 1)
        self.backward(torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten()))
        self.step()

    def save(self, folder):
        self.engine.save_checkpoint(str(folder), tag="step_1")
        to_disk(folder)

    def load(self, folder):
        assert self.engine.load_checkpoint(str(folder), tag="step_1")[0]


class PlainFile:
    """The floor: a rank's share as one file."""

    def __init__(self, model):
        numel = 3 * sum(param.numel() for param in model.parameters()) // RANKS
        self.data = torch.ones(numel).numpy()

    def train(self, text):
        pass

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        self.data.tofile(folder / str(dist.get_rank()))
        to_disk(folder)

    def load(self, folder):
        with (folder / str(dist.get_rank())).open("rb") as file:
            file.readinto(self.data)


WAYS = {
    "stepstack": Sharded,
    "stepstack, async: until training goes on": ShardedBesideTraining,
    "stepstack on FSDP2": Fsdp2,
    "torch.distributed.checkpoint on FSDP2": Fsdp2ByDcp,
    "DeepSpeed ZeRO-1": Zero,
    "a plain file a rank": PlainFile,
}
if "DeepSpeed" in engines.MISSING:
    del WAYS["DeepSpeed ZeRO-1"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to save")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.start_processes(run, (Path(folder), options), nprocs=RANKS, start_method="fork")


def run(rank, folder, options):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    text = torch.randint(256, (1, CONTEXT + 1))
    ways, figures = {}, {name: [] for name in WAYS}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        model = GPT(layers=options.layers, width=options.width, heads=8, context=CONTEXT)
        size = sum(p.numel() for p in model.parameters())
        ways[name] = way(model)
        ways[name].train(text)
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            figures[name].append(turn(way, folder / "run"))
            if number == 0:
                figures[name].clear()  # the first of each warms up
    if rank == 0:
        report(options, 12 * size, figures)
    dist.destroy_process_group()


def turn(way, folder):
    """Seconds and bytes of a save, and of a load."""
    saved = measured(lambda: way.save(folder))
    if hasattr(way, "finish"):
        way.finish()
    loaded = measured(lambda: way.load(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return *saved, *loaded


def to_disk(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def measured(action):
    """Until all ranks are done and the disk is: seconds, and the most that any rank's memory rose, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is kept for later would hide what is taken
    os.sync()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - start
    rise = torch.tensor(resident("VmHWM") - before)
    dist.all_reduce(rise, op=dist.ReduceOp.MAX)
    return seconds, rise.item()


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def report(options, size, figures):
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, {RANKS} ranks, gloo"
    print(f"{date.today()}, {machine}, {options.rounds} turns")
    print(f"GPT of {size / 12e6:.1f} M parameters, fp32: {size / 1e6:.0f} MB of weights and moments\n")
    print("| way | save, MB/s | memory, MB | load, MB/s | memory, MB |")
    print("|---|---|---|---|---|")
    for name, turns in figures.items():
        save, save_rise, load, load_rise = (median(column) for column in zip(*turns, strict=True))
        mb = size / 1e6
        print(f"| {name} | {mb / save:.0f} | {save_rise / 1e6:.0f} | {mb / load:.0f} | {load_rise / 1e6:.0f} |")


if __name__ == "__main__":
    main()
