"""The inner optimizer's state dict, which counts the pieces of one rank, and ours, which counts parameters."""

import itertools
from typing import Any

from torch.nn import Parameter

from ._bucket import Member
from ._mesh import Ranks, this_rank
from ._params import Group


def from_inner(inner: dict[str, Any], groups: list[Group], ranks: Ranks) -> dict[str, Any]:
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
        "cut": _cut(groups, ranks),
    }


def to_inner(state_dict: dict[str, Any], groups: list[Group], ranks: Ranks) -> dict[str, Any]:
    """The inner optimizer's part; master copies are loaded here. ValueError where the state dict is of another cut."""
    cut = _cut(groups, ranks)
    if state_dict.get("cut") != cut:
        raise ValueError(
            f"{this_rank()}: this state dict is of another cut: it must come from the same rank of a run with as many "
            f"ranks, the same parameters and buckets. Here: {_short(cut)}; there: {_short(state_dict.get('cut'))}"
        )
    owned = _owned(groups)
    index = {position: index for index, (position, _) in enumerate(owned)}
    state = {index[position]: dict(values) for position, values in state_dict["state"].items()}
    for number, (_, member) in enumerate(owned):
        if _has_master(member) and number in state:
            _piece(member).detach().copy_(state[number].pop("master_weight"))
    return {
        "state": {number: values for number, values in state.items() if values},
        "param_groups": [
            {**options, "params": [index[position] for position in options["params"] if position in index]}
            for options in state_dict["param_groups"]
        ],
    }


def _owned(groups: list[Group]) -> list[tuple[int, Member]]:
    """Those that this rank owns a piece of, with their number among all, in the inner optimizer's order."""
    members = [member for group in groups for member in group.members]
    return [(position, member) for position, member in enumerate(members) if member.piece is not None]


def _piece(member: Member) -> Parameter:
    assert member.piece is not None
    return member.piece


def _has_master(member: Member) -> bool:
    return _piece(member).dtype != member.param.dtype


def _cut(groups: list[Group], ranks: Ranks) -> dict[str, Any]:
    return {
        "shard": ranks.shard,
        "shards": ranks.shards,
        "pieces": [[[*member.interval] for member in group.members] for group in groups],
    }


def _short(cut: Any) -> str:
    if not isinstance(cut, dict):
        return "none (it is not from a ShardedOptimizer)"
    sizes = [len(group) for group in cut["pieces"]]
    return f"shard {cut['shard']} of {cut['shards']}, groups of {sizes} parameters"
