"""Who holds what: items become local tensors, sorted by the groups whose ranks hold the other pieces."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Layout(NamedTuple):
    """What placements on a mesh mean for a norm."""

    groups: frozenset[str]  # names of those whose ranks hold other pieces
    is_partial: bool  # whether ranks hold terms of a sum


class Shares:
    """The shares of this rank, in an order that follows from the structure, and the groups that they name."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.of_parts: set[str] = set()  # named by a Part, so every rank of the group knows of it
        self.outside = ""  # why this rank can't know the whole norm by itself
        self._shares: dict[tuple[Hashable, frozenset[str]], Share] = {}
        self._layouts: dict[tuple[DeviceMesh, object], Layout | None] = {}

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
        layout = self._layout(tensor)
        if layout is None:
            self.outside = f"rank {dist.get_rank()} is outside of the mesh of a DTensor, {tensor.device_mesh}"
            return
        memory = self._share(label, names | layout.groups).memory
        if layout.is_partial:
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

    def _layout(self, tensor: DTensor) -> Layout | None:
        """What a DTensor's is, None if this rank has no place in its mesh."""
        mesh, placements = key = tensor.device_mesh, tensor.placements
        if key not in self._layouts:
            partial = [placement.is_partial() for placement in placements]
            cut = [axis for axis, placement in enumerate(placements) if not (placement.is_replicate() or partial[axis])]
            is_inside = mesh.get_coordinate() is not None
            self._layouts[key] = Layout(self._named(map(mesh.get_group, cut)), any(partial)) if is_inside else None
        return self._layouts[key]

    def _named(self, groups: Iterable[dist.ProcessGroup]) -> frozenset[str]:
        several = {str(group.group_name): group for group in groups if group.size() > 1}
        self.groups |= several
        return frozenset(several)


def _added_up(tensor: DTensor) -> DTensor:
    """Without Partial placements. Communicates as much as the local tensor holds."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)
