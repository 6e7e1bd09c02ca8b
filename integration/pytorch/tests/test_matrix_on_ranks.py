"""Sharded training against the same ranks without sharding: averaged gradients, fp32 masters, torch's AdamW."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from gpt import GPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

STEPS = 10
ADAM = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}
SCALE = 1024.0


class ConvNet(nn.Module):
    """channels_last, 2-d and 3-d."""

    def __init__(self):
        super().__init__()
        self.plane = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.space = nn.Conv3d(1, 4, 2).to(memory_format=torch.channels_last_3d)
        self.out = nn.Linear(8 * 16 + 4 * 8, 3)

    def loss(self, seed):
        torch.manual_seed(seed)
        dtype = self.out.bias.dtype
        image, volume = torch.randn(2, 3, 6, 6, dtype=dtype), torch.randn(2, 1, 3, 3, 3, dtype=dtype)
        image = self.plane(image.to(memory_format=torch.channels_last)).flatten(1)
        return self.out(torch.cat([image, self.space(volume).flatten(1)], 1).tanh()).float().square().mean()


class TiedGPT(GPT):
    def __init__(self):
        super().__init__(layers=2, width=16, heads=2, context=8)

    def loss(self, seed):
        torch.manual_seed(seed)
        return super().loss(torch.randint(256, (2, 9)))


class PartlyUsed(nn.Module):
    """One layer is frozen, one is used every other time only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        self.layers[1].requires_grad_(False)

    def loss(self, seed):
        torch.manual_seed(seed)
        x = torch.randn(3, 9, dtype=self.layers[0].weight.dtype)
        for number, layer in enumerate(self.layers):
            if number != 2 or seed // 1000 % 2:
                x = layer(x).tanh()
        return x.float().square().mean()


MODELS = {"channels_last": ConvNet, "tied GPT": TiedGPT, "partly used": PartlyUsed}
PRECISIONS = {
    "fp32": (torch.float32, None, 2e-6),
    "bf16, master": (torch.bfloat16, "fp32", 5e-2),
    "bf16, remainder": (torch.bfloat16, "remainder", 5e-2),
    "fp16, scaler": (torch.float16, "fp32", 5e-3),
}
"""dtype, master weights, and how far apart two ends may be, as a part of the way from the start: gradients that are
summed in another order, or once for each micro-batch, are rounded differently, by half a unit in the last of 8 or 11
bits."""


def average(gradients):
    """Over the ranks, in the gradients' dtype."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))


def distance(ours, theirs):
    return torch.cat([(a.float() - b.float()).flatten() for a, b in zip(ours, theirs, strict=True)]).norm().item()


def seeds(rank, accumulate):
    return [[1000 * step + 10 * micro + rank for micro in range(accumulate)] for step in range(STEPS)]


def make(model, dtype):
    torch.manual_seed(0)
    return MODELS[model]().to(dtype)


def train_sharded(rank, mesh, model, precision, accumulate, overlap, **options):
    dtype, masters, _ = PRECISIONS[precision]
    net = make(model, dtype)
    optimizer = ShardedOptimizer(
        net.named_parameters(), FusedAdamW, mesh=mesh, bucket_cap_mb=0.02, master_weights=masters, **ADAM, **options
    )
    if overlap:
        optimizer.overlap_gather(net)
    scaler = GradScaler("cpu", init_scale=SCALE, enabled=precision == "fp16, scaler")
    optimizer_step = OptimizerStep(optimizer, max_norm=1.0, scaler=scaler)
    for micros in seeds(rank, accumulate):
        if overlap:
            with optimizer.no_sync():
                for seed in micros[:-1]:
                    scaler.scale(net.loss(seed)).backward()
            micros = micros[-1:]
        for seed in micros:  # without overlap each backward reduces
            scaler.scale(net.loss(seed)).backward()
        optimizer_step()
    optimizer.synchronize()
    return [p.detach().clone() for p in net.parameters()]


def train_replicated(rank, model, precision, accumulate):
    dtype, *_ = PRECISIONS[precision]
    net = make(model, dtype)
    scale = SCALE if precision == "fp16, scaler" else 1.0
    trained = [p for p in net.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in trained]
    optimizer = torch.optim.AdamW(masters, **ADAM)
    for micros in seeds(rank, accumulate):
        for seed in micros:
            (net.loss(seed) * scale).backward()
        average([p.grad for p in trained if p.grad is not None])
        for p, master in zip(trained, masters, strict=True):
            if p.grad is not None:
                master.grad = p.grad.float() / scale
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for p, master in zip(trained, masters, strict=True):
            p.data.copy_(master.data)
    return [p.detach().clone() for p in net.parameters()]


WAYS = list(product((1, 3), (False, True)))
"""Micro-batches, and whether gathering and accumulation overlap: without, each backward reduces."""
HOLDING = [
    {},
    {"find_unused_parameters": True},
    {"shard_gradients": True},
    {"capturable": True},
    {"state_device": "cpu:0", "offload_ratio": 0.5},  # the CPU with a number passes for another device
]
SHAPES = {"2 ranks": (2,), "1 rank": (1,), "4 ranks": (4,), "2x2 ranks": (2, 2)}


def cases(number):
    """What is trained on a mesh, by its number: each model in each precision, on two ranks in every way.

    Elsewhere in one way and with one option, another one on each mesh, so that all meet all others in turn.
    """
    for (i, model), (j, precision) in product(enumerate(MODELS), enumerate(PRECISIONS)):
        if number == 0:
            yield from ((model, precision, *way, {}) for way in WAYS)
        else:
            way, options = WAYS[(i + j + number) % len(WAYS)], HOLDING[(i + j + 2 * number) % len(HOLDING)]
            yield model, precision, *way, options


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=SHAPES)
def test_sharded_training_equals_replicated_training(number):
    shape = list(SHAPES.values())[number]

    def compare(rank):
        mesh = init_device_mesh("cpu", shape)
        wrong, reference = [], {}
        for case in cases(number):
            model, precision, accumulate, overlap, options = case
            start = [p.detach() for p in make(model, PRECISIONS[precision][0]).parameters()]
            key = (model, precision, accumulate)
            if key not in reference:
                reference[key] = train_replicated(rank, *key)
            ours = train_sharded(rank, mesh, *key, overlap, **options)
            apart = distance(ours, reference[key]) / distance(start, reference[key])
            mine = torch.cat([p.flatten() for p in ours])
            first = mine.clone()
            dist.broadcast(first, 0)
            if not apart <= PRECISIONS[precision][2]:
                wrong.append((case, apart))
            if not torch.equal(mine, first):
                wrong.append((case, "ranks differ"))
        return wrong

    for wrong in on_ranks(torch.Size(shape).numel(), compare, timeout=120):
        assert wrong == []


def test_each_model_and_precision_meets_each_way_and_each_option():
    elsewhere = [case for number in range(1, len(SHAPES)) for case in cases(number)]
    for pair in ((0, 2, 3), (1, 2, 3)):
        met = {tuple(case[place] for place in pair) for case in elsewhere}
        assert len(met) == len(WAYS) * len({case[pair[0]] for case in elsewhere})
    for place in (0, 1):
        met = {(case[place], str(case[4])) for case in elsewhere}
        assert len(met) == len(HOLDING) * len({case[place] for case in elsewhere})
