"""States copied out and in. Saved ones are named and shaped as torch.optim.AdamW's."""

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam._border import check_count, check_states, name_of
from stepstack_fused_adam._counts import as_count
from stepstack_fused_adam._definition import States, first_moment, narrowed, second_moment, weight
from stepstack_fused_adam._run import arithmetic, dense_like, flat, is_dense, local, run_of
from stepstack_fused_adam._state import NAMES, State, as_held, states_here

Groups = Sequence[Mapping[str, Any]]

# Of a parameter group: how torch would run the step. They say nothing here, and a checkpoint does not change them.
_TORCH_FLAGS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")

# Of a parameter group: what it has whatever others keep in it, beside the defaults of the optimizer.
_OWN = {"params", "param_names", "bias_correction"}

_DECAYS = {
    True: "decays weights apart from the gradient, as AdamW does",
    False: "adds the decay to the gradient, as torch.optim.Adam does",
}

_OTHER_NAMES = {"master_param": "master_weight"}  # Apex's and Transformer Engine's, and what it is here


def written(groups: Groups, states: Mapping[Any, State]) -> dict[str, Any]:
    """A state dict of groups and of the states that there are, in copies, with parameters as torch numbers them."""
    params = list(chain.from_iterable(group["params"] for group in groups))
    numbers: dict[int, int] = {}
    start = 0
    for group in groups:
        of_group = {id(param): number for number, param in enumerate(group["params"], start)}
        for key, number in of_group.items():
            numbers.setdefault(key, number)  # of one that is named twice, the last number in its first group
        start += len(group["params"])
    return {
        "state": {
            number: _saved(params[number], state, f"parameter {number} of the state dict")
            for number in sorted(numbers.values())
            if (state := states.get(params[number]))
        }
        | {key: deepcopy(state) for key, state in states.items() if not isinstance(key, Tensor)},
        "param_groups": [
            _copied_out({**group, "params": [numbers[id(param)] for param in group["params"]]}) for group in groups
        ],
    }


def checked(groups: Groups, saved_groups: Groups, saved_states: Mapping[Any, Any]) -> list[dict[int, State]]:
    """For each group, by place in it, what there is of saved states, under our names.

    Raises ValueError where something is missing, or does not have the sizes of the groups and parameters.
    """
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(f"the groups have {sizes} parameters, those of the state dict {saved_sizes}")
    return [
        {
            place: _checked(
                param,
                state,
                saved_group.get("amsgrad", group["amsgrad"]),
                saved_group.get("step"),
                name_of(index, group, place),
            )
            for place, (param, number) in enumerate(zip(group["params"], saved_group["params"], strict=True))
            if (state := saved_states.get(number))
        }
        for index, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True))
    ]


def of_no_param(saved_groups: Groups, saved_states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of saved states that belong to no parameter: what somebody else keeps in the optimizer."""
    known = set(chain.from_iterable(group["params"] for group in saved_groups))
    return {key: deepcopy(state) for key, state in saved_states.items() if key not in known}


def warn_of_another_decay(groups: Groups, saved_groups: Groups) -> None:
    """Warn if weights were decayed in another way in the saved groups, whose decay is not 0. They need not say how."""
    for index, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        ours, theirs = group["decoupled_weight_decay"], saved_group.get("decoupled_weight_decay")
        decay = saved_group.get("weight_decay", group["weight_decay"])
        if theirs not in (None, ours) and float(decay):
            warnings.warn(
                f"the state dict was saved by an optimizer that {_DECAYS[theirs]} (group {index}, weight_decay "
                f"{float(decay)}). This one {_DECAYS[ours]}, and goes on doing so. The other way is "
                f"FusedAdam(..., adam_w_mode={bool(theirs)})",
                stacklevel=4,
            )
            return


def copy_in(param: Tensor, state: State, saved_state: State, name: str) -> None:
    """Fill all but the step of a state from a checked one; what it is stored as, and where, stays.

    With a remainder, the parameter is written too: it is a part of the master weight.
    """
    here, states = _flat(param, state, name)
    from_saved = _has_master(states) and "master_weight" in saved_state
    rounded, new = narrowed(
        states,
        _ordered(saved_state["master_weight"], param) if from_saved else here.to(arithmetic(here.dtype)),
        _ordered(saved_state["exp_avg"], param),
        _ordered(saved_state["exp_avg_sq"], param),
        None if states.max_exp_avg_sq is None else _ordered(saved_state["max_exp_avg_sq"], param),
    )
    for old, value in zip(states, new, strict=True):
        if old is not None and value is not None:
            old.copy_(value)
    if states.remainder_high is not None:
        whole = local(param.detach())
        whole.copy_(rounded.as_strided(whole.shape, dense_like(whole).stride()))
    for key in saved_state.keys() - {*NAMES, "step"}:
        state[key] = _copied_out({key: saved_state[key]})[key]


def steps_in_groups(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of `FusedAdamW` or torch.optim.Adam(W) with step counts where Apex and Transformer Engine have them.

    That is one for each parameter group, as `step` in the group, and none in the states. Shares its tensors with
    `state_dict`. Raises ValueError where counts in a group differ. `FusedAdamW.load_state_dict` reads both.
    """
    groups = []
    for number, group in enumerate(state_dict["param_groups"]):
        counts = {float(state_dict["state"][key]["step"]) for key in group["params"] if key in state_dict["state"]}
        if len(counts) > 1:
            raise ValueError(f"the parameters of group {number} have made different numbers of steps: {sorted(counts)}")
        groups.append({**group, "step": int(counts.pop()) if counts else 0})
    states = {
        key: {name: value for name, value in state.items() if name != "step"}
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states, "param_groups": groups}


def take_over(group: dict[str, Any], saved_group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Give a group the options of a saved one. Floats stay floats, tensors keep their address.

    What others keep in groups is as in the saved one, and gone if that has none, as in torch: a scheduler that is made
    afterwards would begin at an `initial_lr` that is left.
    """
    for key in group.keys() - saved_group.keys() - defaults.keys() - _OWN:
        del group[key]
    for key, value in saved_group.items():
        if key not in ("params", "step", *_TORCH_FLAGS):
            group[key] = _taken_over(group.get(key), value)


def _saved(param: Tensor, state: State, name: str) -> State:
    """A copy of a state in the form that any AdamW reads: codes as the numbers they stand for, master weights whole."""
    here, states = _flat(param, state, name)
    numbers = {
        "exp_avg": first_moment(states),
        "exp_avg_sq": second_moment(states),
        "max_exp_avg_sq": states.max_exp_avg_sq,
        "master_weight": weight(here, states) if _has_master(states) else None,
    }
    copied = _copied_out({key: value for key, value in state.items() if key not in NAMES})
    copied |= {key: as_held(key, value.clone(), param) for key, value in numbers.items() if value is not None}
    return copied


def _copied_out(mapping: Mapping[str, Any]) -> State:
    """A copy that shares no memory."""
    return {key: value.clone() if isinstance(value, Tensor) else deepcopy(value) for key, value in mapping.items()}


def _checked(param: Tensor, saved_state: Mapping[str, Any], amsgrad: bool, count: Any, name: str) -> State:
    """A saved state under our names, with the step `count` of its group if it has none of its own."""
    state = {"step": count} | {_OTHER_NAMES.get(key, key): value for key, value in saved_state.items()}
    asked_for_in_vain = [key for key in NAMES if state.get(key) == {}]  # by torch, in a flattened state dict
    if "remainder_high" in asked_for_in_vain:
        raise ValueError(
            f"the state dict has no master weight of {name}: torch loads a flattened one by the names of the live "
            "states, and a remainder is not saved under its name. Load with flatten_optimizer_state_dict=False, or "
            'into an optimizer with master_weights="fp32"'
        )
    for key in asked_for_in_vain:
        del state[key]
    for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        if key not in state:
            raise ValueError(f"the saved state of {name} has no {key}, only {sorted(saved_state)}")
    if state["step"] is None:
        raise ValueError(f"neither the saved state of {name} nor its group has a step")
    check_count(float(state["step"]), f"the saved state of {name}")
    for key in state.keys() & {*NAMES}:
        value = state[key]
        if isinstance(value, DTensor) != isinstance(param, DTensor) or value.shape != param.shape:
            raise ValueError(
                f"the saved {key} of {name} is a {type(value).__name__} {tuple(value.shape)}, "
                f"its parameter a {type(param).__name__} {tuple(param.shape)}"
            )
    return state


def _taken_over(live: Any, saved_value: Any) -> Any:
    if isinstance(live, tuple) and isinstance(saved_value, tuple | list):
        return tuple(_taken_over(one, other) for one, other in zip(live, saved_value, strict=True))
    if isinstance(live, Tensor):
        return live.fill_(float(saved_value))
    if isinstance(live, int | float) and isinstance(saved_value, Tensor):
        return float(saved_value)
    return deepcopy(saved_value)


def _has_master(states: States) -> bool:
    return states.master is not None or states.remainder_high is not None


def _flat(param: Tensor, state: State, name: str) -> tuple[Tensor, States]:
    """Both with one dim, in the order of the parameter."""
    here = local(param.detach())
    state["step"] = as_count(state["step"], here.device)
    run = run_of(here, state["step"], states_here(state))
    check_states(run, name)
    return flat(here if is_dense(here) else here.clone(), run.numel), run.flat.states


def _ordered(saved_tensor: Tensor, param: Tensor) -> Tensor:
    """In the dtype of the arithmetic, flat, in the order of the parameter."""
    here = local(param.detach())
    ordered = torch.empty_like(here, dtype=arithmetic(here.dtype)).copy_(local(saved_tensor))
    return flat(ordered, ordered.numel())
