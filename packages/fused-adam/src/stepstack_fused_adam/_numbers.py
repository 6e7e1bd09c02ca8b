"""A state as the numbers that it stands for, a stretch at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stepstack_fused_adam import _block8, _remainder
from stepstack_fused_adam._run import flat, local
from stepstack_fused_adam._state import State, states_here


@dataclass(frozen=True)
class Coded:
    """Numbers that are stored in another form: elements in the order of memory, counted from the parameter's first."""

    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    """The elements [start, stop), decoded."""
    write: Callable[[int, Tensor], None]
    """Encode those from a multiple of 64 on."""


def numbers(param: Tensor, state: State) -> dict[str, Tensor | Coded]:
    """By the names of torch's AdamW, and `master_weight`: flat views of what is stored as numbers, or their codes."""
    here = local(param.detach())
    states = states_here(state)
    found: dict[str, Tensor | Coded] = {}
    for name, tensor in (("exp_avg", states.exp_avg), ("exp_avg_sq", states.exp_avg_sq)):
        scale = states.exp_avg_scale if name == "exp_avg" else states.exp_avg_sq_scale
        whole = flat(tensor, here.numel())
        found[name] = whole if scale is None else _blocks(name, whole, scale)
    if states.max_exp_avg_sq is not None:
        found["max_exp_avg_sq"] = flat(states.max_exp_avg_sq, here.numel())
    if states.master is not None:
        found["master_weight"] = flat(states.master, here.numel())
    elif states.remainder_high is not None and states.remainder_low is not None:
        parts = (here, states.remainder_high, states.remainder_low)
        found["master_weight"] = _joined(*(flat(part, here.numel()) for part in parts))
    return found


def _blocks(name: str, codes: Tensor, scale: Tensor) -> Coded:
    decode = _block8.decode_first if name == "exp_avg" else _block8.decode_second
    encode = _block8.encode_first if name == "exp_avg" else _block8.encode_second

    def read(start: int, stop: int) -> Tensor:
        first = start // _block8.BLOCK
        whole = slice(first * _block8.BLOCK, stop)
        return decode(codes[whole], scale[first : _block8.blocks(stop)])[start - whole.start :]

    def write(start: int, values: Tensor) -> None:
        stop = start + values.numel()
        there = codes[start:stop], scale[start // _block8.BLOCK : _block8.blocks(stop)]
        for old, new in zip(there, encode(values), strict=True):
            old.copy_(new)

    return Coded(scale.dtype, read, write)


def _joined(param: Tensor, high: Tensor, low: Tensor) -> Coded:
    def read(start: int, stop: int) -> Tensor:
        return _remainder.join(param[start:stop], high[start:stop], low[start:stop])

    def write(start: int, values: Tensor) -> None:
        for old, new in zip((param, high, low), _remainder.split(values), strict=True):
            old[start : start + values.numel()].copy_(new)

    return Coded(torch.float32, read, write)
