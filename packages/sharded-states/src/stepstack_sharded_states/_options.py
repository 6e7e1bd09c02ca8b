"""Options of parameter groups, on their way into a checkpoint and back."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from stepstack_sharded_states._mesh import this_rank

# How a step runs, and what kind of optimizer it is: the constructor says that, not a checkpoint.
_OWN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def shown(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group in plain numbers. Reads those that are tensors: on a GPU, that waits."""
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}


def without_own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a checkpoint may say."""
    return {key: value for key, value in options.items() if key not in _OWN}


def check_alike(named: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ValueError unless parameters that share a group have the same options."""
    first: dict[str, tuple[str, Any]] = {}
    for name, options in named:
        for key, value in options.items():
            other, expected = first.setdefault(key, (name, value))
            if key not in _OWN and not _same(_plain(expected), _plain(value)):
                raise ValueError(
                    f"{this_rank()}: parameters {other!r} and {name!r} share a group here, but in the checkpoint they "
                    f"have {key} {expected} and {value}: make groups as they were when it was saved"
                )


def check_kinds(name: str, group: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Raise ValueError where a loaded option can't be what the group has under that name, such as a lr of None."""
    for key, value in loaded.items():
        if key not in _OWN and not _is_like(group.get(key), _plain(value)):
            raise ValueError(
                f"{this_rank()}: the checkpoint doesn't fit, nothing has been loaded: its {key} of {name!r} is "
                f"{value!r:.200}, here it is {group.get(key)!r:.200}"
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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other or (one != one and other != other))  # NaN is itself


def _is_like(live: Any, value: Any) -> bool:
    if isinstance(live, tuple | list):
        return isinstance(value, tuple | list) and len(live) == len(value) and all(map(_is_like, live, value))
    if isinstance(live, Tensor) and live.numel() != 1:
        return isinstance(value, Tensor) and value.shape == live.shape
    return isinstance(value, Real) if isinstance(live, Real | Tensor) else True


def _in_the_form_of(live: Any, value: Any) -> Any:
    if isinstance(live, tuple) and isinstance(value, tuple | list) and len(live) == len(value):
        return tuple(map(_in_the_form_of, live, value))
    if isinstance(live, Tensor) and isinstance(value, int | float):
        return live.fill_(value)
    return value
