"""A training step on two ranks of one machine, ours and others' ways, side by side in one run.

    python bench_step.py [--dtype bf16] [--layers 8] [--width 512] [--rounds 7]

Every way trains a GPT of its own in the same two processes, in turns of three iterations, so that noise hits all alike
and what one leaves to be done under the next forward is counted. Printed are medians over the turns: tokens a second,
the time from the end of backward to the next forward, and the bytes of tensors a rank holds
between two steps (what DDP holds in C++, a copy of the gradients, is not seen). bf16: all but two keep fp32 masters;
DDP and ZeroRedundancyOptimizer train bf16 weights and states as they are, which loses small updates. DeepSpeed and
megatron-core take part where they are installed.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import engines
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))
from gpt import GPT

RANKS, SEQUENCES, CONTEXT, TURN = 2, 2, 64, 3
ADAM = {"lr": 1e-4, "weight_decay": 0.1}


def ours(model, dtype, *, overlap_gather=False, **options):
    if dtype is torch.bfloat16:  # of its own accord it compiles from 16 M elements a rank on
        options["master_weights"] = "fp32"
    optimizer = ShardedOptimizer(model.to(dtype).parameters(), FusedAdamW, **ADAM, **options)
    if overlap_gather:
        optimizer.overlap_gather(model)
    return model, torch.Tensor.backward, OptimizerStep(optimizer, max_norm=1.0)


def ddp(model, dtype):
    model = DistributedDataParallel(model.to(dtype))
    return torchs(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def zero_redundancy(model, dtype):
    model = DistributedDataParallel(model.to(dtype))
    return torchs(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAM))


def fsdp2(model, dtype):
    options = {"mesh": init_device_mesh("cpu", (RANKS,)), "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return torchs(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def torchs(model, optimizer):
    def step():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.Tensor.backward, step


WAYS = {
    "stepstack": ours,
    "stepstack, overlap_gather": partial(ours, overlap_gather=True),
    "stepstack, shard_gradients": partial(ours, shard_gradients=True),
    "DDP + AdamW(fused) + clip": ddp,
    "DDP + ZeroRedundancyOptimizer + clip": zero_redundancy,
    "FSDP2 + AdamW(fused) + clip": fsdp2,
    "DeepSpeed, ZeRO-1": partial(engines.zero, adam=ADAM, stage=1),
    "DeepSpeed, ZeRO-2": partial(engines.zero, adam=ADAM, stage=2),
    "megatron-core, distributed optimizer": partial(engines.megatrons, adam=ADAM),
}
"""Each makes of a model and a dtype: a model to call, what to do with its loss, what to do after that."""
for name in [name for name in WAYS if name.startswith(tuple(engines.MISSING))]:
    del WAYS[name]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (Path(folder, "store"), options), nprocs=RANKS, start_method="fork")


def run(rank, store, options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    trained, held, times = {}, {}, {name: [] for name in WAYS}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        model = GPT(layers=options.layers, width=options.width, heads=8, context=CONTEXT)
        size = sum(p.numel() for p in model.parameters())
        before = bytes_of_tensors()
        trained[name] = way(model, dtype)
        turn(name, trained[name])
        held[name] = (bytes_of_tensors() - before) / size + 4  # the model in fp32 was there before
    for _ in range(options.rounds):
        for name, parts in trained.items():
            times[name].append(turn(name, parts))
    if rank == 0:
        report(options, size, held, times)
    dist.destroy_process_group()


def turn(name, parts):
    """Seconds of a whole iteration, and of its part after backward."""
    model, backward, step = parts
    after_backward = []
    with engines.turn_of_megatron() if name.startswith("megatron") else nullcontext():
        dist.barrier()
        start = time.perf_counter()
        for _ in range(TURN):
            text = torch.randint(256, (SEQUENCES, CONTEXT + 1))
            logits = model(text[:, :-1])
            backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten()))
            dist.barrier()
            backward_is_over = time.perf_counter()
            step()
            after_backward.append(time.perf_counter() - backward_is_over)
        dist.barrier()
    return (time.perf_counter() - start) / TURN, sum(after_backward) / TURN


def bytes_of_tensors():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def report(options, size, held, times):
    tokens = RANKS * SEQUENCES * CONTEXT
    whole = {name: median(t for t, _ in rounds) for name, rounds in times.items()}
    after = {name: median(t for _, t in rounds) for name, rounds in times.items()}
    print(f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, {RANKS} ranks, gloo")
    print(f"GPT of {size / 1e6:.1f} M parameters, {options.dtype}, {tokens} tokens, {options.rounds} turns each")
    print(f"Not installed: {', '.join(engines.MISSING)}.\n" if engines.MISSING else "")
    print(f"| {'way':36} | tokens/s | ratio | after backward | ratio | bytes a parameter |")
    print("|---|---|---|---|---|---|")
    for name in WAYS:
        print(
            f"| {name:36} | {tokens / whole[name]:.0f} | {whole['stepstack'] / whole[name]:.2f} "
            f"| {after[name] * 1000:.0f} ms | {after[name] / after['stepstack']:.2f} | {held[name]:.1f} |"
        )


if __name__ == "__main__":
    main()
