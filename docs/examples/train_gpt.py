"""Train a small GPT, byte by byte, on the source code of Python's own standard library.

    python train_gpt.py                                   # two processes, a few minutes on two CPU cores
    python train_gpt.py --resume runs/gpt --ranks 1       # go on from the newest checkpoint, with its options
    torchrun --nproc-per-node 8 train_gpt.py --size large --dtype bf16

Each process trains on its share of the step's text and holds the whole model, but only its share of Adam's states.
Ctrl-C stops all of them after the same step and leaves a checkpoint, from which any number of processes goes on. What
stepstack does is in `train`, which comes first; the rest is what every training script has. The model and the text are
in gpt.py.
"""

import argparse
import itertools
import math
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, batch, standard_library
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main as torchrun
from tqdm import tqdm

from stepstack import CheckpointError, OptimizerStep, load_checkpoint, save_checkpoint
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer

MAX_NORM = 1.0
READ_EVERY = 10  # steps
VALIDATE_EVERY = 20
SAVE_EVERY = 100
KEPT = ("steps", "batch", "dtype", "size", "seed")  # options that a checkpoint brings along
TIED = ("batch", "size", "seed")  # those without which it would be another run


def train(options):
    """What each process does."""
    rank, ranks, device = join_the_others()
    torch.manual_seed(options.seed)
    model = GPT(**SIZES[options.size]).to(device, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    training_text, validation_text = standard_library()

    # Weights decay, gains don't. The states of both, and of bf16 weights also an fp32 master copy, are cut into as many
    # shares as there are ranks. While `backward` runs, gradients are averaged over the ranks.
    named = list(model.named_parameters())
    optimizer = ShardedOptimizer(
        [
            {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [(name, p) for name, p in named if p.ndim == 1], "weight_decay": 0.0},
        ],
        FusedAdamW,
        lr=3e-3,
        betas=(0.9, 0.95),
        master_weights="fp32" if options.dtype == "bf16" else None,
    )
    schedule = partial(warmup_and_cosine, steps=options.steps)
    optimizer_step = OptimizerStep(optimizer, max_norm=MAX_NORM, lr_scheduler=schedule)

    step, history = 0, {"training": [], "validation": []}
    if options.resume:
        step, extra, _ = load_checkpoint(options.resume, model=model, optimizer=optimizer_step)
        history = extra["history"]
    else:
        history["validation"].append((0, validate(model, validation_text, sequences=2 * options.batch)))

    def save():
        """Every rank writes its share, for any number of ranks to load."""
        extra = {"history": history, "options": {name: getattr(options, name) for name in KEPT}}
        return save_checkpoint(options.out, model=model, optimizer=optimizer_step, step=step, extra=extra, keep=2)

    stop = stop_signal()
    bar = tqdm(total=options.steps, initial=step, unit="step", disable=rank > 0)
    unread, since = [], time.perf_counter()
    while step < options.steps:
        # Which text a step is trained on follows from the step, whatever the number of ranks: each takes its share.
        seed = options.seed * 1_000_000 + step
        whole = batch(training_text, sequences=options.batch, length=model.context, seed=seed)
        loss = model.loss(whole.chunk(ranks)[rank].to(device))
        loss.backward()
        result = optimizer_step()
        step += 1

        # Nothing has waited for the device so far. Reading a number does, so they are read for several steps at once.
        unread.append(torch.stack([loss.detach(), result.grad_norm, optimizer.param_groups[0]["lr"]]))
        if step % READ_EVERY and step < options.steps:
            continue
        history["training"] += mean_over_ranks(torch.stack(unread)).tolist()
        if step % VALIDATE_EVERY == 0 or step == options.steps:
            history["validation"].append((step, validate(model, validation_text, sequences=2 * options.batch)))
        loss, grad_norm, _ = history["training"][-1]
        speed = len(unread) * options.batch * model.context / (time.perf_counter() - since)
        bar.set_postfix_str(f"loss {loss:.3f}, gradient norm {grad_norm:.2f}, {speed:,.0f} tokens/s", refresh=False)
        bar.update(len(unread))
        unread, since = [], time.perf_counter()
        if mean_over_ranks(torch.tensor(float(stop.is_set()), device=device)) > 0:  # one rank's signal stops all
            break
        if step % SAVE_EVERY == 0 and step < options.steps:
            save()
            since = time.perf_counter()
    bar.close()

    checkpoint = save()
    if rank == 0 and step < options.steps:
        print(f"Stopped after step {step} of {options.steps}. To go on: python {sys.argv[0]} --resume {checkpoint}")
    elif rank == 0:
        print(f"\n{model.generate(b'def ', length=400)}\n")
        print("Validation loss {:.2f} → {:.2f} nats per byte".format(*(history["validation"][i][1] for i in (0, -1))))
        print(f"Checkpoint {checkpoint}\nCurves     {draw(history, options.out / 'training.png')}")
    dist.destroy_process_group()


def warmup_and_cosine(applied_steps, *, steps, warmup=40):
    """The learning rate's factor: up a line, down half a cosine. A tensor in, a tensor out: nothing is read."""
    progress = (applied_steps - warmup) / max(1, steps - warmup)
    return torch.where(applied_steps < warmup, (applied_steps + 1) / warmup, 0.5 + 0.5 * torch.cos(math.pi * progress))


@torch.no_grad()
def validate(model, text, *, sequences):
    """The loss on text that isn't trained on, the same text every time, of which each rank takes its share."""
    whole = batch(text, sequences=sequences, length=model.context, seed=0)
    mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
    return mean_over_ranks(model.loss(mine.to(model.embedding.weight.device))).item()


def draw(history, path):
    """Loss, gradient norm and learning rate by step, one below the other, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    losses, norms, rates = zip(*history["training"], strict=True)
    steps = range(1, len(losses) + 1)
    figure, (top, middle, bottom) = plt.subplots(
        3, sharex=True, figsize=(8, 8), height_ratios=(3, 2, 1), layout="constrained"
    )
    top.plot(steps, losses, color="tab:blue", alpha=0.6, linewidth=1, label="training")
    top.plot(*zip(*history["validation"], strict=True), ".-", color="tab:orange", label="validation")
    top.set(title="A GPT learns the standard library", ylabel="loss (nats per byte)")
    middle.plot(steps, norms, color="tab:green", linewidth=1)
    middle.axhline(MAX_NORM, color="black", linestyle=":", label="clipped above")
    middle.set(ylabel="gradient norm", yscale="log")
    middle.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
    middle.minorticks_off()
    bottom.plot(steps, rates, color="tab:red")
    bottom.set(ylabel="learning rate", xlabel="step", ylim=(0, None))
    for axes in (top, middle):
        axes.legend()
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def join_the_others():
    """This process's rank, the number of ranks, and its device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return dist.get_rank(), dist.get_world_size(), device


def mean_over_ranks(x):
    """`x` becomes its mean over the ranks; all of them call this."""
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x


def stop_signal():
    """Set by Ctrl-C, or when torchrun is told to end, in place of what these do otherwise."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def launch(ranks):
    """torchrun, in this process: it starts this script again, once for each rank, and passes signals on to them."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // ranks)))
    try:
        torchrun(["--standalone", f"--nproc-per-node={ranks}", *sys.argv])
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def read_options():
    """The command line; what it leaves open is as in the checkpoint, if one is resumed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--ranks", type=positive, default=torch.cuda.device_count() or 2, help="processes")
    parser.add_argument("--batch", type=positive, default=32, help="sequences in a step, of all ranks together")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="for checkpoints and curves (a new one in runs)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from the newest checkpoint in it, or from it")
    options = parser.parse_args()
    if options.resume:
        try:
            _, extra, checkpoint = load_checkpoint(options.resume)
        except CheckpointError as error:
            parser.error(f"--resume {error}")
        parser.set_defaults(out=checkpoint.parent, **extra["options"])
        options = parser.parse_args()
        for name in TIED:
            if getattr(options, name) != extra["options"][name]:
                parser.error(f"--resume {checkpoint}: it goes on with --{name} {extra['options'][name]} only")
    elif options.out is None:
        options.out = next(folder for folder in folders_like(Path("runs/gpt")) if not any(folder.glob("step_*")))
    elif any(options.out.glob("step_*")):
        parser.error(f"--out {options.out}: it has checkpoints of another run: --resume {options.out}, or say another")
    if "WORLD_SIZE" in os.environ:  # set by torchrun, whose word is final
        options.ranks = int(os.environ["WORLD_SIZE"])
    if options.batch % options.ranks:
        parser.error(f"--batch {options.batch} can't be shared out evenly among {options.ranks} ranks")
    return options


def folders_like(folder):
    """The folder, and ones beside it with numbers."""
    return (folder.with_name(f"{folder.name}-{number}") if number > 1 else folder for number in itertools.count(1))


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


if __name__ == "__main__":
    options = read_options()
    if "RANK" in os.environ:
        train(options)
    else:
        launch(options.ranks)
