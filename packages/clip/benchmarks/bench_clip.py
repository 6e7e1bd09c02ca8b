"""Clipping in milliseconds, ours beside torch's, from one run: `python bench_clip.py [--threads 2] [--seconds 3]`.

Rounds go through all contestants in turn and the best of each counts, so that a noisy machine is unfair to none. The
floor is reading the gradients twice and writing them once, at the best rate at which this run saw memory being read;
deferred clipping, where the optimizer takes the coefficient along, reads them once.
"""

import argparse
import os
import platform
import time
from datetime import date

import torch
from torch import nn

from stepstack_clip import clip_coefficient, clip_grad_norm_
from stepstack_gradnorm import total_norm

GPT2 = [(50257, 768), (1024, 768), (768,), (768,)] + 12 * [
    *[(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)],
    *[(768,), (768,), (768,), (768,)],
]
CASES = {
    "GPT-2 124M, fp32": (GPT2, torch.float32),
    "GPT-2 124M, bf16": (GPT2, torch.bfloat16),
    "5,000 of 1,000, fp32": ([(1000,)] * 5000, torch.float32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contestant in each case")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = f"{arguments.threads} threads of {os.cpu_count()} on {platform.machine()}"
    print(f"{date.today()}, {machine}, Python {platform.python_version()}, torch {torch.__version__}")
    for name, (shapes, dtype) in CASES.items():
        compare(name, shapes, dtype, arguments.seconds)


def compare(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, patience: float) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    grads = [torch.randn(shape).to(dtype) for shape in shapes]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    memory = torch.zeros(2**27)  # as large as the largest case, so that nothing is left of it in a cache
    contestants = {
        "stepstack": lambda: clip_grad_norm_(parameters, 1.0),
        "stepstack, deferred": lambda: clip_coefficient(total_norm(grads), 1.0),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        "reading memory": memory.sum,
    }
    times = {way: [0.0] for way in contestants}
    while min(map(sum, times.values())) < patience:
        for way, run in contestants.items():
            if sum(times[way]) < patience:
                start = time.perf_counter()
                run()
                times[way].append(time.perf_counter() - start)
    best = {way: min(measured[1:]) for way, measured in times.items()}
    floor = 3 * sum(grad.nbytes for grad in grads) * best.pop("reading memory") / memory.nbytes
    print(f"\n| {name} | ms | of the floor, {1e3 * floor:.1f} ms | torch ÷ it |\n|---|---|---|---|")
    for way, seconds in best.items():
        print(f"| {way} | {1e3 * seconds:.1f} | {seconds / floor:.2f} | {best['torch'] / seconds:.2f} |")


if __name__ == "__main__":
    main()
