"""A whole state dict as a caller gives it, read by name and checked, so that nothing in it can fail later."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._options import shown
from stepstack_sharded_states._params import Group, names_in
from stepstack_sharded_states._states import of_another_kind


def read(state_dict: Any, groups: Sequence[Group]) -> dict[str, Any] | None:
    """Its values by flat keys: `state.<parameter>.<state>`, plain tensors and numbers; and
    `param_groups.<parameter>.<option>`, plain values that can be sent. None where there is nothing.

    States go by the names that the dict has, or, where it or the optimizer has none, by their places in `groups`.
    Raises TypeError or ValueError for what is malformed.
    """
    if state_dict is None:
        return None
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{this_rank()}: a whole state dict must be a dict, or None; got {type(state_dict).__name__}")
    if not state_dict:
        return None
    if "cut" in state_dict:
        raise ValueError(
            f"{this_rank()}: this is one rank's share, of state_dict() or local_state_dict(), and no whole state dict: "
            "give each rank its own to load_state_dict()"
        )
    entries = _of_groups(state_dict, groups) if "param_groups" in state_dict else _flat(state_dict)
    values = {}
    for key, value in entries:
        if key.startswith("param_groups."):
            values[key] = _option(key, value)
        elif value is not None:  # as torch leaves what it has no use for
            values[key] = _state(key, value)
    return values


def _flat(state_dict: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    keys = [key for key in state_dict if isinstance(key, str) and key.startswith(("state.", "param_groups."))]
    if not keys:
        raise ValueError(
            f"{this_rank()}: this is no whole state dict: it has {', '.join(map(repr, list(state_dict)[:5]))}, but "
            "neither 'state' and 'param_groups' nor keys that begin with 'state.'"
        )
    return [(key, state_dict[key]) for key in keys]


def _of_groups(state_dict: Mapping[Any, Any], groups: Sequence[Group]) -> Iterator[tuple[str, Any]]:
    states, options = state_dict.get("state"), state_dict["param_groups"]
    if not isinstance(states, Mapping):
        raise ValueError(f"{this_rank()}: the state dict's 'state' must be a dict, {_is(state_dict, 'state')}")
    if not isinstance(options, list | tuple) or not all(isinstance(group, Mapping) for group in options):
        raise ValueError(f"{this_rank()}: the state dict's 'param_groups' must be a list of dicts: {options!r:.200}")
    names: dict[Any, str] = {}
    for number, group in enumerate(options):
        for name, key in zip(_names_of(number, group, groups), group["params"], strict=True):
            if key in names:
                raise ValueError(f"{this_rank()}: group {number} of the state dict lists {key!r} for a second time")
            names[key] = name
            for option, value in group.items():
                if option not in ("params", "param_names"):
                    yield f"param_groups.{name}.{_word(option)}", value
    for key, values in states.items():
        if key not in names:
            raise ValueError(f"{this_rank()}: the state dict has states of {key!r}, which none of its groups lists")
        if not isinstance(values, Mapping):
            raise ValueError(f"{this_rank()}: the states of {names[key]!r} must be a dict, got {values!r:.200}")
        for state, value in values.items():
            yield f"state.{names[key]}.{_word(state)}", value


def _names_of(number: int, group: Mapping[str, Any], groups: Sequence[Group]) -> list[str]:
    """Of the parameters of a group: its own, or ours where it has numbers only."""
    where, keys = f"{this_rank()}: group {number} of the state dict", group.get("params")
    if not isinstance(keys, list | tuple) or not all(isinstance(key, int | str) for key in keys):
        raise ValueError(f"{where} must have a list of numbers or names in 'params', {_is(group, 'params')}")
    names = group.get("param_names", keys if keys and all(isinstance(key, str) for key in keys) else None)
    if names is not None and any(ours.named for ours in groups):
        if not isinstance(names, list | tuple) or len(names) != len(keys):
            raise ValueError(f"{where} has {len(keys)} params, and must have as many names; got {names!r:.200}")
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where} must have strings in 'param_names', got {names!r:.200}")
        return list(names)
    here = names_in(groups[number]) if number < len(groups) else []
    if len(here) != len(keys):
        raise ValueError(
            f"{where} has {len(keys)} parameters, known by their places, that of this optimizer {len(here)}: make "
            "groups as they were when it was saved"
        )
    return here


def _state(key: str, value: Any) -> Any:
    """A plain tensor that lies in memory, or a number of Python's."""
    name, _, state = key.removeprefix("state.").rpartition(".")
    what = f"{this_rank()}: the checkpoint doesn't fit, nothing has been loaded: its {state} of {name!r}"
    if isinstance(value, Real):
        return value if isinstance(value, int) else float(value)
    if not isinstance(value, Tensor):
        advice = " (torch.from_numpy makes one)" if type(value).__module__ == "numpy" else ""
        raise ValueError(f"{what} must be a tensor or a number{advice}, got {type(value).__name__}")
    if (kind := of_another_kind(value)) is not None:
        raise ValueError(f"{what} is {kind}: it must be a plain tensor, whole and dense")
    return value.detach().resolve_conj().resolve_neg()


def _option(key: str, value: Any) -> Any:
    """A plain value that can be sent."""
    name, _, option = key.removeprefix("param_groups.").rpartition(".")
    what = f"{this_rank()}: the checkpoint doesn't fit, nothing has been loaded: its {option} of {name!r}"
    if isinstance(value, Tensor) and (kind := of_another_kind(value)) is not None:
        raise ValueError(f"{what} is {kind}: it must be a plain tensor or another plain value")
    value = shown({option: value})[option]
    try:
        pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise ValueError(f"{what} can't be sent to other ranks: {error}") from error
    return value


def _word(key: Any) -> str:
    if not isinstance(key, str) or "." in key:
        raise ValueError(
            f"{this_rank()}: the state dict has {key!r}, where the name of a state or an option, a string without "
            "dots, must be"
        )
    return key


def _is(mapping: Mapping[Any, Any], key: str) -> str:
    return f"got {mapping[key]!r:.200}" if key in mapping else "and it has none"
