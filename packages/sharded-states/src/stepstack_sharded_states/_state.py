"""The inner optimizer's state dict, which counts the pieces of one rank, and ours, which counts parameters."""

from collections.abc import Iterator
from typing import Any

from ._bucket import Member
from ._mesh import Ranks, this_rank
from ._params import Group


def from_inner(inner: dict[str, Any], groups: list[Group], ranks: Ranks) -> dict[str, Any]:
    """torch's format, with this rank's piece of each parameter's states and, under "cut", which pieces those are."""
    number = {position: index for index, position in enumerate(_owned(groups))}
    position = {index: position for position, index in number.items()}
    first = _first_of_each(groups)
    return {
        "state": {position[index]: state for index, state in inner["state"].items()},
        "param_groups": [
            {**options, "params": list(range(start, start + len(group.members)))}
            for options, group, start in zip(inner["param_groups"], groups, first, strict=True)
        ],
        "cut": _cut(groups, ranks),
    }


def to_inner(state_dict: dict[str, Any], groups: list[Group], ranks: Ranks) -> dict[str, Any]:
    """The way back. Raises ValueError, with both, where the state dict is of another cut or other groups."""
    cut = _cut(groups, ranks)
    if state_dict.get("cut") != cut:
        raise ValueError(
            f"{this_rank()}: this state dict is of another cut: it must come from the same rank of a run with as many "
            f"ranks, the same parameters and buckets. Here: {_short(cut)}; there: {_short(state_dict.get('cut'))}"
        )
    index = {position: index for index, position in enumerate(_owned(groups))}
    return {
        "state": {index[position]: state for position, state in state_dict["state"].items()},
        "param_groups": [
            {**options, "params": [index[position] for position in options["params"] if position in index]}
            for options in state_dict["param_groups"]
        ],
    }


def _owned(groups: list[Group]) -> Iterator[int]:
    """Positions, among all parameters, of those that this rank owns a piece of, in the inner optimizer's order."""
    members: list[Member] = [member for group in groups for member in group.members]
    return (position for position, member in enumerate(members) if member.piece is not None)


def _first_of_each(groups: list[Group]) -> list[int]:
    firsts = [0]
    for group in groups[:-1]:
        firsts.append(firsts[-1] + len(group.members))
    return firsts


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
