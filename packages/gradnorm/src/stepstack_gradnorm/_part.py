"""What a caller hands in: tensors, and Parts that say over which groups tensors are spread."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = dist.ProcessGroup | DeviceMesh


class Part:
    """Tensors of which the ranks of these groups hold different pieces; other ranks hold the same, counted once.

        Part(expert_gradients, sharded_over=expert_group)
        Part(layer_gradients, sharded_over=(tensor_group, pipeline_group))

    `tensors`: a tensor or an iterable of tensors, read once. None is skipped; a DTensor adds the groups of its mesh.
    `sharded_over`: a ProcessGroup, a DeviceMesh (all its axes), or an iterable of these; one given twice counts once.

    Every rank of the groups passes the same Parts in the same order, with their groups in the same order (tensor before
    pipeline, say, on all), an empty one where it holds nothing. A rank outside of a group (`new_group` gave it
    `GroupMember.NON_GROUP_MEMBER`) may pass that, with an empty Part.
    """

    def __init__(self, tensors: Tensor | Iterable[Tensor | None], sharded_over: Group | Iterable[Group] = ()) -> None:
        self.tensors = tuple(_tensors(tensors))
        groups = tuple(_groups(sharded_over))
        self.sharded_over = tuple(group for group in groups if isinstance(group, dist.ProcessGroup))
        self.is_inside = len(self.sharded_over) == len(groups)
        if self.tensors and not self.is_inside:
            raise ValueError(
                f"rank {dist.get_rank()} is outside of a group that this Part is sharded over, yet holds "
                f"{len(self.tensors)} tensors of it: leave the Part empty there"
            )


Grads: TypeAlias = Tensor | Part | Iterable[Tensor | Part | None]


def in_parts(grads: Grads, name: str = "a gradient") -> Iterator[tuple[Sequence[Tensor], Part | None]]:
    """The tensors of each Part, and of what stands between Parts those of this process alone, with None.

    TypeError, with the name, for what can't be a gradient.
    """
    items = (grads,) if isinstance(grads, Part) else [*_listed(grads)]
    if {*map(type, items)} == {Tensor}:  # the common case, quickly
        yield _checked(items, name), None
        return
    loose: list[object] = []
    for item in items:
        if isinstance(item, Part):
            yield _checked(loose, name), None
            yield _checked(item.tensors, name), item
            loose = []
        elif item is not None:
            loose.append(item)
    yield _checked(loose, name), None


def _checked(grads: Sequence[object], name: str) -> Sequence[Tensor]:
    if {*map(type, grads)} == {Tensor} and all(map(Tensor.is_floating_point, grads)):  # type: ignore[arg-type]
        return grads  # type: ignore[return-value]
    return [grad if type(grad) is Tensor and grad.is_floating_point() else _gradient(grad, name) for grad in grads]


def _gradient(grad: object, name: str) -> Tensor:
    """`grad` itself, if it can be a gradient."""
    if not isinstance(grad, Tensor):
        raise TypeError(f"{name} is a Tensor or None, not {type(grad).__name__}: {str(grad)[:60]}")
    if isinstance(grad, nn.Parameter):
        raise TypeError(
            f"{name} is a Parameter: pass grads_of(parameters), or parameter.detach() if you mean its value"
        )
    if not (grad.is_floating_point() or grad.is_complex()):
        raise TypeError(f"{name} is floating point or complex, not {grad.dtype}")
    return grad


def _tensors(tensors: object) -> Iterator[Tensor]:
    for tensor in _listed(tensors):
        if isinstance(tensor, Tensor):
            yield tensor
        elif tensor is not None:
            raise TypeError(f"a Part is made of Tensors, not of {type(tensor).__name__}: {str(tensor)[:60]}")


def _listed(tensors: object) -> Iterable[object]:
    if isinstance(tensors, Tensor):
        return (tensors,)
    if isinstance(tensors, Mapping):
        raise TypeError("gradients are given as an iterable, not as a mapping: pass its .values(), or use tensor_norms")
    if not isinstance(tensors, Iterable):
        raise TypeError(f"gradients are a Tensor or an iterable of Tensors, not {type(tensors).__name__}")
    return tensors


def _groups(groups: object) -> Iterator[object]:
    if isinstance(groups, DeviceMesh):
        is_inside = groups.get_coordinate() is not None
        yield from groups.get_all_groups() if is_inside else (dist.GroupMember.NON_GROUP_MEMBER,)
    elif isinstance(groups, dist.ProcessGroup) or groups is dist.GroupMember.NON_GROUP_MEMBER:
        yield groups
    elif groups is None:
        raise TypeError("sharded_over=None: say torch.distributed.group.WORLD if all ranks hold different pieces")
    elif isinstance(groups, Iterable) and not isinstance(groups, str):
        for group in groups:
            yield from _groups(group)
    else:
        raise TypeError(f"sharded_over is made of ProcessGroups and DeviceMeshes, not {type(groups).__name__}")
