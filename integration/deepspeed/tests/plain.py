"""A small model, batches for each rank, an engine of them, and what plain torch makes of them in one process."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepstack_deepspeed import initialize

RANKS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAM = {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.1, "betas": (0.8, 0.95)}
POWER = 8
"""Of the loss scale."""


class Net(nn.Module):
    """Odd sizes, and a list of blocks. Gives the loss."""

    def __init__(self, blocks=2):
        super().__init__()
        self.first = nn.Linear(31, 29)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(29, 29), nn.GELU()) for _ in range(blocks))
        self.norm = nn.LayerNorm(29)
        self.last = nn.Linear(29, 31, bias=False)

    def forward(self, x, y):
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.last(self.norm(x)).float(), y)


def net(blocks=2):
    torch.manual_seed(0)
    return Net(blocks)


def batch(rank, step, micro=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(4, 31, generator=generator), torch.randn(4, 31, generator=generator)


def config(*, stage=1, dtype="fp32", clip=1.0, accumulation=1, **more):
    values = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
    }
    if dtype != "fp32":
        values[dtype] = {"enabled": True}
    if dtype == "fp16":
        values["fp16"]["initial_scale_power"] = POWER
    return values | more


@dataclass
class Trained:
    norms: list[float]
    """Of the whole gradient of each step, before clipping."""
    params: list[torch.Tensor]
    """At the end, in fp32: the weights that the model's are the rounded copies of."""


def train_plainly(dtype, clip, accumulation, steps):
    """With fp32 weights beside the model's, and gradients of all ranks averaged in fp32."""
    model = net().to(DTYPES[dtype])
    weights = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(weights, **ADAM)
    scale = 2.0**POWER if dtype == "fp16" else 1.0
    norms = []
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        for rank in range(RANKS):
            for micro in range(accumulation):
                model.zero_grad()
                (model(*batch(rank, step, micro)) / accumulation * scale).backward()
                for weight, param in zip(weights, model.parameters(), strict=True):
                    weight.grad += param.grad.float() / RANKS / scale
        norms.append(torch.cat([weight.grad.double().flatten() for weight in weights]).norm().item())
        if clip:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        for weight, param in zip(weights, model.parameters(), strict=True):
            param.data.copy_(weight.data)
    return Trained(norms, [weight.detach() for weight in weights])


def engine_of(model=None, **values):
    """An engine of this model, or `net()`, whose config says these values."""
    return initialize(model=model or net(), config=config(**values))[0]


def train(engine, rank, step=0):
    """One step of the optimizer, on this rank's batches."""
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*batch(rank, step, micro)))
        engine.step()


def weights(engine):
    """The whole fp32 weights, in the model's order: the model's own, or their masters."""
    if engine.zero_optimization_stage() == 3:
        return [param.full_tensor().detach() for param in engine.module.parameters()]
    names, params = zip(*engine.module.named_parameters(), strict=True)
    if params[0].dtype == torch.float32:
        return [param.detach() for param in params]
    states = engine.optimizer.full_state_dict(rank0_only=False)
    numbers = {
        name: number
        for group in states["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    return [states["state"][numbers[name]]["master_weight"] for name in names]
