"""The states of parameters: made, copied out, copied in. Named and shaped as torch.optim.AdamW's."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam._run import Run, arithmetic, dense_like, is_dense, local, stretches

State = dict[str, Any]


@dataclass(frozen=True)
class Precision:
    """In which dtypes the states are kept; None is the dtype of the arithmetic."""

    master_weights: str | None = None

    def dtypes(self, param: Tensor, amsgrad: bool) -> dict[str, torch.dtype]:
        """By name, of the states that a parameter has besides its step."""
        wide = arithmetic(param.dtype)
        dtypes = {"exp_avg": wide, "exp_avg_sq": wide}
        if amsgrad:
            dtypes["max_exp_avg_sq"] = wide
        if self.master_weights == "fp32" and param.dtype.itemsize == 2:
            dtypes["master_param"] = torch.float32
        return dtypes


def create(params: Sequence[Tensor], precision: Precision, amsgrad: bool) -> list[State]:
    """States of parameters that begin together: zero moments, masters equal to their parameters.

    On each device they share one step tensor, and the states of neighbours in memory are neighbours too.
    """
    states: list[State] = [{} for _ in params]
    locals_ = [local(param.detach()) for param in params]
    steps: dict[torch.device, Tensor] = {}
    for here, state in zip(locals_, states, strict=True):
        if here.device not in steps:
            steps[here.device] = torch.zeros((), dtype=torch.float32, device=here.device)
        state["step"] = steps[here.device]
    for stretch in _neighbours(locals_):
        first = locals_[stretch[0]]
        numel = sum(locals_[index].numel() for index in stretch)
        for name, dtype in precision.dtypes(first, amsgrad).items():
            buffer = torch.zeros(numel, dtype=dtype, device=first.device)
            start = 0
            for index in stretch:
                here = locals_[index]
                view = buffer.as_strided(here.shape, dense_like(here).stride(), start)
                start += here.numel()
                states[index][name] = _as_held(view, params[index])
            if name == "master_param":
                for index in stretch:
                    local(states[index][name]).copy_(locals_[index])
    return states


def member(param: Tensor, state: State) -> Run:
    """A parameter and its states as the step sees them: on this rank."""
    optional = (state.get(name) for name in ("max_exp_avg_sq", "master_param"))
    return Run(
        state["step"],
        local(param.detach()),
        local(state["exp_avg"]),
        local(state["exp_avg_sq"]),
        *(None if tensor is None else local(tensor) for tensor in optional),
    )


def count_apart(states: Iterable[State], counted: Iterable[State]) -> None:
    """States that are not `counted` this time no longer share a step tensor with those that are."""
    counting = {id(state) for state in counted}
    moving = {id(state["step"]) for state in states if id(state) in counting}
    apart: dict[int, Tensor] = {}
    for state in states:
        step = state["step"]
        if id(state) not in counting and id(step) in moving:
            if id(step) not in apart:
                apart[id(step)] = step.clone()
            state["step"] = apart[id(step)]


def copied_out(state: State) -> State:
    """A copy that shares no memory."""
    return {key: value.clone() if isinstance(value, Tensor) else deepcopy(value) for key, value in state.items()}


def copy_in(param: Tensor, state: State, saved: Mapping[str, Any], name: str) -> None:
    """Fill the tensors of a state, all but its step, from a saved one; their dtypes and addresses stay."""
    for key, live in state.items():
        if key == "step":
            continue
        if key == "master_param" and key not in saved:
            local(live).copy_(local(param.detach()))
            continue
        if key not in saved:
            raise ValueError(f"the saved state of {name} has no {key}, only {sorted(saved)}")
        value = saved[key]
        if isinstance(value, DTensor) != isinstance(live, DTensor) or value.shape != live.shape:
            raise ValueError(
                f"the saved {key} of {name} is a {type(value).__name__} {tuple(value.shape)}, "
                f"its parameter a {type(param).__name__} {tuple(param.shape)}"
            )
        local(live).copy_(local(value))
    for key in saved.keys() - state.keys() - {"step"}:
        state[key] = copied_out({key: saved[key]})[key]


def set_counts(states: Sequence[State], counts: Sequence[float]) -> None:
    """Give each state its step count. Who shares a step tensor still does, as long as the counts are equal."""
    taken: dict[int, float] = {}
    apart: dict[tuple[int, float], Tensor] = {}
    for state, count in zip(states, counts, strict=True):
        step = state["step"]
        if taken.setdefault(id(step), count) != count:
            if (id(step), count) not in apart:
                apart[id(step), count] = torch.full_like(step, count)
            state["step"] = apart[id(step), count]
        else:
            step.fill_(count)


def _as_held(view: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return view
    return DTensor.from_local(
        view, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _neighbours(tensors: Sequence[Tensor]) -> list[list[int]]:
    dense = [index for index, tensor in enumerate(tensors) if tensor.numel() and is_dense(tensor)]
    found = [[dense[place] for place in stretch] for stretch in stretches([(tensors[index],) for index in dense])]
    return found + [[index] for index in range(len(tensors)) if index not in set(dense)]
