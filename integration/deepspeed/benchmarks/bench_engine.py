"""Training steps of our engine and of DeepSpeed's, with the same config, on two ranks of one machine.

    python bench_engine.py [--dtype bf16] [--layers 8] [--width 512] [--rounds 5] [--stages 1 2 3]

DeepSpeed takes part where it is installed (`nox -s "engines(deepspeed)"` makes such an environment). All train in
the same two processes, each a GPT of its own, in turns of three iterations, so that noise hits all alike. Printed are
medians over the turns: tokens a second, the time of `engine.step()`, and the bytes of tensors that a rank holds between
two steps. DeepSpeed steps with its own CPU Adam where it offloads, and with torch's fused AdamW where it doesn't: its
own would have to be built.
"""

import argparse
import contextlib
import gc
import logging
import os
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from statistics import median

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import stepstack_deepspeed

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))
from gpt import GPT

with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
    warnings.simplefilter("ignore")
    try:
        import deepspeed
        import deepspeed.runtime.zero.muon.original_muon  # once, before ranks are forked
    except ImportError:
        deepspeed = None

RANKS, SEQUENCES, CONTEXT, TURN = 2, 2, 64, 3
ADAM = {"lr": 1e-4, "weight_decay": 0.1}
BUCKET = 10_000_000  # DeepSpeed's own 500 million would all be allocated


def config_of(stage, offload, dtype):
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = BUCKET
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-4}},
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
    }


def ours(model, config):
    return stepstack_deepspeed.initialize(model=model, config=config)[0]


def stock(model, config):
    deepspeed.utils.logger.setLevel(logging.ERROR)
    for name in deepspeed.ops.__compatible_ops__:
        if "shm" in name:  # an all-reduce through shared memory, which it would build now
            deepspeed.ops.__compatible_ops__[name] = False
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(RANKS)}
    deepspeed.init_distributed("gloo")
    if "offload_optimizer" in config["zero_optimization"]:
        return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


ENGINES = {"stepstack": ours} | ({} if deepspeed is None else {"DeepSpeed": stock})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=(2, 3))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (Path(folder, "store"), options), nprocs=RANKS, start_method="fork")


def run(rank, store, options):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    engines, held = {}, {}
    for stage in options.stages:
        for offload in (False, True):
            for name, make in ENGINES.items():
                torch.manual_seed(0)
                before = bytes_of_tensors()
                model = GPT(layers=options.layers, width=options.width, heads=8, context=CONTEXT).to(dtype)
                size = sum(p.numel() for p in model.parameters())
                engines[stage, offload, name] = engine = make(model, config_of(stage, offload, options.dtype))
                turn(engine)
                held[stage, offload, name] = (bytes_of_tensors() - before) / size
    times = {way: [] for way in engines}
    for _ in range(options.rounds):
        for way, engine in engines.items():
            times[way].append(turn(engine))
    if rank == 0:
        report(options, size, held, times)
    dist.barrier()
    dist.destroy_process_group()


def turn(engine):
    """Seconds of a whole iteration, and of its `engine.step()`."""
    steps = []
    dist.barrier()
    start = time.perf_counter()
    for _ in range(TURN):
        text = torch.randint(256, (SEQUENCES, CONTEXT + 1))
        logits = engine(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        engine.backward(loss)
        dist.barrier()
        backward_is_over = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - backward_is_over)
    dist.barrier()
    return (time.perf_counter() - start) / TURN, sum(steps) / TURN


def bytes_of_tensors():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def report(options, size, held, times):
    tokens = RANKS * SEQUENCES * CONTEXT
    whole = {way: median(t for t, _ in rounds) for way, rounds in times.items()}
    step = {way: median(t for _, t in rounds) for way, rounds in times.items()}
    versions = f"torch {torch.__version__}" + ("" if deepspeed is None else f", DeepSpeed {deepspeed.__version__}")
    print(f"{date.today()}, {versions}, {os.cpu_count()} cores, {RANKS} ranks, gloo")
    print(f"GPT of {size / 1e6:.1f} M parameters, {options.dtype}, {tokens} tokens, {options.rounds} turns each")
    print("" if deepspeed else "DeepSpeed is not installed.\n")
    print("| stage | offload | engine | tokens/s | ratio | step | ratio | bytes a parameter |")
    print("|---|---|---|---|---|---|---|---|")
    for stage, offload, name in times:
        way, base = (stage, offload, name), (stage, offload, list(ENGINES)[-1])
        print(
            f"| {stage} | {'CPU' if offload else 'none'} | {name} | {tokens / whole[way]:.0f} "
            f"| {whole[base] / whole[way]:.2f} | {step[way] * 1000:.0f} ms | {step[base] / step[way]:.2f} "
            f"| {held[way]:.1f} |"
        )


if __name__ == "__main__":
    main()
