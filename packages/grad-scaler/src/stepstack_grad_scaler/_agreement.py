"""Which ranks must decide alike on a step, and how they do."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def groups_that_agree(parameters: Iterable[Tensor], groups: Sequence[ProcessGroup]) -> list[ProcessGroup]:
    """`groups` and the process groups of all meshes the parameters live on, in an order that is the same on all ranks.

    A group of which all ranks are in another one is left out. Only the structure counts, never which gradients exist.
    """
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    of_meshes = [
        mesh.get_group(axis)
        for mesh in meshes.values()
        if mesh.get_coordinate() is not None  # else this rank holds nothing there
        for axis in range(mesh.ndim)
    ]
    of_meshes.sort(key=lambda group: group.group_name)  # of two with the same ranks, all of these take the same
    by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
    for group in (*groups, *of_meshes):
        by_ranks.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)
    rank_sets = [set(ranks) for ranks in by_ranks]
    # Sorted: two ranks that share two groups reduce in the same order.
    return [
        group
        for ranks, group in sorted(by_ranks.items(), key=lambda item: item[0])
        if len(ranks) > 1 and not any(set(ranks) < others for others in rank_sets)
    ]


def agree_(flags: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    """The MAX of `flags` over the ranks of each group, in place. All ranks of these groups must call it."""
    for group in groups:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags
