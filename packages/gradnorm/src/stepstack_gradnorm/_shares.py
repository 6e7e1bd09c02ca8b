"""Who holds what: items become local tensors, sorted by the groups whose ranks hold the other pieces."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from stepstack_gradnorm._part import Part
from stepstack_gradnorm._runs import identity, local_tensor


@dataclass
class Share:
    """What this rank holds of the tensors with one label that are spread over the same groups."""

    label: Hashable
    groups: frozenset[str]  # names, the same on all members
    tensors: list[Tensor] = field(default_factory=list)


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

    def add(self, item: Tensor | Part, label: Hashable, seen: set[Hashable]) -> None:
        """Put an item where it belongs. What is in `seen` already is left out, what is not is added to it."""
        if isinstance(item, Tensor):
            self._put(item, label, frozenset(), seen)
            return
        names = self._of_part(item)
        self._share(label, names)  # on every rank, also where the Part is empty
        for tensor in item.tensors:
            self._put(tensor, label, names, seen)

    def _put(self, tensor: Tensor, label: Hashable, names: frozenset[str], seen: set[Hashable]) -> None:
        local = local_tensor(tensor)
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                self.outside = f"rank {dist.get_rank()} is outside of the mesh of a DTensor, {tensor.device_mesh}"
                return
            names = names | self._of_dtensor(tensor)
        share = self._share(label, names)
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(
                placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            )
        if local.numel() and (key := identity(local)) not in seen:
            seen.add(key)
            share.tensors.append(local_tensor(tensor))

    def _share(self, label: Hashable, names: frozenset[str]) -> Share:
        return self._shares.setdefault((label, names), Share(label, names))

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
