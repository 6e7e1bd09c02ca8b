"""The ranks that states are spread over: which hold shards, which hold replicas, and what they tell each other."""

import hashlib
import itertools
import socket
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stepstack_sharded_states._collectives import Pending, all_gather, reduce_scatter


def within_node_mesh(process_group: ProcessGroup | None = None, size: int | None = None) -> DeviceMesh:
    """A mesh (replicate, shard) that shards within a node and replicates across nodes.

    Every rank of `process_group` (default: the default group) calls this and gets the mesh of that group's ranks.
    `size` ranks share a shard group; None takes the ranks that share a host name. With `size` given, ranks count in
    the group's order, so neighbours shard together.

    Raises ValueError where the ranks don't divide into nodes of equal size.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("within_node_mesh needs a process group: call torch.distributed.init_process_group first")
    ranks = dist.get_process_group_ranks(group)
    if size is None:
        ranks, size = _by_host(ranks, group)
    if size < 1 or len(ranks) % size:
        raise ValueError(
            f"rank {dist.get_rank()}: {len(ranks)} ranks don't divide into nodes of {size}; "
            f"give a size that divides {len(ranks)}"
        )
    grid = torch.tensor(ranks).view(-1, size)
    # Each rank makes the groups it is in, and only those: other data-parallel groups may do the same at the same time.
    return DeviceMesh.from_group(
        [_group_with_this_rank(grid.T), _group_with_this_rank(grid)],
        "cuda" if "nccl" in dist.get_backend(group) else "cpu",
        mesh=grid,
        mesh_dim_names=("replicate", "shard"),
    )


class Ranks:
    """A mesh seen from one rank: 1-d (shard), 2-d (replicate, shard), or None, this process alone.

    Methods named after a collective are that collective: every rank of the mesh calls them, in the same order.
    """

    def __init__(self, mesh: DeviceMesh | None, device_type: str) -> None:
        if mesh is None and dist.is_initialized():
            mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        self.mesh = mesh
        self.shards, self.shard, self.replicas, self.replica = 1, 0, 1, 0
        self._axes: list[ProcessGroup] = []  # this rank's groups of the axes that have several ranks, replicas first
        if mesh is None:
            return
        rank = dist.get_rank()
        if mesh.ndim not in (1, 2):
            raise ValueError(f"rank {rank}: mesh must be (shard) or (replicate, shard), got {mesh.ndim} axes: {mesh}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {rank} is not in the mesh {mesh.mesh.tolist()}: give it a mesh that it is in")
        if mesh.device_type != device_type:
            raise ValueError(
                f"rank {rank}: the parameters are on {device_type!r}, the mesh is of {mesh.device_type!r} devices; "
                f"move the model with .to({mesh.device_type!r}) before the optimizer is made, or give another mesh"
            )
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        self._replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.shards, self.shard = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.replicas = mesh.size(0) if mesh.ndim == 2 else 1
        self.replica = mesh.get_local_rank(0) if mesh.ndim == 2 else 0
        self._axes = [group for group in mesh.get_all_groups() if group.size() > 1]
        self._placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), Shard(0))

    def sharded(self, local: Tensor, numel: int) -> Tensor:
        """`local` as this rank's part of a 1-D DTensor of `numel` elements, sharing memory; itself without a mesh.

        Parts may be of any lengths, which placements don't tell: what would need to know them is refused.
        """
        if self.mesh is None:
            return local
        shard = DTensor.from_local(
            local, self.mesh, self._placements, run_check=False, shape=torch.Size((numel,)), stride=(1,)
        )
        for method in ("full_tensor", "redistribute", "__create_write_items__", "__create_chunk_list__"):
            setattr(shard, method, _refuse_to_gather)
        return shard

    @property
    def size(self) -> int:
        return self.shards * self.replicas

    def reduce_scatter(self, flat: Tensor, mine: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        """Start to leave in `mine`, this rank's slice of `flat`, the sum or mean over the shard axis."""
        if self.shards == 1:
            return Pending()
        return reduce_scatter(flat, mine, op, self._shard_group)

    def all_reduce(self, shard: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        """Start to leave in `shard` the sum or mean over the replicate axis."""
        if self.replicas == 1:
            return Pending()
        return Pending([dist.all_reduce(shard, op=op, group=self._replicate_group, async_op=True)])

    def all_gather(self, flat: Tensor, mine: Tensor) -> Pending:
        """Start to fill `flat` with the slices of the ranks of the shard axis."""
        if self.shards == 1:
            return Pending()
        return all_gather(flat, mine, self._shard_group)

    def broadcast(self, flat: Tensor) -> None:
        """Give every rank of the mesh what its first rank has."""
        for group in self._axes:
            dist.broadcast(flat, group=group, group_src=0)

    def all_reduce_shards(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Leave in `value` the sum, maximum, … over the shard axis."""
        if self.shards > 1:
            dist.all_reduce(value, op=op, group=self._shard_group)

    @property
    def number(self) -> int:
        """This rank's, in the order of the mesh."""
        return self.replica * self.shards + self.shard

    @property
    def is_first(self) -> bool:
        """This is the mesh's first rank."""
        return self.number == 0

    def from_shard(self, shard: int, part: Tensor, *, to_all: bool) -> None:
        """Give the first rank of this shard axis, or all of them, what `shard` has in `part`."""
        if self.shards == 1 or (shard == 0 and not to_all):
            return
        if to_all:
            dist.broadcast(part, group=self._shard_group, group_src=shard)
        elif self.shard == shard:
            dist.send(part, group=self._shard_group, group_dst=0)
        elif self.shard == 0:
            dist.recv(part, group=self._shard_group, group_src=shard)

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank of the mesh has."""
        values = [value]
        for group in self._axes:
            there: list[list[Any]] = [[]] * group.size()
            dist.all_gather_object(there, values, group=group)
            values = list(itertools.chain.from_iterable(there))
        return values

    def broadcast_object(self, value: Any) -> Any:
        """What the mesh's first rank has."""
        values = [value]
        for group in self._axes:
            dist.broadcast_object_list(values, group=group, group_src=0)
        return values[0]

    def compare(self, lines: list[str], device: torch.device, refusal: Exception | None = None) -> None:
        """Raise ValueError on every rank of the mesh, unless all pass the same lines of text and none a `refusal`."""
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
        found = torch.tensor([digest, -digest, refusal is not None], device=device)
        self.all_reduce_max(found)
        highest, lowest, refused = found.tolist()  # waits, twice for a construction
        if highest == -lowest and not refused:
            return
        reason = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        others = sorted(self.gather_objects((dist.get_rank(), lines, reason)))
        for other, _, reason in others:
            if reason is not None:
                raise ValueError(f"{this_rank()}: rank {other} refused what it was given, so all do; it said {reason}")
        other, theirs = next((rank, there) for rank, there, _ in others if there != lines)
        pairs = itertools.zip_longest(lines, theirs, fillvalue="nothing more")
        here, there = next((here, there) for here, there in pairs if here != there)
        raise ValueError(
            f"{this_rank()}: the ranks of the mesh must be given the same parameters in the same order and the same "
            f"options, or each would train its slices in its own way; here is {here}; on rank {other}, {there}"
        )

    def all_reduce_max(self, value: Tensor) -> None:
        """Leave in `value` the maximum over the mesh."""
        for group in self._axes:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)


def this_rank() -> str:
    """How an error names this process."""
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"


def _refuse_to_gather(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"{this_rank()}: a shard of a ShardedOptimizer can't be gathered, redistributed or saved as a DTensor: ranks "
        "own parts of any length, which its placements don't tell. Its to_local() is this rank's part; whole "
        "parameters are in the model; the optimizer's full_state_dict() and sharded_state_dict() are for saving"
    )


def _by_host(ranks: list[int], group: ProcessGroup) -> tuple[list[int], int]:
    """The ranks ordered by host, and how many share one."""
    names: list[str] = [""] * len(ranks)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    nodes: dict[str, list[int]] = {}
    for rank, name in zip(ranks, names, strict=True):
        nodes.setdefault(name, []).append(rank)
    sizes = {name: len(node) for name, node in nodes.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"rank {dist.get_rank()}: nodes of unequal size can't share one mesh: {sizes}; give a size")
    return [rank for node in nodes.values() for rank in node], len(ranks) // len(nodes)


def _group_with_this_rank(rows: Iterable[Tensor]) -> ProcessGroup:
    rank = dist.get_rank()
    row = next(row.tolist() for row in rows if rank in row.tolist())
    group = dist.new_group(row, use_local_synchronization=True, sort_ranks=False)
    assert isinstance(group, ProcessGroup)
    return group
