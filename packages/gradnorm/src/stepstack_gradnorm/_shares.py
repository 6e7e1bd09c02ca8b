"""Who holds what: items become local tensors, sorted by the groups whose ranks hold the other pieces."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
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


@dataclass
class Layout:
    """What placements on a mesh mean for a norm."""

    mesh: DeviceMesh
    groups: frozenset[str]  # names of those whose ranks hold other pieces
    is_partial: bool  # whether ranks hold terms of a sum
    is_alone: bool = False  # whether a DTensor has it that no Part says anything of


class Shares:
    """The shares of this rank, in an order that follows from the structure, and the groups that they name."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.of_parts: set[str] = set()  # named by a Part, so every rank of the group knows of it
        self.outside = ""  # why this rank can't know the whole norm by itself
        self._shares: dict[tuple[Hashable, frozenset[str]], Share] = {}
        self._layouts: dict[tuple[DeviceMesh, object], Layout | None] = {}
        self._in_parts: dict[int, DTensor] = {}  # by id
        self._has_own = False  # whether there is a tensor of this process's own, outside of Parts

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def add(self, tensors: Sequence[Tensor], part: Part | None, label: Hashable, seen: Seen) -> None:
        """Put the tensors of a Part, or of this process, where they belong. What has been seen already is left out."""
        names: frozenset[str] = frozenset() if part is None else self._of_part(part)
        own = self._share(label, names)  # there on every rank, also where it is empty
        if own.memory.add_all(tensors, seen):
            self._has_own |= part is None
            return
        has_own = False
        for tensor in tensors:
            if type(tensor) is not Tensor and isinstance(tensor, DTensor):
                self._add_dtensor(tensor, part, label, names, seen)
            else:
                own.memory.add(tensor, seen)
                has_own = has_own or tensor.numel() > 0
        self._has_own |= has_own and part is None

    def has_fp64(self) -> bool:
        """Whether one of the tensors, empty ones too, has real numbers in fp64."""
        return any(dtype in (torch.float64, torch.complex128) for share in self for dtype in share.memory.dtypes)

    def unknown(self) -> str:
        """Why ranks may not have the same norm: a DTensor that no Part has, on a mesh without some of these ranks."""
        layouts = [layout for layout in self._layouts.values() if layout is not None]
        alone = {layout.mesh: None for layout in layouts if layout.is_alone}
        if not alone or (len({layout.mesh for layout in layouts}) == 1 and not self._has_own):
            return ""
        everyone = frozenset(range(dist.get_world_size()) if self._has_own else ()).union(
            *(_ranks(layout.mesh) for layout in layouts)
        )
        for mesh in alone:
            if outside := everyone - _ranks(mesh):
                return (
                    f"a DTensor lies on the ranks {sorted(_ranks(mesh))} alone, and other gradients on the ranks "
                    f"{sorted(outside)} too: do these hold the same of it, or other pieces (experts, say)?"
                )
        return ""

    def _add_dtensor(
        self, tensor: DTensor, part: Part | None, label: Hashable, names: frozenset[str], seen: Seen
    ) -> None:
        layout = self._layout(tensor)
        if layout is None:
            self.outside = f"rank {dist.get_rank()} is outside of the mesh of a DTensor, {tensor.device_mesh}"
            return
        memory = self._share(label, names | layout.groups).memory
        content = local_tensor(_added_up(tensor)) if layout.is_partial else None
        is_new = memory.add(local_tensor(tensor), seen, content)
        if part is not None:
            self._in_parts[id(tensor)] = tensor
        elif is_new and id(tensor) not in self._in_parts:
            layout.is_alone = True

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
            self._layouts[key] = (
                Layout(mesh, self._named(map(mesh.get_group, cut)), any(partial)) if is_inside else None
            )
        return self._layouts[key]

    def _named(self, groups: Iterable[dist.ProcessGroup]) -> frozenset[str]:
        several = {str(group.group_name): group for group in groups if group.size() > 1}
        self.groups |= several
        return frozenset(several)


@lru_cache(maxsize=64)
def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    if mesh.size() == dist.get_world_size():
        return frozenset(range(mesh.size()))
    if mesh.ndim == 1:
        return frozenset(dist.get_process_group_ranks(mesh.get_group()))
    return frozenset(mesh.mesh.flatten().tolist())  # in the memory of the host, wherever the mesh is


def _added_up(tensor: DTensor) -> DTensor:
    """Without Partial placements. Communicates as much as the local tensor holds."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)
