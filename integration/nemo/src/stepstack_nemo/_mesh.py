"""Which ranks share a set of states: process groups and words of a config, as a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from stepstack_megatron import is_expert, parallel_state
from stepstack_sharded_states import within_node_mesh


@dataclass(frozen=True)
class Spread:
    """Over how many of the ranks that average their gradients states are spread; the others hold replicas."""

    distributed_size: int | None = None
    """So many neighbours. None: all."""
    within_nodes: bool = False
    """Those of one host."""

    def __post_init__(self) -> None:
        if self.distributed_size is not None and self.distributed_size < 1:
            raise ValueError(f"distributed_size must be 1 or more, got {self.distributed_size}")

    def mesh(self, group: ProcessGroup, device_type: str) -> DeviceMesh:
        """(shard) or (replicate, shard) over a group; all its ranks call this, and say the same.

        ValueError where they don't, and where it does not divide.
        """
        self._check_ranks(group)
        if not self.within_nodes and self.distributed_size is None:
            return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
        mesh = within_node_mesh(group, None if self.within_nodes else self.distributed_size)
        if self.distributed_size not in (None, mesh.size(1)):
            raise ValueError(
                f"rank {dist.get_rank()}: distributed_size is {self.distributed_size}, but distribute_within_nodes "
                f"finds {mesh.size(1)} ranks on a host: give one of the two"
            )
        return mesh

    def _check_ranks(self, group: ProcessGroup) -> None:
        told: list[Spread] = [self] * group.size()
        dist.all_gather_object(told, self, group=group)
        if any(other != self for other in told):
            sizes = [other.distributed_size or ("a node" if other.within_nodes else "all") for other in told]
            raise ValueError(
                f"rank {dist.get_rank()}: the ranks {dist.get_process_group_ranks(group)} would spread states over "
                f"{sizes} of them: give all the same distributed_size, distribute_within_nodes and "
                "disable_distributed_parameters"
            )


class Meshes(NamedTuple):
    """Over which ranks parameters are averaged and states spread; None without torch.distributed."""

    dense: DeviceMesh | None
    experts: DeviceMesh | None
    """Of their own where Megatron has set up groups for them and this rank has some."""

    @property
    def groups(self) -> list[ProcessGroup]:
        """Those of all axes."""
        return [group for mesh in self if mesh is not None for group in mesh.get_all_groups()]

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        spread: Spread,
        process_group: ProcessGroup | None,
        distributed: ProcessGroup | None,
        redundant: ProcessGroup | None,
    ) -> "Meshes":
        """Every rank of `process_group` (default: Megatron's data-parallel group, else the default group) calls this.

        `distributed` and `redundant` say the same as `spread` by groups. ValueError where ranks don't divide, and where
        this one is not in a group that it is given.
        """
        if not dist.is_initialized() or not params:
            return cls(None, None)
        _check_member("process_group", process_group)
        _check_member("distributed_process_group", distributed)
        _check_member("redundant_process_group", redundant)
        state, device_type = parallel_state(), params[0].device.type
        group = process_group or state.data or dist.group.WORLD
        assert group is not None
        experts = None
        if state.expert_data is not None and any(map(is_expert, params)):
            experts = spread.mesh(state.expert_data, device_type)
        if distributed is None and redundant is None:
            return cls(spread.mesh(group, device_type), experts)
        if spread != Spread():
            raise ValueError(
                "distributed_process_group and redundant_process_group say already what is spread: give "
                "these, or distributed_size, distribute_within_nodes or disable_distributed_parameters"
            )
        return cls(_mesh_of_groups(group, distributed, redundant, device_type), experts)


def _check_member(argument: str, group: ProcessGroup | None) -> None:
    # What torch gives a rank that is not in a new group is no group.
    if group is not None and (not isinstance(group, ProcessGroup) or dist.get_rank(group) < 0):
        raise ValueError(f"rank {dist.get_rank()} is not in {argument}: give each rank a group that it is in")


def _mesh_of_groups(
    process_group: ProcessGroup, distributed: ProcessGroup | None, redundant: ProcessGroup | None, device_type: str
) -> DeviceMesh:
    """The mesh whose rows are groups that share states, and whose columns are groups of replicas.

    All ranks of `process_group` call this. ValueError where the groups make no grid of its ranks.
    """
    rank = dist.get_rank()
    shards = process_group if distributed is None else distributed
    row = dist.get_process_group_ranks(shards)
    column = [rank] if redundant is None else dist.get_process_group_ranks(redundant)
    rows = [row]
    if redundant is not None:
        rows = [[] for _ in column]
        dist.all_gather_object(rows, row, group=redundant)
    ranks = dist.get_process_group_ranks(process_group)
    place = row.index(rank)
    if sorted(chain.from_iterable(rows)) != sorted(ranks) or [other[place : place + 1] for other in rows] != [
        [r] for r in column
    ]:
        raise ValueError(
            f"rank {rank}: distributed_process_group has ranks {row} and redundant_process_group {column}; as rows and "
            f"columns they must make one grid of process_group's ranks, {ranks}"
        )
    if redundant is None:
        return DeviceMesh.from_group(shards, device_type, mesh_dim_names=("shard",))
    return DeviceMesh.from_group(
        [redundant, shards], device_type, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )
