"""How many elements are zero, whoever holds what."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_gradnorm import Part, local_runs


@torch.no_grad()
def zeros_in(parts: Iterable[Part]) -> Tensor:
    """The number of zeros in the tensors of all Parts, over the groups that each is sharded over: a 0-d int64 tensor.

    All ranks of the groups call it with the same Parts in the same order; there is one all-reduce of one number for
    each group, and a few operations for each stretch of memory.
    """
    counts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for part in parts:
        counts.setdefault(part.sharded_over, [])
        for groups, tensors in _by_groups(part).items():
            counts.setdefault(groups, []).extend(map(_zeros, _runs(tensors)))
    return torch.stack([_added(several, groups) for groups, several in counts.items()]).sum()


def _by_groups(part: Part) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    found: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for tensor in part.tensors:
        cut: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if any(placement.is_partial() for placement in tensor.placements):
                raise ValueError(f"a gradient has placements {tensor.placements}: redistribute it, it is partial")
            cut = tuple(mesh.get_group(axis) for axis, kind in enumerate(tensor.placements) if not kind.is_replicate())
        found.setdefault((*cut, *part.sharded_over), []).append(tensor)
    return found


def _runs(tensors: list[Tensor]) -> list[Tensor]:
    return [run for runs in local_runs(tensors).values() for run in runs]


def _zeros(run: Tensor) -> Tensor:
    return run.numel() - run.count_nonzero()


def _added(counts: list[Tensor], groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """The sum of counts over all ranks of the groups."""
    device = counts[0].device if counts else _device_of(groups[0])
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=device)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a rank that holds nothing takes part: where the others have their gradients, on the accelerator if any."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.empty(0, device=here.type if here is not None and here.type in kinds else "cpu").device
