"""The inner optimizer's state dict, which counts the pieces of one rank, and ours, which counts parameters."""

import itertools
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from stepstack_sharded_states._bucket import Member
from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._params import Group


def from_inner(inner: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """torch's format, with this rank's piece of each parameter's states and, under "cut", which pieces those are.

    A master copy that the wrapper owns stands beside the inner optimizer's states, as "master_weight".
    """
    owned = _owned(groups)
    state = {position: dict(inner["state"].get(index, {})) for index, (position, _) in enumerate(owned)}
    for position, member in owned:
        if _has_master(member):
            state[position]["master_weight"] = _piece(member).detach().clone()
    firsts = itertools.accumulate((len(group.members) for group in groups[:-1]), initial=0)
    return {
        "state": {position: values for position, values in state.items() if values},
        "param_groups": [
            {**options, "params": list(range(first, first + len(group.members)))}
            for options, group, first in zip(inner["param_groups"], groups, firsts, strict=True)
        ],
        "cut": _cut(groups),
        "masters": _masters(groups),
    }


def to_inner(state_dict: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """The inner optimizer's part of a state dict of ours. ValueError where it doesn't fit."""
    cut = _cut(groups)
    if state_dict.get("cut") != cut:
        difference = _difference(cut, state_dict.get("cut"), groups)
        raise ValueError(
            f"{this_rank()}: this state dict doesn't fit: it must be the same rank's, of a run with as many ranks, the "
            f"same parameters in the same memory format, and the same buckets; {difference}. A whole one, saved after "
            "consolidate_state_dict() on all ranks, fits any number of them"
        )
    if state_dict.get("masters") != _masters(groups):
        raise ValueError(
            f"{this_rank()}: this state dict doesn't fit: it was saved with another inner_dtype, so of some parameters "
            "it lacks the master copy, or has one too many"
        )
    owned = _owned(groups)
    index = {position: index for index, (position, _) in enumerate(owned)}
    for position, member in owned:
        master = state_dict["state"].get(position, {}).get("master_weight")
        if _has_master(member) and (not isinstance(master, Tensor) or master.shape != _piece(member).shape):
            raise ValueError(
                f"{this_rank()}: this state dict doesn't fit: of {member.name!r} its master_weight is {master!r:.200}"
            )
    state = {index[position]: dict(values) for position, values in state_dict["state"].items()}
    for number, (_, member) in enumerate(owned):
        if _has_master(member) and number in state:
            del state[number]["master_weight"]
    return {
        "state": {number: values for number, values in state.items() if values},
        "param_groups": [
            {**options, "params": [index[position] for position in options["params"] if position in index]}
            for options in state_dict["param_groups"]
        ],
    }


def load_masters(state_dict: dict[str, Any], groups: list[Group]) -> None:
    """Copy the master weights that the wrapper owns into place."""
    for position, member in _owned(groups):
        if _has_master(member):
            _piece(member).detach().copy_(state_dict["state"][position]["master_weight"])


def _owned(groups: list[Group]) -> list[tuple[int, Member]]:
    """Those that this rank owns a piece of, with their number among all, in the inner optimizer's order."""
    members = [member for group in groups for member in group.members]
    return [(position, member) for position, member in enumerate(members) if member.piece is not None]


def _piece(member: Member) -> Parameter:
    assert member.piece is not None
    return member.piece


def _has_master(member: Member) -> bool:
    return member.shard.dtype != member.param.dtype


def _masters(groups: list[Group]) -> list[int]:
    """Those whose master copy is ours, by number."""
    members = [member for group in groups for member in group.members]
    return [position for position, member in enumerate(members) if _has_master(member)]


def _cut(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    """What must be the same for states to mean the same: each parameter's shape, order in memory and piece."""
    return [
        [(*member.param.shape, *_order(member.param), *member.interval) for member in group.members] for group in groups
    ]


def _order(param: Parameter) -> list[int]:
    """Its strides, less those that don't matter."""
    return [stride if length > 1 else 0 for length, stride in zip(param.shape, param.stride(), strict=True)]


def _difference(ours: Any, theirs: Any, groups: list[Group]) -> str:
    """The first thing in which two cuts differ, in words."""
    if theirs is None:
        return "it is not from a ShardedOptimizer"
    if [len(group) for group in theirs] != [len(group) for group in ours]:
        return f"it has groups of {[len(g) for g in theirs]} parameters, not of {[len(group) for group in ours]}"
    for group, our_group, their_group in zip(groups, ours, theirs, strict=True):
        for member, our, their in zip(group.members, our_group, their_group, strict=True):
            if our != their:
                return f"of {member.name!r} it has shape, stride and interval {tuple(their)}, not {our}"
    return "it is the same"
