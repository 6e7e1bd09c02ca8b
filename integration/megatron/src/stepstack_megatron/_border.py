"""What is plugged, and what is refused, by name."""

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Of megatron-core that this was tested with."""

_MODULE = "megatron.core.optimizer"
FP32 = f"{_MODULE}.optimizer.FP32Optimizer"
FLOAT16 = f"{_MODULE}.optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = f"{_MODULE}.distrib_optimizer.DistributedOptimizer"
CHAINED = f"{_MODULE}.optimizer.ChainedOptimizer"


def kind_of(thing: object) -> str:
    """The full name of its class; a subclass has another one, since it may step in another way."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def members_of(optimizer: Any) -> list[Any]:
    """The optimizers that step: those of a ChainedOptimizer, or the one itself.

    Raises TypeError, ValueError or RuntimeError for what is not handled: classes, versions, options.
    """
    if kind_of(optimizer) not in (FP32, FLOAT16, DISTRIBUTED, CHAINED):
        raise TypeError(
            f"{_here()}: {kind_of(optimizer)} is not an optimizer that can be plugged; FP32Optimizer, "
            "Float16OptimizerWithFloat16Params, DistributedOptimizer and ChainedOptimizer of megatron.core are, "
            "themselves and not subclasses"
        )
    version = getattr(sys.modules.get("megatron.core"), "__version__", "of unknown version")
    # Since 0.19 it adds the commit of whatever checkout it is installed in: 0.19.2+1a2b3c4.
    if version.partition("+")[0] not in VERSIONS:
        raise RuntimeError(f"{_here()}: megatron-core {version}; this was made for {', '.join(VERSIONS)}")
    members = list(optimizer.chained_optimizers) if kind_of(optimizer) == CHAINED else [optimizer]
    if not members:
        raise ValueError(f"{_here()}: the ChainedOptimizer has no optimizers: this rank has nothing to step")
    for member in members:
        for flaw in _flaws(optimizer, member):
            raise ValueError(f"{_here()}: this {kind_of(member)} can't be plugged: {flaw}")
    return members


def _flaws(optimizer: Any, member: Any) -> Iterator[str]:
    if kind_of(member) not in (FP32, FLOAT16, DISTRIBUTED):
        yield "only FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer are handled in a chain"
    if "step" in vars(member) or "step" in vars(optimizer):
        yield "its step has been replaced already; if that was plug, remove() takes it away"
    if member.config.use_precision_aware_optimizer:
        yield "use_precision_aware_optimizer keeps the states in Transformer Engine's own forms; set it to False"
    if member.config.optimizer_cpu_offload:
        yield "optimizer_cpu_offload steps on copies in streams of its own; set it to False"
    if getattr(member.config, "optimizer_cuda_graph", False):
        yield "optimizer_cuda_graph records the step that it finds, Megatron's; set it to False"
    if any(getattr(param, "grad_norm_group", None) is not None for param in member.get_parameters()):
        yield "some parameters have a grad_norm_group (multi-token prediction), and would be clipped by the main norm"
    if getattr(getattr(member, "ddp_config", None), "use_megatron_fsdp", False):
        yield "use_megatron_fsdp keeps parameters and gradients in buffers of its own; set it to False"


def _here() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
