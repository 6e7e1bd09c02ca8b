"""The two questions: how long is the whole gradient, and how long is each tensor of it."""

from collections.abc import Hashable, Mapping
from typing import Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_gradnorm._memory import Seen
from stepstack_gradnorm._part import Grads, in_parts
from stepstack_gradnorm._plan import added, device_of, home, moved, totals
from stepstack_gradnorm._shares import Shares
from stepstack_gradnorm._sums import Maximum, check, sum_for

Name = TypeVar("Name", bound=Hashable)


@overload
def total_norm(
    grads: Grads,
    norm_type: float = 2.0,
    *,
    agree_over: dist.ProcessGroup | None = None,
    part_norms: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def total_norm(
    grads: Grads,
    norm_type: float = 2.0,
    *,
    agree_over: dist.ProcessGroup | None = None,
    part_norms: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@torch.no_grad()
def total_norm(
    grads: Grads,
    norm_type: float = 2.0,
    *,
    agree_over: dist.ProcessGroup | None = None,
    part_norms: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of all gradients as one vector, whoever holds what: a 0-d tensor that stays on the device.

    It is fp32, but fp64 if one of the gradients given here is fp64 or complex128.

    For the tensors of one process it is `torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]).double())`,
    to 1e-6 of itself (1e-14 for fp64), without the copies. It is not finite if an element is not (with `norm_type=0` it
    always is), or if its dtype can't hold it, and in no other case.

    `grads`: a tensor, a Part, or an iterable of both; None is skipped (`grads_of` keeps its place), and what is given
    twice counts once. A DTensor is added up over the axes of its mesh that shard it, a Part over its groups; any other
    tensor is this process's own. Partial placements cost an all-reduce of that gradient.
    `norm_type`: 0 (the number of non-zero elements), any positive number, or `math.inf`.
    `agree_over`: a group whose ranks all get the largest of their norms, for Parts that end in different groups.
    `part_norms=True`: also the norms of the Parts, as a vector in their order, out of the same reduction.
    `backend`: how squares are added up; `backends()` tells what there is.

    All ranks of all groups call it with the same Parts and DTensors in the same order. They communicate by one
    all-reduce of a few numbers for each group of more than one rank, whichever gradients are there. No host sync,
    unless a sparse gradient has to be coalesced. The result lies on the device of the last reduction.
    TypeError for what is no gradient (a Parameter is none), ValueError for a norm_type or a backend that is none, and
    for a DTensor outside of Parts whose mesh leaves out ranks that the other gradients are on, since it says nothing of
    what those hold. Other DTensors are on the ranks of their meshes, other tensors on all.
    """
    check(norm_type, backend)
    shares = Shares()
    seen: Seen = {}
    labels: list[int] = []
    for tensors, part in in_parts(grads):
        if part is not None:
            labels.append(len(labels))
        shares.add(tensors, part, labels[-1] if part_norms and part is not None else None, seen)
    _check_inside(shares, agree_over)
    if agree_over is None and (unknown := shares.unknown()):
        raise ValueError(
            f"rank {dist.get_rank()}: {unknown} Put it into a Part: sharded_over=() says the same, or sharded_over="
            "<the groups whose ranks hold other pieces>"
        )
    is_wide = shares.has_fp64()
    sum_ = sum_for(norm_type, backend, no_fp64_anywhere=not (is_wide or shares.groups))
    sums = totals(shares, sum_)
    total = added([*sums.values()], sum_)
    if not part_norms:
        return _rounded(_agreed(sum_.norm(total), agree_over), is_wide)
    values = torch.stack([total, *(sums[label].to(total.device) for label in labels)])
    norms = _rounded(_agreed(sum_.norm(values), agree_over), is_wide)
    return norms[0], norms[1:]


@torch.no_grad()
def tensor_norms(
    grads: Mapping[Name, Grads | None],
    norm_type: float = 2.0,
    *,
    agree_over: dist.ProcessGroup | None = None,
) -> dict[Name, Tensor]:
    """The norm of each gradient, by name, as `total_norm` of it would be, out of one reduction for all.

    Every rank passes the same names in the same order; the norm of None is 0. All are fp64 if one gradient is.
    """
    if not isinstance(grads, Mapping):
        raise TypeError(f"gradients are given by name, {{name: gradient}}, not as {type(grads).__name__}")
    check(norm_type)
    sum_, shares = sum_for(norm_type), Shares()
    for name, grad in grads.items():
        seen: Seen = {}
        for tensors, part in in_parts(() if grad is None else grad, f"gradient {name!r}"):
            shares.add(tensors, part, name, seen)
    _check_inside(shares, agree_over)
    sums = totals(shares, sum_)
    if not sums:
        return {}
    device = home(value.device for value in sums.values())
    norms = sum_.norm(torch.stack([moved(value, device) for value in sums.values()]))
    return dict(zip(grads, _rounded(_agreed(norms, agree_over), shares.has_fp64()).unbind(), strict=True))


def _check_inside(shares: Shares, agree_over: dist.ProcessGroup | None) -> None:
    if not (agree_over is None or isinstance(agree_over, dist.ProcessGroup)):
        raise TypeError(f"agree_over is a ProcessGroup that this rank is in, not {agree_over!r}")
    if shares.outside and agree_over is None:
        raise ValueError(f"{shares.outside}: it learns the norm by agree_over=<a group of it and of ranks inside>")


def _rounded(norms: Tensor, is_wide: bool) -> Tensor:
    return norms if is_wide else norms.float()


def _agreed(norms: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest of each over the ranks of the group."""
    if group is None:
        return norms
    packed = moved(norms.reshape(-1), device_of(group, norms.device))
    return Maximum(packed.dtype).all_reduce(packed, group).reshape(norms.shape)
