"""An engine's own Adam, stepped by FusedAdamW: the engine keeps its groups and its states, and all that reads them."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from stepstack_fused_adam import FusedAdam, FusedAdamW

_NUMBERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "bias_correction")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# By name, since neither is there without DeepSpeed: whether the decay is AdamW's.
_DECOUPLED: dict[str, Callable[[Any], object]] = {
    "torch.optim.adamw.AdamW": lambda adam: True,
    "torch.optim.adam.Adam": lambda adam: adam.defaults.get("decoupled_weight_decay", False),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": lambda adam: adam.adam_w_mode,
    "deepspeed.ops.adam.fused_adam.FusedAdam": lambda adam: adam.adam_w_mode,
}


class InnerAdam:
    """Steps for an Adam of torch's or DeepSpeed's, with its numbers, on its states.

    Learning rate, betas, eps and decay are read from its groups in each step. Moments are its tensors, and its step
    counts are kept, so checkpoints, `safe_get_local_optimizer_state` and a later step of its own find what they expect.
    One of ours steps itself. TypeError for any other optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._decoupled = True
        self._adams: dict[Hashable, _Borrowed] = {}
        if isinstance(optimizer, FusedAdamW):
            return
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if name not in _DECOUPLED:
            raise TypeError(
                f"{name} can't be stepped by FusedAdamW, which does {', '.join(_DECOUPLED)}; "
                "plug(engine, optimizer=False) leaves the update to it"
            )
        self._decoupled = bool(_DECOUPLED[name](optimizer))

    @torch.no_grad()
    def step_(
        self,
        key: Hashable,
        params: Sequence[Tensor],
        group: dict[str, Any],
        owner: Any,
        grad_scale: Tensor | float | None,
    ) -> None:
        """Update `params`, always the same ones for a key, by their gradients ÷ `grad_scale`.

        A gradient is `grad`, or else `decoupled_grad`, of whatever dtype. `group` has the numbers, `owner` is the
        optimizer whose states they are: this one, or DeepSpeed's stand-in for parameters on another device.
        """
        if isinstance(owner, FusedAdamW):
            _step_alone(owner, {**group, "params": list(params)}, grad_scale)
            return
        if key not in self._adams:
            self._adams[key] = _Borrowed(params, self._decoupled)
        self._adams[key].step_(group, owner, grad_scale)
        with suppress(AttributeError):  # what torch's schedulers look at: a step was made
            self._optimizer._opt_called = True


class _Borrowed:
    """A FusedAdamW that works on states of somebody else."""

    def __init__(self, params: Sequence[Tensor], decoupled: bool) -> None:
        self._params = params
        self._adam = FusedAdam(params, adam_w_mode=decoupled)
        self._counts: dict[Tensor, int] = {}

    def step_(self, group: dict[str, Any], owner: Any, grad_scale: Tensor | float | None) -> None:
        if hasattr(owner, "multi_tensor_adam"):  # DeepSpeed's FusedAdam, whose elastic checkpoints need this key
            group.setdefault("step", 0)
        self._adam.param_groups[0].update({name: group[name] for name in _NUMBERS if name in group})
        stepped = [param for param in self._params if _gradient(param) is not None]
        for param in stepped:
            self._borrow(param, owner, group)
        _step(self._adam, grad_scale)
        for param in stepped:
            self._give_back(param, owner.state[param])

    def _borrow(self, param: Tensor, owner: Any, group: dict[str, Any]) -> None:
        theirs = owner.state[param]
        if not theirs:
            theirs.update(_first_state(owner, param, group))
        ours = self._adam.state[param]
        same = all(ours.get(name) is theirs.get(name) for name in _MOMENTS)
        if same and (ours["step"] is theirs["step"] or self._counts.get(param) == _count(theirs["step"])):
            return
        ours.update({name: theirs[name] for name in _MOMENTS if name in theirs})
        step = theirs["step"]
        if _is_ours(step, param):
            ours["step"] = step
        else:
            self._counts[param] = _count(step)
            ours["step"] = torch.tensor(float(step), dtype=torch.float32, device=param.device)

    def _give_back(self, param: Tensor, theirs: dict[str, Any]) -> None:
        if self._adam.state[param]["step"] is not theirs["step"]:
            theirs["step"] += 1
            self._counts[param] += 1


def _step_alone(adam: FusedAdamW, group: dict[str, Any], grad_scale: Tensor | float | None) -> None:
    """A step of one group, which need not be one of its own."""
    groups, adam.param_groups = adam.param_groups, [group]
    try:
        _step(adam, grad_scale)
    finally:
        adam.param_groups = groups


def _step(adam: Any, grad_scale: Tensor | float | None) -> None:
    adam.grad_scale, adam.found_inf = grad_scale, None
    try:
        adam.step()
    finally:
        del adam.grad_scale, adam.found_inf


def _gradient(param: Tensor) -> Tensor | None:
    return param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)


def _count(step: Any) -> int:
    # A tensor here is torch's own count on the CPU, next to a parameter elsewhere: reading it waits for nothing.
    return int(step)


def _is_ours(step: Any, param: Tensor) -> bool:
    return isinstance(step, Tensor) and (step.device, step.dtype, step.shape) == (param.device, torch.float32, ())


def _first_state(owner: Any, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """As the owner would begin it."""
    is_torch = type(owner).__module__.startswith("torch.")
    keeps_fp32 = getattr(owner, "fp32_optimizer_states", False)
    moment = torch.zeros_like(param, dtype=torch.float32 if keeps_fp32 else None, requires_grad=False)
    state = {"step": torch.zeros((), dtype=torch.float32) if is_torch else group.get("step", 0)}
    names = _MOMENTS if group.get("amsgrad") else _MOMENTS[:2]
    return state | {name: torch.zeros_like(moment) for name in names}
