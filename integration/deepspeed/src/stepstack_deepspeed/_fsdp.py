"""Parameters spread over the ranks too: torch's `fully_shard`, block by block."""

from collections import Counter

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stepstack_deepspeed._precision import Precision
from stepstack_deepspeed._processes import broadcast_
from stepstack_deepspeed._sharding import Sharding

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def shard_(
    model: nn.Module, mesh: DeviceMesh, *, device: torch.device, precision: Precision, sharding: Sharding
) -> None:
    """Make every parameter of the model a DTensor over the mesh, in fp32, with the values of the first rank.

    They are their own master weights: a block is gathered in the dtype of `precision`, in which its gradients are
    computed, and reduced unless `grad_dtype` says otherwise. Of a model on the CPU only one block at a time is on the
    device as a whole. Every rank calls this.
    """
    if isinstance(model, FSDPModule):
        raise ValueError("the model is sharded by fully_shard already: give the model as it was before, for stage 3")
    policy = MixedPrecisionPolicy(
        param_dtype=precision.dtype if precision.is_mixed else None,
        reduce_dtype=precision.grad_dtype,
        cast_forward_inputs=False,
    )
    offload_policy = OffloadPolicy()
    if sharding.offload is not None:
        offload_policy = CPUOffloadPolicy(pin_memory=sharding.offload.pin_memory and device.type != "cpu")
    stays = sum(param.numel() for param in model.parameters()) <= sharding.live_numel
    for module in (*blocks(model), model):
        for param in module.parameters():
            if not isinstance(param, DTensor):
                param.data = param.data.to(device, torch.float32 if param.is_floating_point() else None)
                broadcast_(param)
        # What the model itself holds is needed last in forward and first in backward.
        reshards = not stays and module is not model
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, offload_policy=offload_policy)


def reshard_(model: nn.Module) -> None:
    """Forget what is gathered, since the shares have changed: a forward without a backward leaves it behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forget_backward_(model: nn.Module) -> None:
    """Clear away what a backward that raised has left behind: parameters and gradients of all ranks, waiting callbacks.

    RuntimeError if this torch can't: the next backwards would give no gradients.
    """
    if not isinstance(model, FSDPModule):
        return
    reset = getattr(model, "reset_iter_state", None)  # not in every torch that this runs with
    if reset is None:
        raise RuntimeError(
            f"a backward has failed, and after that fully_shard of torch {torch.__version__} gives no gradients any "
            "more: start anew from a checkpoint, or use torch 2.13"
        )
    for param in model.parameters():  # gathered ones too, whose gradients would be added to the next
        param.grad = None
    reset()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered as a unit, beside the model with what is left: the members of its module lists.

    One that shares a parameter with the rest of the model is none.
    """
    uses = _uses(model)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential) or module is model:
            continue
        for block in module:
            if not isinstance(block, _CONTAINERS) and _is_apart(block, uses):
                found.append(block)
                inside.update(block.modules())
    return found


def _is_apart(block: nn.Module, uses: "Counter[nn.Parameter]") -> bool:
    """Whether it has parameters, which nothing else in the model uses."""
    own = _uses(block)
    return bool(own) and all(uses[param] == times for param, times in own.items())


def _uses(module: nn.Module) -> "Counter[nn.Parameter]":
    """How many names each parameter has in it."""
    return Counter(param for _, param in module.named_parameters(remove_duplicate=False))
