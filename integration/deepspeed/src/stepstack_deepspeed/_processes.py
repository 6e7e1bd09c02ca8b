"""Which device this process has, and how it finds the others."""

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from stepstack import CheckpointError

T = TypeVar("T")


def join(*, required: bool | None) -> torch.device:
    """Join the default process group, unless that was done, and give this process's device.

    `required=False` joins nothing. Under a launcher, such as torchrun, the group is the one that its environment
    variables describe; without one it is this process alone.
    """
    device = _device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if dist.is_initialized() or required is False:
        return device
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return device


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_first(work: Callable[[], T]) -> T:
    """Do it on the first rank, and give all ranks what it gave; what it raises, a CheckpointError, all raise.

    Every rank calls this, since a rank that fails alone lets the others wait.
    """
    if ranks() == 1:
        return work()
    outcome: list[Any] = [None]
    if this_rank() == 0:
        try:
            outcome = [(work(), None)]
        except (OSError, CheckpointError) as error:
            outcome = [(None, f"rank 0: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(outcome, src=0)
    (given, failure), *_ = outcome
    if failure is not None:
        raise CheckpointError(failure)
    return cast(T, given)


def check_alike(what: str, said: dict[str, str]) -> None:
    """ValueError, on all ranks, if one says something else than the first. Every rank calls this."""
    if ranks() == 1:
        return
    of_ranks: list[Any] = [None] * ranks()
    dist.all_gather_object(of_ranks, said)
    for rank, other in enumerate(of_ranks):
        differs = [f"{key} {other[key]}, and not {of_ranks[0][key]}" for key in said if other[key] != of_ranks[0][key]]
        if differs:
            raise ValueError(f"{what} of rank {rank} is another than that of rank 0: {'; '.join(differs)}")


def broadcast_(tensor: Tensor) -> None:
    """Give all of them what the first one has."""
    if ranks() > 1:
        dist.broadcast(tensor.detach(), src=0)


def _device() -> torch.device:
    """The accelerator that LOCAL_RANK names, or the CPU where there is none, or where DS_ACCELERATOR says so."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    index = int(os.environ.get("LOCAL_RANK", this_rank() % torch.accelerator.device_count()))
    return torch.device(accelerator.type, index)
