"""From shares to sums over all ranks: one all-reduce for each group, in an order that all its ranks agree on."""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_gradnorm._memory import Place
from stepstack_gradnorm._shares import Share, Shares
from stepstack_gradnorm._sums import Sum

Key: TypeAlias = tuple[Hashable, frozenset[str]]  # a label, and the groups that are still to be added up over


def totals(shares: Shares, sum_: Sum) -> dict[Hashable, Tensor]:
    """By label, what the tensors with it add up to over all ranks. On the device of the group that was reduced last.

    What is packed for a group follows from the structure alone, and so does the order: as groups are first named, axis
    by axis, so that ranks of one mesh are at the same axis at the same time, whatever their groups of it are called.
    Those that only the meshes of DTensors name come before all others, so that a Part is one number, whatever it is
    made of, when the ranks that it is sharded over meet.
    """
    pending = dict(zip([(share.label, share.groups) for share in shares], _local([*shares], sum_), strict=True))
    for name in sorted(shares.groups, key=lambda name: name in shares.of_parts):
        pending = _reduced(pending, name, shares.groups[name], sum_)
    return {label: value for (label, _), value in pending.items()}


def home(devices: Iterable[torch.device]) -> torch.device:
    """Where numbers from these devices meet: on the first that is no CPU, since a copy to the CPU would wait for it.

    Without any, on the accelerator that this process uses: where the others have theirs, if the group has both kinds.
    """
    several = [*devices]
    if not several:
        return _in_use()
    return next((device for device in several if device.type != "cpu"), torch.device("cpu"))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. Waits for a copy to the CPU only, which could be read there before it has arrived."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def device_of(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """A device that the group communicates on: the preferred one if it can, else the current one of its kind."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if preferred.type in kinds:
        return preferred
    return torch.empty(0, device=next((kind for kind in kinds if kind != "cpu"), kinds[0])).device


def _in_use() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _local(shares: list[Share], sum_: Sum) -> list[Tensor]:
    """What each share adds up to on this rank."""
    lists: dict[Place, list[list[Tensor]]] = {}
    for index, share in enumerate(shares):
        for place, joined in share.memory.runs().items():
            lists.setdefault(place, [[] for _ in shares])[index] = joined
    to = home(device for device, _ in lists)
    places = [moved(sum_.of(several), to) for several in lists.values()]
    if len(places) == 1:
        return [*places[0].unbind()]
    if not places:
        return [*torch.zeros((len(shares), *sum_.shape), dtype=sum_.dtype, device=to).unbind()]
    return [*sum_.together([*torch.stack(places, 1).unbind()]).unbind()]


def _reduced(pending: dict[Key, Tensor], name: str, group: dist.ProcessGroup, sum_: Sum) -> dict[Key, Tensor]:
    """After the all-reduce over one group; what then has the same label and groups is added up."""
    meant = [key for key in pending if name in key[1]]
    device = device_of(group, home(pending[key].device for key in meant))
    packed = torch.stack([moved(pending[key], device) for key in meant])
    pending = pending | dict(zip(meant, sum_.all_reduce(packed, group).unbind(), strict=True))
    merged: dict[Key, list[Tensor]] = {}
    for (label, names), value in pending.items():
        merged.setdefault((label, names - {name}), []).append(value)
    return {key: added(values, sum_) for key, values in merged.items()}


def added(values: list[Tensor], sum_: Sum) -> Tensor:
    """Values of any devices added up."""
    if len(values) == 1:
        return values[0]
    device = home(value.device for value in values)
    return sum_.together([torch.stack([moved(value, device) for value in values])])[0]
