"""The states of parameters: what they consist of, and how they begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam import _block8
from stepstack_fused_adam._border import check_cast, check_complete, check_states
from stepstack_fused_adam._counts import as_count, new_counts
from stepstack_fused_adam._definition import States
from stepstack_fused_adam._run import Run, arithmetic, dense_like, is_dense, local, run_of, stretches

State = dict[str, Any]

BLOCK8 = "block8"
# Of the tensors of a state, in the order of `States`.
NAMES = tuple("master_weight" if name == "master" else name for name in States._fields)


@dataclass(frozen=True)
class Precision:
    """How states are stored. Moments: a dtype, "block8", or None for the dtype of the arithmetic."""

    master_weights: str | None = None
    exp_avg: torch.dtype | str | None = None
    exp_avg_sq: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        if self.master_weights not in (None, "fp32", "remainder"):
            raise ValueError(f'master_weights is None, "fp32" or "remainder", not {self.master_weights!r}')
        for name, form in (("exp_avg_dtype", self.exp_avg), ("exp_avg_sq_dtype", self.exp_avg_sq)):
            if form not in (None, torch.float32, torch.bfloat16, BLOCK8):
                raise ValueError(f'{name} is None, torch.float32, torch.bfloat16 or "block8", not {form!r}')

    def dtypes(self, param: Tensor, amsgrad: bool) -> dict[str, torch.dtype]:
        """By name, of what a parameter has besides its step."""
        wide = arithmetic(param.dtype)
        dtypes = {
            "exp_avg": _dtype(self.exp_avg, wide, torch.int8),
            "exp_avg_sq": _dtype(self.exp_avg_sq, wide, torch.uint8),
        }
        if amsgrad:
            dtypes["max_exp_avg_sq"] = _dtype(self.exp_avg_sq, wide, wide)
        if self.master_weights == "remainder" and param.dtype == torch.bfloat16:
            dtypes |= {"remainder_high": torch.int8, "remainder_low": torch.uint8}
        elif self.master_weights and param.dtype.itemsize == 2:
            dtypes["master_weight"] = torch.float32
        for name, form in (("exp_avg_scale", self.exp_avg), ("exp_avg_sq_scale", self.exp_avg_sq)):
            if form == BLOCK8:
                dtypes[name] = torch.float32
        return dtypes


def create(params: Sequence[Tensor], precision: Precision, amsgrad: bool) -> list[State]:
    """States of parameters that begin together: zero moments, masters equal to their parameters.

    On each device their step counts lie one after the other; the states of neighbours in memory are neighbours too.
    """
    states: list[State] = [{} for _ in params]
    here = [local(param.detach()) for param in params]
    for device in {param.device for param in here}:
        alike = [state for param, state in zip(here, states, strict=True) if param.device == device]
        for state, step in zip(alike, new_counts(len(alike), device), strict=True):
            state["step"] = step
    for stretch in neighbours(here, precision):
        first = here[stretch[0]]
        for name, dtype in precision.dtypes(first, amsgrad).items():
            sizes = [_size(name, here[index]) for index in stretch]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
            for index, part in zip(stretch, buffer.split_with_sizes(sizes), strict=True):
                states[index][name] = as_held(name, part, params[index])
    for param, state in zip(params, states, strict=True):
        refresh(param, state)
    return states


def refresh(param: Tensor, state: State) -> None:
    """The master weight becomes what the parameter is."""
    if "master_weight" in state:
        local(state["master_weight"]).copy_(local(param.detach()))
    for name in ("remainder_high", "remainder_low"):
        if name in state:
            local(state[name]).zero_()


def states_here(state: State) -> States:
    """A state as the step sees it: on this rank, in aliases."""
    tensors = (state.get(name) for name in NAMES)
    return States(*(None if tensor is None else local(tensor).detach() for tensor in tensors))  # type: ignore[arg-type]


def member_of(here: Tensor, state: State, precision: Precision, amsgrad: bool, name: str) -> Run:
    """A parameter's state as a step takes it; ValueError, by name, unless it is the one that the parameter needs."""
    wanted = precision.dtypes(here, amsgrad)
    check_cast(state, wanted, here, name)
    check_complete(state, wanted, name)
    state["step"] = as_count(state["step"], here.device)
    states = states_here(state)
    run = run_of(here, state["step"], states if amsgrad else states._replace(max_exp_avg_sq=None))
    check_states(run, name)
    return run


def neighbours(params: Sequence[Tensor], precision: Precision) -> list[list[int]]:
    """Indices of parameters that lie one after the other; with scales, of those that are whole blocks."""
    whole_blocks = BLOCK8 in (precision.exp_avg, precision.exp_avg_sq)
    joinable = {
        index
        for index, param in enumerate(params)
        if param.numel() and is_dense(param) and not (whole_blocks and param.numel() % _block8.BLOCK)
    }
    order = sorted(joinable)
    found = [[order[place] for place in stretch] for stretch in stretches([(params[index],) for index in order])]
    return found + [[index] for index in range(len(params)) if index not in joinable]


def as_held(name: str, part: Tensor, param: Tensor) -> Tensor:
    """A stretch of memory in the shape of the parameter; a DTensor if that is one."""
    if name.endswith("_scale"):
        return part
    here = local(param.detach())
    part = part.as_strided(here.shape, dense_like(here).stride())
    if not isinstance(param, DTensor):
        return part
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _dtype(form: torch.dtype | str | None, wide: torch.dtype, codes: torch.dtype) -> torch.dtype:
    if isinstance(form, torch.dtype):
        return form
    return wide if form is None else codes


def _size(name: str, param: Tensor) -> int:
    return _block8.blocks(param.numel()) if name.endswith("_scale") else param.numel()
