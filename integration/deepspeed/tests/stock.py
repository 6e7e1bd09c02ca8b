"""DeepSpeed in forked ranks on the CPU, a model for it to train, and what plain torch makes of the same batches."""

import gc
import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed

    # Every ZeRO optimizer loads it, for seconds; here it is loaded once, before ranks are forked.
    import deepspeed.runtime.zero.muon.original_muon
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

RANKS = 2
TIMEOUT = 120.0  # building an engine takes its time on a busy machine
LR = 0.02
MAX_NORM = {"binding": 0.05, "loose": 1e4, "off": 0.0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_POWER = 8


def initialize(rank: int) -> None:
    """In each rank, first. The shared memory operator isn't built: gloo does what it does."""
    warnings.simplefilter("ignore")  # DeepSpeed's and torch's own
    gc.freeze()  # stage 3 collects garbage whenever it is built, and need not look through all modules for it
    deepspeed.utils.logger.setLevel(logging.ERROR)
    for name in deepspeed.ops.__compatible_ops__:
        if "shm" in name:
            deepspeed.ops.__compatible_ops__[name] = False
    # What these compile takes minutes, and ranks that begin it together wait for ever.
    CPUAdamBuilder.load = lambda self, verbose=True: CpuAdamKernel()
    FusedAdamBuilder.load = lambda self, verbose=True: FusedAdamKernel()
    # CPUs without fp16 instructions compute in fp16 all the same.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    deepspeed.init_distributed("gloo")


class CpuAdamKernel:
    """What DeepSpeedCPUAdam calls in C++, in torch."""

    def __init__(self) -> None:
        self._decoupled: dict[int, bool] = {}

    def create_adam(self, number, lr, beta1, beta2, eps, weight_decay, decoupled, log) -> None:
        self._decoupled[number] = decoupled

    def destroy_adam(self, number) -> None:
        self._decoupled.pop(number, None)

    def adam_update(
        self, number, step, lr, beta1, beta2, eps, weight_decay, bias_correction, param, grad, m, v
    ) -> None:
        assert isinstance(step, int)
        _adam_(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay, self._decoupled[number], bias_correction)


class FusedAdamKernel:
    """What DeepSpeed's FusedAdam calls in C++, in torch."""

    @staticmethod
    def multi_tensor_adam(chunk, flag, lists, lr, beta1, beta2, eps, step, decoupled, bias_correction, weight_decay):
        for grad, param, m, v in zip(*lists, strict=True):
            _adam_(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction)


def _adam_(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction) -> None:
    if decoupled:
        param.mul_(1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad.square(), 1 - beta2)
    bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    param.addcdiv_(m, (v / bias2).sqrt() + eps, value=-lr / bias1)


@dataclass(frozen=True)
class Case:
    """An engine's configuration."""

    stage: int
    dtype: str = "fp32"
    offload: bool = False
    clip: str = "binding"
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def max_norm(self) -> float:
        return MAX_NORM[self.clip]

    def __str__(self) -> str:
        offload = "-offload" if self.offload else ""
        more = "".join(f"-{key}" for key in self.zero | self.more)
        return f"z{self.stage}-{self.dtype}{offload}-{self.clip}-{self.accumulation}{more}"

    def config(self) -> dict[str, Any]:
        zero = {
            "stage": self.stage,
            "reduce_bucket_size": 5000,
            "allgather_bucket_size": 5000,
            "stage3_param_persistence_threshold": 0,
        }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.max_norm,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero | self.zero,
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": SCALE_POWER}
        return config | self.more


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, 5), nn.GELU(), nn.Linear(5, 3, bias=False)
    )


def groups(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [param for param in module.parameters() if param.ndim > 1]
    vectors = [param for param in module.parameters() if param.ndim < 2]
    return [
        {"params": matrices, "lr": LR, "weight_decay": 0.1},
        {"params": vectors, "lr": LR / 2, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(module), eps=1e-4)


def engine_of(case: Case, optimizer=adamw, module: nn.Module | None = None, **options: Any) -> Any:
    module = model() if module is None else module
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer(module), config=case.config(), **options)
    return engine


def batch(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(4, 7, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() - 0.5).square().mean()


def backwards(engine: Any, case: Case, rank: int, step: int) -> None:
    """All backwards of a step, each but the last with the step that does nothing."""
    for micro in range(case.accumulation):
        if micro:
            engine.step()
        engine.backward(loss_of(engine(batch(rank, step, micro).to(DTYPES[case.dtype]))))


def masters(engine: Any) -> list[torch.Tensor]:
    """The whole fp32 weights, in the model's order."""
    optimizer = engine.optimizer
    params = list(engine.module.parameters())
    if hasattr(optimizer, "fp32_groups"):
        found = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        by_param = {id(param): weight.detach().clone() for param, weight in found}
    elif hasattr(optimizer, "fp32_groups_flat") and hasattr(optimizer, "fp16_groups_flat"):
        by_param = {}
        for flat, members in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            pieces = flat.detach().split([param.numel() for param in members])
            by_param |= {id(param): piece.clone().view_as(param) for param, piece in zip(members, pieces, strict=True)}
    elif isinstance(optimizer, torch.optim.Optimizer):
        return [param.detach().clone() for param in params]
    else:
        return [deepspeed.utils.safe_get_full_fp32_param(param).detach().clone().cpu() for param in params]
    return [by_param[id(param)] for param in params]


def distance(engine: Any, weights: Iterable[torch.Tensor]) -> float:
    """The largest difference to these fp32 weights."""
    return max((a - b).abs().max().item() for a, b in zip(masters(engine), weights, strict=True))


@dataclass
class Reference:
    """What torch makes of the batches of all ranks, in one process, with fp32 weights beside the model's."""

    case: Case
    decoupled: bool = True
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.module = model().to(DTYPES[self.case.dtype])
        self.weights = [nn.Parameter(param.detach().float()) for param in self.module.parameters()]
        places = {id(param): weight for param, weight in zip(self.module.parameters(), self.weights, strict=True)}
        of_weights = [
            group | {"params": [places[id(param)] for param in group["params"]]} for group in groups(self.module)
        ]
        self.optimizer = torch.optim.Adam(of_weights, eps=1e-4, decoupled_weight_decay=self.decoupled)

    def step(self, step: int, scale: float = 2.0**SCALE_POWER) -> float:
        """One step; the norm before clipping, by fp64."""
        case = self.case
        scale = scale if case.dtype == "fp16" else 1.0
        for weight, grad in zip(self.weights, self._mean_grads(step, scale), strict=True):
            weight.grad = grad.float() / scale
        norm = self.norm()
        if case.max_norm:
            nn.utils.clip_grad_norm_(self.weights, case.max_norm)
        self.update()
        return norm

    def _mean_grads(self, step: int, scale: float) -> list[torch.Tensor]:
        """Rounded where DeepSpeed rounds: stages 2 and 3 average each micro-batch over ranks, the others their sum."""
        micros = range(self.case.accumulation)
        if self.case.stage < 2:
            return _averages([self._grads(rank, step, micros, scale) for rank in range(RANKS)])
        total, *others = (
            _averages([self._grads(rank, step, [micro], scale) for rank in range(RANKS)]) for micro in micros
        )
        for other in others:
            torch._foreach_add_(total, other)
        return total

    def _grads(self, rank: int, step: int, micros: Iterable[int], scale: float) -> list[torch.Tensor]:
        self.module.zero_grad()
        for micro in micros:
            output = self.module(batch(rank, step, micro).to(DTYPES[self.case.dtype]))
            (loss_of(output) / self.case.accumulation * scale).backward()
        return [param.grad for param in self.module.parameters()]

    def norm(self) -> float:
        return torch.cat([weight.grad.double().flatten() for weight in self.weights]).norm().item()

    def update(self) -> None:
        self.optimizer.step()
        for weight, param in zip(self.weights, self.module.parameters(), strict=True):
            param.data.copy_(weight.data)


def _averages(by_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(grads).div_(len(grads)).sum(0) for grads in zip(*by_rank, strict=True)]
