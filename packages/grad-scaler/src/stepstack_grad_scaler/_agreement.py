"""Which ranks must decide alike on a step, and how they come to."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stepstack_grad_scaler._devices import moved


def check_groups(groups: Sequence[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    """The groups; ValueError for what is none, or one that this rank is not in."""
    if not isinstance(groups, Iterable):
        raise ValueError(f"groups is {groups!r}; it must be a sequence of process groups, such as (group,)")
    groups = tuple(groups)
    for number, group in enumerate(groups):
        if not isinstance(group, ProcessGroup):
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise ValueError(
                f"groups[{number}] is {group!r} on rank {rank}, not a process group that the rank is in: give each "
                "rank its own groups only, and for all ranks torch.distributed.group.WORLD"
            )
    return groups


def groups_that_agree(parameters: Iterable[Tensor], groups: Sequence[ProcessGroup]) -> list[ProcessGroup]:
    """The process groups of all meshes that parameters live on, then `groups`; none that lies within another one.

    Only the structure counts, never which gradients exist. In this order each rank may reduce over its groups one after
    the other: meshes go by their axes' names and sizes, then as the parameters do, so that ranks that share two of
    them meet in both in the same order, and axis by axis, so that after the last one all ranks of a mesh agree.
    ValueError where no mesh has all the ranks that parameters are on, and `groups` does not say what connects them.
    """
    parameters = list(parameters)
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    if meshes and not groups:
        _check_one_holds_all([*meshes.values()], parameters)
    all_groups = [
        mesh.get_group(axis)
        for mesh in sorted(meshes.values(), key=lambda mesh: (mesh.mesh_dim_names or (), mesh.shape))
        if mesh.get_coordinate() is not None  # else this rank holds nothing there
        for axis in range(mesh.ndim)
    ]
    all_groups += groups
    ranks = [frozenset(dist.get_process_group_ranks(group)) for group in all_groups]
    return [
        group
        for place, (group, own) in enumerate(zip(all_groups, ranks, strict=True))
        if len(own) > 1 and own not in ranks[place + 1 :] and not any(own < others for others in ranks)
    ]


def _check_one_holds_all(meshes: Sequence[DeviceMesh], parameters: Sequence[Tensor]) -> None:
    """ValueError unless one mesh has the ranks of all others, and every rank if plain parameters are trained too."""
    if any(mesh.size() == dist.get_world_size() for mesh in meshes):
        return
    if any(not isinstance(p, DTensor) and (p.requires_grad or p.grad is not None) for p in parameters):
        raise ValueError(
            f"rank {dist.get_rank()}: the optimizer has DTensors on a mesh of {meshes[0].size()} of the "
            f"{dist.get_world_size()} ranks and plain parameters, which any rank may hold: say which ranks skip a step "
            "together by GradScaler(groups=(group,)), such as (torch.distributed.group.WORLD,)"
        )
    if len(meshes) > 1:
        ranks = [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes]  # in the memory of the host
        if frozenset().union(*ranks) not in ranks:
            raise ValueError(
                f"rank {dist.get_rank()}: parameters are DTensors on the ranks "
                f"{' and '.join(str(sorted(own)) for own in dict.fromkeys(ranks))}, and no mesh has all of these: say "
                "which ranks skip a step together by GradScaler(groups=(group,))"
            )


def agreed(flags: Sequence[Tensor], groups: Sequence[ProcessGroup]) -> Sequence[Tensor]:
    """The MAX of each 0-d flag over the ranks of all groups, which must all call it; one all-reduce a group."""
    if not groups:
        return flags
    packed = torch.stack(list(flags))
    for group in groups:
        there = moved(packed, _device_of(group, packed.device))
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
        packed = moved(there, packed.device)
    return packed.unbind()


def _device_of(group: ProcessGroup, preferred: torch.device) -> torch.device:
    """A device that the group communicates on: the preferred one if it can, else the current one of its kind."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if preferred.type in kinds:
        return preferred
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
