"""The states of one piece in the inner optimizer, by name: what there is, where it lies, how it is filled.

An optimizer's states are what it has in `state`: of each piece, tensors with as many elements, which are cut with it,
and single numbers. One that stores them in another form (codes, parts of numbers) may say so, by two methods:
`numbers(param)` gives by name flat tensors, or objects with `dtype`, `read(start, stop)` and `write(start, values)` of
stretches that start at multiples of 64; and `create_states(params)` makes states that are not there yet.
"""

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class Coded(Protocol):
    """Numbers that are stored in another form."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor: ...

    def write(self, start: int, values: Tensor) -> None: ...


def tensors_of(inner: Optimizer, piece: Tensor) -> dict[str, Tensor | Coded]:
    """Those with as many elements as the piece."""
    if hasattr(inner, "numbers"):
        numbers: dict[str, Tensor | Coded] = inner.numbers(piece)
        return numbers
    state = inner.state.get(piece, {})
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == piece.shape}


def scalars_of(inner: Optimizer, piece: Tensor) -> dict[str, Any]:
    """Those that are one number, 0-d tensors or Python's."""
    state = inner.state.get(piece, {})
    return {
        name: value
        for name, value in state.items()
        if (value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, int | float))
    }


def unsavable(inner: Optimizer, piece: Tensor) -> dict[str, str]:
    """Those that are neither, and what they are, in words: a checkpoint would lose them, or nobody could read it."""
    if hasattr(inner, "numbers"):
        return {}
    kinds: dict[str, str] = {}
    for name, value in inner.state.get(piece, {}).items():
        if isinstance(value, Tensor):
            if (kind := of_another_kind(value)) is not None:
                kinds[name] = kind
            elif value.ndim and value.shape != piece.shape:
                kinds[name] = f"a tensor of shape {tuple(value.shape)}"
        elif not isinstance(value, int | float | None):
            kinds[name] = f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    return kinds


def of_another_kind(value: Tensor) -> str | None:
    """What a tensor is that is not a plain one: numbers in memory, as many as it has elements. None for a plain one."""
    if type(value) not in (Tensor, Parameter):
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    if value.layout is not torch.strided:
        return f"of layout {value.layout}"
    if value.is_quantized or value.is_meta or value.is_complex():
        return "quantized" if value.is_quantized else "on the meta device" if value.is_meta else f"{value.dtype}"
    return None


def foreseen(
    inner: Optimizer, options: dict[str, Any], like: Tensor
) -> tuple[dict[str, Tensor | Coded], dict[str, Any]] | None:
    """What the tensors and the numbers will be like that a piece with `options` has after its first step.

    Found out on a parameter of 64 zeros. None where that fails: an optimizer may need more than a gradient.
    """
    stand_in = Parameter(torch.zeros(64, dtype=like.dtype, device=like.device))
    stand_in.grad = torch.zeros_like(stand_in)
    probe = object.__new__(type(inner))
    try:
        groups = [{**options, "params": [stand_in]}]
        probe.__setstate__({**inner.__getstate__(), "state": defaultdict(dict), "param_groups": groups})
        if hasattr(probe, "create_states"):
            probe.create_states([stand_in])
        else:
            probe.step()
        return tensors_of(probe, stand_in), scalars_of(probe, stand_in)
    except Exception:  # whatever somebody else's step may raise
        return None


def set_numbers(inner: Optimizer, name: str, numbers: list[tuple[Parameter, Any, Any]]) -> None:
    """Give pieces their single numbers, (piece, number, what it is to be like).

    Tensors are filled where they are. Who shares one still does, as long as the numbers are equal.
    """
    taken: dict[int, float] = {}
    apart: dict[tuple[int, float], Tensor] = {}
    for piece, value, like in numbers:
        number = float(value)
        state = inner.state[piece]
        old = state.get(name)
        if not isinstance(old, Tensor):
            state[name] = torch.full_like(like, number) if isinstance(like, Tensor) else type(like)(number)
        elif taken.setdefault(id(old), number) == number:
            old.fill_(number)
        else:
            if (id(old), number) not in apart:
                apart[id(old), number] = torch.full_like(old, number)
            state[name] = apart[id(old), number]
