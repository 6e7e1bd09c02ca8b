"""Options of parameter groups, on their way into a checkpoint and back."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from stepstack_sharded_states._mesh import this_rank

# How a step runs, and what kind of optimizer it is: the constructor says that, not a checkpoint.
_OWN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def shown(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group in plain numbers. Reads those that are tensors: on a GPU, that waits."""
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}


def check_alike(named: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ValueError unless parameters that share a group have the same options."""
    first: dict[str, tuple[str, Any]] = {}
    for name, options in named:
        for key, value in options.items():
            other, expected = first.setdefault(key, (name, value))
            if key not in _OWN and _plain(expected) != _plain(value):
                raise ValueError(
                    f"{this_rank()}: parameters {other!r} and {name!r} share a group here, but in the checkpoint they "
                    f"have {key} {expected} and {value}: make groups as they were when it was saved"
                )


def take_over(group: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Give a group loaded options. Numbers stay numbers, tensors keep their address."""
    for key, value in loaded.items():
        if key not in _OWN:
            group[key] = _in_the_form_of(group.get(key), _plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.detach().clone()
    for kind in (bool, int, float, str):  # a number of numpy may be a subclass of these
        if isinstance(value, kind):
            return kind(value)
    return value


def _in_the_form_of(live: Any, value: Any) -> Any:
    if isinstance(live, tuple) and isinstance(value, tuple | list) and len(live) == len(value):
        return tuple(map(_in_the_form_of, live, value))
    if isinstance(live, Tensor) and isinstance(value, int | float):
        return live.fill_(value)
    return value
