"""Steps in milliseconds, ours beside others, from one run: `python bench_adam.py [part …] [--threads 2]`.

Rounds go through all contestants in turn, so that a noisy machine is unfair to none; the best and the median time of
each are shown. The floor of a step is the bytes that it must move, at the best rate at which this run saw memory being
streamed. DeepSpeed's sequence takes part where deepspeed is installed, with DS_ACCELERATOR=cpu.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec

import torch

from stepstack_fused_adam import FusedAdamW

MASTERS = {"master_weights": "fp32"}
REMAINDERS = {"master_weights": "remainder"}
CODES = {"exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8"}
WARM_UP = """
import time, torch
from stepstack_fused_adam import FusedAdamW
optimizer = FusedAdamW([torch.nn.Parameter(torch.zeros(999).bfloat16())], master_weights="fp32", backend="compiled")
start = time.perf_counter()
optimizer.warm_up()
print(f"{time.perf_counter() - start:.1f}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="of the benchmark; all of them if there is none")
    parser.add_argument("--numel", type=int, default=2**26)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parts = {
        "mixed": lambda: mixed(arguments.numel, arguments.rounds),
        "narrow": lambda: narrow(arguments.numel // 4, arguments.rounds),
        "single": lambda: single(arguments.numel // 2, arguments.rounds),
        "gpt2": lambda: gpt2(arguments.rounds),
        "many": lambda: many(arguments.rounds),
        "compile": compilations,
    }
    if unknown := set(arguments.parts) - parts.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}, only {', '.join(parts)}")
    for part in arguments.parts or parts:
        parts[part]()


def mixed(numel: int, rounds: int) -> None:
    """bf16 parameters and gradients with fp32 masters: norm, clip and step."""
    ours, grad = bf16(numel, **MASTERS)
    (param,) = ours.param_groups[0]["params"]

    def norm_clip_step() -> None:
        norm = norm_of(grad)
        ours.grad_scale = (norm / 1.0).clamp(min=1)
        ours.found_inf = (~norm.isfinite()).float()
        ours.step()

    contestants = {"ours: norm, clip, step": norm_clip_step, "ours: step alone": ours.step}
    contestants["torch: upcast, norm, clip, fused step, downcast"] = torchs_sequence(param, grad)
    if find_spec("deepspeed"):
        contestants["deepspeed: upcast, norm, clip, CPU Adam, downcast"] = deepspeeds_sequence(param, grad)
    else:
        print("deepspeed is not installed, so its sequence does not take part")
    contestants["stream"] = stream = streaming(numel)
    ours.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours.step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    times = race(contestants, rounds)
    floor = 30 / 12 * min(times.pop("stream"))
    show(f"{numel / 2**20:.0f}M bf16 parameters, fp32 masters", times)
    print(
        f"  floor of the step {floor:.1f} ms, the step is {min(times['ours: step alone']) / floor:.2f} of it;", end=" "
    )
    print(f"a later step takes {100 * grown / (12 * numel):.2f} % of the states in new memory")
    del stream


def narrow(numel: int, rounds: int) -> None:
    """What saving memory costs."""
    forms = {"fp32 masters": MASTERS, "remainders": REMAINDERS, "fp32 masters, 8-bit moments": {**MASTERS, **CODES}}
    forms["remainders, 8-bit moments"] = {**REMAINDERS, **CODES}
    steps = {}
    for name, options in forms.items():
        optimizer, _ = bf16(numel, **options)
        optimizer.warm_up()
        optimizer.step()
        state = next(iter(optimizer.state.values()))
        size = sum(tensor.nbytes for tensor in state.values())
        steps[f"{name}: {2 + size / numel:.2f} bytes a parameter"] = optimizer.step
    show(f"{numel / 2**20:.0f}M bf16 parameters", race(steps, rounds))


def single(numel: int, rounds: int) -> None:
    """Pure fp32."""
    params = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    steps = {"ours": FusedAdamW(params[:1]).step, "torch fused": torch.optim.AdamW(params[1:], fused=True).step}
    show(f"{numel / 2**20:.0f}M fp32 parameters", race(steps, rounds))


def gpt2(rounds: int) -> None:
    """GPT-2 small as its own 148 tensors, and as one buffer; torch's, in fp32, beside it."""
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,)]
    block += [(3072, 768), (768,)]
    shapes = [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]
    numels = [torch.Size(shape).numel() for shape in shapes]
    flat, grad = torch.zeros(sum(numels), dtype=torch.bfloat16), torch.ones(sum(numels), dtype=torch.bfloat16)
    one = [torch.nn.Parameter(flat)]
    one[0].grad = grad
    separate = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    pieces = [torch.nn.Parameter(piece) for piece in flat.clone().split(numels)]
    for param, part in zip(separate, grad.split(numels), strict=True):
        param.grad = part.view(param.shape).clone()
    for param, part in zip(pieces, grad.clone().split(numels), strict=True):
        param.grad = part
    steps = {
        name: FusedAdamW(params, **MASTERS).step
        for name, params in {"one buffer": one, "148 pieces of one": pieces, "148 tensors": separate}.items()
    }
    show(f"GPT-2, {sum(numels) / 1e6:.0f}M bf16 parameters, fp32 masters", race(steps, rounds))
    del steps
    wide = {"one buffer": one, "148 tensors": separate}
    for name, params in wide.items():
        wide[name] = [torch.nn.Parameter(param.detach().float()) for param in params]
        for param in wide[name]:
            param.grad = torch.ones_like(param)
    steps = {name: torch.optim.AdamW(params, fused=True).step for name, params in wide.items()}
    show("torch fused, the same in fp32", race(steps, rounds))


def many(rounds: int) -> None:
    """Small tensors."""
    both = [[torch.nn.Parameter(torch.zeros(1000)) for _ in range(5000)] for _ in range(2)]
    for params in both:
        for param in params:
            param.grad = torch.ones_like(param)
    steps = {"ours": FusedAdamW(both[0]).step, "torch fused": torch.optim.AdamW(both[1], fused=True).step}
    show("5,000 fp32 tensors of 1,000 elements", race(steps, rounds))


def compilations() -> None:
    """How long the compiler takes, and for how many sizes it is asked."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-c", WARM_UP]
        cold, warm = (subprocess.check_output(command, env=environment, text=True).strip() for _ in range(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for numel in range(1000, 1050):
        param = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        FusedAdamW([param], lr=numel, backend="compiled", **MASTERS).step()
    asked = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"\ncompiling takes {cold} s, {warm} s from a warm cache; {asked} compilations for 50 sizes")


def bf16(numel: int, **options: object) -> tuple[FusedAdamW, torch.Tensor]:
    param = torch.nn.Parameter(torch.randn(numel).bfloat16())
    param.grad = torch.randn(numel).bfloat16()
    return FusedAdamW([param], **options), param.grad


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """By stepstack-gradnorm if it is here, else torch's."""
    if find_spec("stepstack_gradnorm"):
        from stepstack_gradnorm import total_norm

        return total_norm([grad])
    return torch.linalg.vector_norm(grad, dtype=torch.float32)


def torchs_sequence(param: torch.Tensor, grad: torch.Tensor):
    master = param.detach().float()
    exp_avg, exp_avg_sq, count = torch.zeros_like(master), torch.zeros_like(master), torch.zeros(())
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

    def step() -> None:
        wide = grad.float()
        norm = wide.norm()  # a bf16 norm in fp32 arithmetic takes three times as long as both
        wide.mul_((1 / (norm + 1e-6)).clamp(max=1))
        count.add_(1)
        torch._fused_adamw_(
            [master], [wide], [exp_avg], [exp_avg_sq], [], [count], amsgrad=False, maximize=False, **numbers
        )
        param.detach().copy_(master)

    return step


def deepspeeds_sequence(param: torch.Tensor, grad: torch.Tensor):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    master = torch.nn.Parameter(param.detach().float())
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, weight_decay=0.01)
    wide = torch.empty_like(master)

    def step() -> None:
        wide.copy_(grad)
        norm = wide.norm()
        wide.mul_(1 / (norm + 1e-6).clamp(min=1))
        master.grad = wide
        optimizer.step()
        param.detach().copy_(master)

    return step


def streaming(numel: int):
    """Moves 12 bytes an element: reads two fp32 numbers, writes one."""
    one, other, out = torch.ones(numel), torch.ones(numel), torch.ones(numel)
    return lambda: torch.add(one, other, out=out)


def race(contestants, rounds: int) -> dict[str, list[float]]:
    """The times of each, in milliseconds."""
    times = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            if turn:  # the first makes states, and compiles
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def show(title: str, times: dict[str, list[float]]) -> None:
    """The best time and the median, and how many times as long as the first's each is."""
    firsts = next(iter(times.values()))
    print(f"\n{title}\n      best           median")
    for name, each in times.items():
        best, median = min(each), statistics.median(each)
        print(f"  {best:8.1f} ms {best / min(firsts):5.2f} x", end=" ")
        print(f"{median:8.1f} ms {median / statistics.median(firsts):5.2f} x  {name}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
