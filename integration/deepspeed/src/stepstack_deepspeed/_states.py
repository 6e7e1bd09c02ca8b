"""The optimizer of an engine: its states cut into shares, with or without the parameters (stage 3)."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from stepstack_deepspeed._fsdp import shard_
from stepstack_deepspeed._optimizers import Inner, check_steps_dtensors
from stepstack_deepspeed._parameters import Groups
from stepstack_deepspeed._precision import Precision
from stepstack_deepspeed._processes import broadcast_, ranks
from stepstack_deepspeed._sharding import Sharding
from stepstack_sharded_states import ShardedOptimizer


def sharded_optimizer(
    model: nn.Module, groups: Groups, inner: Inner, *, device: torch.device, precision: Precision, sharding: Sharding
) -> Optimizer:
    """What steps the model's parameters on all ranks together, which all call this with the same.

    The model's parameters are rounded to the precision's dtype already. They become views of flat buffers, or, in
    stage 3, DTensors.
    """
    if sharding.stage == 3:
        return _fully_sharded(model, groups, inner, device, precision, sharding)
    options = dict(inner.options)
    if precision.is_mixed and inner.has_masters:
        options["master_weights"] = "fp32"
    elif precision.is_mixed:
        options["inner_dtype"] = torch.float32
    if sharding.bucket_numel is not None:
        itemsize = (precision.grad_dtype or precision.dtype).itemsize
        options["bucket_cap_mb"] = sharding.bucket_numel * itemsize / 2**20
    if sharding.offload is not None:
        options |= {"state_device": "cpu", "offload_ratio": sharding.offload.ratio}
    model.to(device)
    trained = {param for group in groups for _, param in group["params"]}
    for param in model.parameters():
        if param not in trained:  # the optimizer does it for the others
            broadcast_(param)
    return ShardedOptimizer(
        groups,
        inner.optimizer_class,
        mesh=_mesh(device, sharding.stage),
        grad_dtype=precision.grad_dtype,
        shard_gradients=sharding.stage == 2,
        grad_divisor=sharding.grad_divisor,
        grad_predivisor=sharding.grad_predivisor,
        **options,
    )


def _fully_sharded(
    model: nn.Module, groups: Groups, inner: Inner, device: torch.device, precision: Precision, sharding: Sharding
) -> Optimizer:
    mesh = _mesh(device, stage=3)
    if mesh is None:
        raise ValueError("stage 3 needs a process group, of one process at least: leave out dist_init_required=False")
    for group in groups:
        check_steps_dtensors(inner.optimizer_class, group.get("fused"))
    shard_(model, mesh, device=device, precision=precision, sharding=sharding)
    sharded = dict(model.named_parameters())
    new_groups: list[dict[str, Any]] = [
        {**group, "params": [sharded[name] for name, _ in group["params"]]} for group in groups
    ]
    return inner.optimizer_class(new_groups, **inner.options)


def _mesh(device: torch.device, stage: int) -> DeviceMesh | None:
    """All ranks; in stage 0 each holds all states. None for a process without a group."""
    if not torch.distributed.is_initialized():
        return None
    if stage == 0:
        return init_device_mesh(device.type, (ranks(), 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (ranks(),), mesh_dim_names=("shard",))
