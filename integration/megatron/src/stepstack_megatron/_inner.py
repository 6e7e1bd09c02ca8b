"""The optimizer inside of Megatron's: exchanged for a fused one, with its groups and states, and back."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepstack_fused_adam import FusedAdam, FusedAdamW, steps_in_groups


def is_adam(inner: object) -> bool:
    """Whether it is torch's Adam or AdamW, or the FusedAdam of Transformer Engine or Apex, and no subclass of these."""
    return type(inner) in (torch.optim.Adam, torch.optim.AdamW) or _counts_in_groups(inner)


class Exchange:
    """An Adam, and the `FusedAdamW` that goes on in its place: from its states, with the very same `param_groups`.

    The states are copied, and gone from where they came; so they are in `undo`, the way back.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.replacement = _like(inner)
        self._added = _share_groups(inner, self.replacement)
        self.replacement.load_state_dict(_with_counts(inner.state_dict()))
        inner.state.clear()
        if _counts_in_groups(inner):
            for group in inner.param_groups:
                group.pop("step", None)
            # Who saves and loads them looks for counts where that optimizer has them.
            self.replacement.register_state_dict_post_hook(lambda _, state_dict: steps_in_groups(state_dict))
            self.replacement.register_load_state_dict_pre_hook(lambda _, state_dict: _with_counts(state_dict))

    def undo(self) -> None:
        """Let the one that was there go on."""
        state_dict = self.replacement.state_dict()
        groups = self.inner.param_groups
        for group, saved_group, added in zip(groups, state_dict["param_groups"], self._added, strict=True):
            for key in added:
                group.pop(key, None)
            if _counts_in_groups(self.inner) and saved_group["step"]:
                group["step"] = saved_group["step"]
            on_device = group.get("capturable") or group.get("fused")
            for param, number in zip(group["params"], saved_group["params"], strict=True):
                if number in state_dict["state"]:
                    self.inner.state[param] = _as_torch_has_it(state_dict["state"][number], on_device)
        self.replacement.state.clear()


def make_states(inner: Optimizer) -> None:
    """Give each parameter that has none the states of an optimizer that has made no step."""
    state_dict = inner.state_dict()
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in inner.param_groups)
    for number, param in zip(numbers, params, strict=True):
        zeros = torch.zeros_like(param.detach())
        state_dict["state"].setdefault(number, {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros})
    inner.load_state_dict(state_dict)


def _counts_in_groups(inner: Any) -> bool:
    """Whether it is one of the libraries': they count steps in `step` of the group, torch in the states."""
    library = type(inner).__module__.partition(".")[0]
    is_fused_adam = type(inner).__name__ == "FusedAdam" and library in ("transformer_engine", "apex")
    return is_fused_adam and not getattr(inner, "master_weights", False)  # with these it has the model's own weights


def _like(inner: Any) -> FusedAdamW:
    """A fused optimizer of the same groups and numbers, on stand-ins for the parameters."""
    # Shards may be views that autograd knows of, which no constructor takes.
    groups = [{**group, "params": [param.detach() for param in group["params"]]} for group in inner.param_groups]
    numbers = {name: inner.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    more = {name: inner.defaults.get(name, False) for name in ("amsgrad", "maximize")}
    decoupled = inner.adam_w_mode if _counts_in_groups(inner) else inner.defaults["decoupled_weight_decay"]
    make: Callable[..., FusedAdamW] = FusedAdamW if decoupled else FusedAdam
    return make(groups, **numbers, **more, **({} if decoupled else {"adam_w_mode": False}))


def _share_groups(inner: Any, replacement: FusedAdamW) -> list[set[str]]:
    """Make the groups of both the same objects; the keys that each group has got by that."""
    added = []
    for group, new_group in zip(inner.param_groups, replacement.param_groups, strict=True):
        added.append(new_group.keys() - group.keys())
        group.update({key: new_group[key] for key in added[-1]})
    replacement.param_groups = inner.param_groups
    return added


def _with_counts(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose groups have a `step`, where those of no step lack it."""
    return {**state_dict, "param_groups": [{"step": 0, **group} for group in state_dict["param_groups"]]}


def _as_torch_has_it(state: dict[str, Tensor], on_device: Any) -> dict[str, Tensor]:
    """Without a capturable or fused step, torch counts on the host."""
    return state if on_device or "step" not in state else {**state, "step": state["step"].cpu()}
