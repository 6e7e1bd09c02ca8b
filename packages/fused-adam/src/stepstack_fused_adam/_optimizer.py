"""AdamW as a torch optimizer."""

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepstack_fused_adam._backends import check_backend
from stepstack_fused_adam._border import check_grad, check_param, check_states
from stepstack_fused_adam._hyperparameters import Hyperparameters, Number, contract
from stepstack_fused_adam._plan import Plan, layout
from stepstack_fused_adam._run import local
from stepstack_fused_adam._state import Precision, copied_out, copy_in, count_apart, create, member, set_counts

# Of a parameter group: how torch would run the step. They say nothing here, and a checkpoint does not change them.
_TORCH_FLAGS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


class FusedAdamW(torch.optim.AdamW):
    """AdamW in one pass over memory, in mixed precision. Takes the place of `torch.optim.AdamW`; the differences:

    - Parameters, gradients and moments may differ in dtype. The arithmetic and the moments are fp32 (fp64 for fp64
      parameters), whatever the parameters are. `master_weights="fp32"` also keeps an fp32 weight, `master_param` in
      the state, of every 16-bit parameter; the parameter is then its rounded copy. Without one, updates smaller than
      half a unit in the last place of a bf16 or fp16 parameter are lost.
    - A gradient of another dtype than its parameter's comes as `p.grad` where `p.grad_dtype` allows it, or as
      `p.decoupled_grad`, which is read where `p.grad` is None.
    - torch's contract for gradient scalers is kept: the attribute `grad_scale` divides the gradients, `found_inf` not
      0 (NaN included) lets a step change nothing, counts included; absent or None means 1 and 0. They are selects on
      the device. After a step with a `grad_scale` the contents of the gradients are unspecified.
    - `lr`, `weight_decay` and both betas may be floats or one-element tensors, changed at any time. Nothing is read
      by the host. States are made in the first step and keep their addresses, also over `load_state_dict`: a step
      can always be captured in a CUDA graph, with `lr` as a tensor if it is to change.
    - Parameters that lie one after the other in one buffer, whose gradients do too, cost what one does. States that
      began together share one `step` tensor until one of them misses a gradient.
    - DTensor parameters are stepped by their local tensors, without communication.

    `foreach`, `fused` and `capturable` are accepted and change nothing: the step is always fused and capturable.
    `differentiable=True` is refused. `backend` is "torch" (torch's fused kernel, with conversions around it where
    dtypes differ), "compiled" (the definition through `torch.compile`: one pass in every precision, after seconds of
    compiling in the first step; falls back to "torch" with a warning), or "auto": "compiled" for large models that
    the kernel cannot do in one pass where there is a compiler, else "torch".

    `state_dict` is torch's, both ways, in copies. Loading keeps the dtypes of the states and torch's flags.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | None = None,
        backend: str = "auto",
    ) -> None:
        if differentiable:
            raise ValueError("FusedAdamW has no differentiable step; torch.optim.AdamW has")
        check_backend(backend)
        self._precision = Precision(master_weights)
        self._backend = backend
        self._plans: dict[int, tuple[object, list[object], Plan]] = {}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for index, param in enumerate(group["params"]):
                check_param(local(param.detach()), _name(len(self.param_groups) - 1, group, index))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Waits for no device and no rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, skip = contract(_whole(getattr(self, "grad_scale", None)), _whole(getattr(self, "found_inf", None)))
        for index, group in enumerate(self.param_groups):
            grads = [local_grad(param) for param in group["params"]]
            if all(grad is None for grad in grads):
                continue
            beta1, beta2 = group["betas"]
            by = Hyperparameters(
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                maximize=group["maximize"],
                grad_scale=scale,
                skip=skip,
            )
            self._plan(index, grads).step_([grad for grad in grads if grad is not None], by)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for `decoupled_grad` too."""
        super().zero_grad(set_to_none)
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if getattr(param, "decoupled_grad", None) is not None:
                if set_to_none:
                    param.decoupled_grad = None
                else:
                    param.decoupled_grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, in copies; makes no states."""
        packed = super().state_dict()
        packed["state"] = {key: copied_out(state) for key, state in packed["state"].items()}
        packed["param_groups"] = [copied_out(group) for group in packed["param_groups"]]
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class or of torch.optim.Adam(W) into the states.

        States keep their dtypes and, where they exist already, their addresses; parameters that share a step tensor
        but are to have different counts are given new ones. Numbers keep being floats or tensors. Masters that the
        state dict lacks are set to their parameters. Raises ValueError where the groups or the shapes differ.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(f"the groups have {sizes} parameters, those of the state dict {saved_sizes}")
        for index, (group, saved_group) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            for key, value in saved_group.items():
                if key != "params" and key not in _TORCH_FLAGS:
                    group[key] = _taken_over(group.get(key), value)
            self._load_states(index, saved_group["params"], state_dict["state"])
        known = set(chain.from_iterable(group["params"] for group in saved_groups))
        for key, value in state_dict["state"].items():
            if key not in known:
                self.state[key] = deepcopy(value)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_precision": self._precision, "_backend": self._backend, "_plans": {}}

    def _plan(self, index: int, grads: list[Tensor | None]) -> Plan:
        """The plan of a group: the last one, if everything is still where it was."""
        params = self.param_groups[index]["params"]
        laid_out, _ = layout(params, grads, [self.state.get(param) for param in params])
        live = [grad for grad in grads if grad is not None]
        if index in self._plans:
            planned, _, plan = self._plans[index]
            if planned == laid_out and plan.holds(live):
                return plan
        self._begin(index, grads)
        members = [
            member(param, self.state[param]) for param, grad in zip(params, grads, strict=True) if grad is not None
        ]
        plan = Plan(members, live, self._backend)
        self._plans[index] = (*layout(params, grads, [self.state.get(param) for param in params]), plan)
        return plan

    def _begin(self, index: int, grads: list[Tensor | None]) -> None:
        """Make the states that are missing, and let those without a gradient keep their count."""
        group = self.param_groups[index]
        params = group["params"]
        present = []
        for place, grad in enumerate(grads):
            if grad is not None:
                check_grad(grad, local(params[place]), _name(index, group, place))
                present.append(place)
        self._create([params[place] for place in present], group)
        count_apart(
            [self.state[param] for param in params if self.state.get(param)],
            counted=[self.state[params[place]] for place in present],
        )
        for place in present:
            check_states(member(params[place], self.state[params[place]]), _name(index, group, place))

    def _create(self, params: list[Tensor], group: dict[str, Any]) -> None:
        new = [param for param in params if not self.state.get(param)]
        for param, state in zip(new, create(new, self._precision, group["amsgrad"]), strict=True):
            self.state[param] = state

    def _load_states(self, index: int, saved_ids: list[Any], saved: dict[Any, Any]) -> None:
        group = self.param_groups[index]
        names = [_name(index, group, place) for place in range(len(saved_ids))]
        loaded = [place for place, saved_id in enumerate(saved_ids) if saved.get(saved_id)]
        params = [group["params"][place] for place in loaded]
        self._create(params, group)
        for place, param in zip(loaded, params, strict=True):
            copy_in(param, self.state[param], saved[saved_ids[place]], names[place])
        set_counts(
            [self.state[param] for param in params],
            [float(saved[saved_ids[place]]["step"]) for place in loaded],
        )
        for param in set(group["params"]) - set(params):
            self.state.pop(param, None)


def local_grad(param: Tensor) -> Tensor | None:
    """The gradient of a parameter, as far as this rank holds it."""
    grad: Tensor | None = param.grad
    if grad is None:
        grad = getattr(param, "decoupled_grad", None)
    if isinstance(grad, DTensor):
        if isinstance(param, DTensor) and grad.placements != param.placements:
            grad = grad.redistribute(param.device_mesh, param.placements)
        grad = local(grad)
    return grad


def _name(index: int, group: dict[str, Any], place: int) -> str:
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} of group {index}"


def _whole(number: Any) -> Any:
    return number.full_tensor() if isinstance(number, DTensor) else number


def _taken_over(live: Any, saved: Any) -> Any:
    """A saved value in the form of the live one: floats stay floats, tensors keep their address."""
    if isinstance(live, tuple) and isinstance(saved, tuple | list):
        return tuple(_taken_over(one, other) for one, other in zip(live, saved, strict=True))
    if isinstance(live, Tensor):
        return live.fill_(float(saved))
    if isinstance(live, float) and isinstance(saved, Tensor):
        return float(saved)
    return deepcopy(saved)
