"""Who holds what: items become local tensors, sorted by the groups whose ranks hold the other pieces."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from stepstack_gradnorm._memory import Memory, Seen, local_tensor
from stepstack_gradnorm._part import Part


@dataclass
class Share:
    """What this rank holds of the tensors with one label that are spread over the same groups."""

    label: Hashable
    groups: frozenset[str]  # names, the same on all members
    memory: Memory = field(default_factory=Memory)


class Shares:
    """The shares of this rank, in an order that follows from the structure, and the groups that they name."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.of_parts: set[str] = set()  # named by a Part, so every rank of the group knows of it
        self.outside = ""  # why this rank can't know the whole norm by itself
        self._shares: dict[tuple[Hashable, frozenset[str]], Share] = {}
        self._of_mesh: dict[tuple[DeviceMesh, object], frozenset[str]] = {}

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def add(self, tensors: Iterable[Tensor], part: Part | None, label: Hashable, seen: Seen) -> None:
        """Put the tensors of a Part, or of this process, where they belong. What has been seen already is left out."""
        names: frozenset[str] = frozenset() if part is None else self._of_part(part)
        own = self._share(label, names)  # there on every rank, also where it is empty
        for tensor in tensors:
            if type(tensor) is not Tensor and isinstance(tensor, DTensor):
                self._add_dtensor(tensor, label, names, seen)
            else:
                own.memory.add(tensor, seen)

    def _add_dtensor(self, tensor: DTensor, label: Hashable, names: frozenset[str], seen: Seen) -> None:
        if tensor.device_mesh.get_coordinate() is None:
            self.outside = f"rank {dist.get_rank()} is outside of the mesh of a DTensor, {tensor.device_mesh}"
            return
        memory = self._share(label, names | self._of_dtensor(tensor)).memory
        if any(placement.is_partial() for placement in tensor.placements):
            memory.add(local_tensor(tensor), seen, local_tensor(_added_up(tensor)))
        else:
            memory.add(local_tensor(tensor), seen)

    def _share(self, label: Hashable, names: frozenset[str]) -> Share:
        if (label, names) not in self._shares:
            self._shares[label, names] = Share(label, names)
        return self._shares[label, names]

    def _of_part(self, part: Part) -> frozenset[str]:
        if not part.is_inside:
            self.outside = f"rank {dist.get_rank()} is outside of a group that a Part is sharded over"
        names = self._named(part.sharded_over)
        self.of_parts |= names
        return names

    def _of_dtensor(self, tensor: DTensor) -> frozenset[str]:
        mesh, placements = tensor.device_mesh, tensor.placements
        if (mesh, placements) not in self._of_mesh:
            self._of_mesh[mesh, placements] = self._named(
                [
                    mesh.get_group(axis)
                    for axis, placement in enumerate(placements)
                    if not (placement.is_replicate() or placement.is_partial())
                ]
            )
        return self._of_mesh[mesh, placements]

    def _named(self, groups: Iterable[dist.ProcessGroup]) -> frozenset[str]:
        several = {str(group.group_name): group for group in groups if group.size() > 1}
        self.groups |= several
        return frozenset(several)


def _added_up(tensor: DTensor) -> DTensor:
    """Without Partial placements. Communicates as much as the local tensor holds."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)
