"""AdamW as a torch optimizer."""

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from stepstack_fused_adam import _checkpoint
from stepstack_fused_adam._backends import check_backend
from stepstack_fused_adam._border import check_grad, check_numbers, check_options, check_param, name_of
from stepstack_fused_adam._counts import Cohort, Counts
from stepstack_fused_adam._gradients import turns, with_gradients, zero_decoupled
from stepstack_fused_adam._hyperparameters import Hyperparameters, Latest, Number, contract
from stepstack_fused_adam._numbers import Coded, numbers
from stepstack_fused_adam._plan import Plan
from stepstack_fused_adam._plans import Plans
from stepstack_fused_adam._run import Run, local
from stepstack_fused_adam._state import Precision, State, create, member_of, refresh
from stepstack_fused_adam._warm_up import compile_ahead


class FusedAdamW(torch.optim.AdamW):
    """AdamW in one pass over memory, in mixed precision. Takes the place of `torch.optim.AdamW`; the differences:

    - The dtypes of parameters, gradients and moments are independent. The arithmetic is fp32 (fp64 for fp64
      parameters), each result is rounded once. `exp_avg_dtype` and `exp_avg_sq_dtype`: None is the dtype of the
      arithmetic; or torch.float32, torch.bfloat16, or "block8": 8 bits and an fp32 scale for each 64 elements.
    - `master_weights="fp32"` keeps an fp32 weight of every 16-bit parameter, of which that is the rounded copy.
      "remainder" keeps only the 16 bits that a bf16 parameter lacks (fp16 ones get "fp32"); the parameter is then its
      master weight rounded half away from zero. Without either, changes smaller than half a unit in the last place of
      a parameter are lost. The master weight wins over the parameter: after changing parameters from outside, call
      `refresh_master_weights`.
    - A gradient of another dtype than its parameter's comes as `p.grad` where `p.grad_dtype` allows it, or as
      `p.decoupled_grad`, which is read where `p.grad` is None.
    - torch's contract for gradient scalers is kept: the attribute `grad_scale` divides the gradients, `found_inf` not
      0 (NaN included) lets a step change nothing, counts included; absent or None means 1 and 0. They are selects on
      the device. After a step with a `grad_scale` the contents of the gradients are unspecified.
    - `lr`, `weight_decay`, `eps` and both betas may be floats or one-element tensors, changed at any time (a float that
      has become NaN is refused). Nothing is read by the host. States are made in the first step and keep their
      addresses, also over `load_state_dict`: a step can always be captured in a CUDA graph, with `lr` as a tensor if
      it is to change.
    - Parameters that lie one after the other in one buffer, whose gradients do too, cost what one does, as long as
      their step counts are equal. States and counts may be edited, moved, deleted and given back at any time; the step
      after an edit of counts reads them.
    - DTensor parameters are stepped by their local tensors; ranks do not communicate.

    `foreach`, `fused` and `capturable` change nothing: the step is always fused and capturable. What torch's
    constructor refuses is refused here too: `foreach=True` with `fused=True`, or with a rate in a tensor and without
    `capturable`; one beta as a tensor and the other as a float. `differentiable=True` is refused.

    `backend` is one of (`backends()` tells which are here)
    - "torch": torch's fused kernel, with conversions around it where dtypes differ
    - "native": for CPUs, one pass over memory in C, in every precision but fp64
    - "compiled": the definition through `torch.compile`, one pass over memory in every precision. The first step waits
      for the compiler, or `warm_up` does; where it fails, "torch" takes over with one warning
    - "apex", "transformer_engine": their capturable kernels, for what those do (else a ValueError)
    - "auto": torch's kernel where it does it in one pass. Else, on CPUs "native"; on a GPU "compiled" for large models
      where there is a compiler, else one of the two libraries if the program has imported it, else "torch"
    They agree to a few units in the last place of the update's dtype.
    """

    elementwise = True
    """Slices of parameters that begin at multiples of 64 elements end where whole ones do, whatever the arguments."""
    _step_supports_amp_scaling = True
    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        master_weights: str | None = None,
        exp_avg_dtype: torch.dtype | str | None = None,
        exp_avg_sq_dtype: torch.dtype | str | None = None,
        backend: str = "auto",
    ) -> None:
        if differentiable:
            raise ValueError("FusedAdamW has no differentiable step; torch.optim.AdamW has")
        check_backend(backend)
        self._precision = Precision(master_weights, exp_avg_dtype, exp_avg_sq_dtype)
        self._bias_correction = bias_correction
        self._backend = backend
        self._begin()
        super(torch.optim.AdamW, self).__init__(  # Adam's, where a group may say how it decays
            params,
            lr,
            betas,
            eps,
            weight_decay,  # type: ignore[arg-type]  # torch only compares it with 0
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
            decoupled_weight_decay=self._decoupled,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. TypeError or ValueError, by name, for parameters and numbers that the constructor refuses."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("bias_correction", self._bias_correction)
        try:
            check_numbers(group, f"group {len(self.param_groups) - 1}")
            check_options(group, f"group {len(self.param_groups) - 1}")
            for place, param in enumerate(group["params"]):
                # What is frozen or lazy may be anything now: a step looks at what has a gradient.
                if param.requires_grad and not is_lazy(param):
                    check_param(local(param.detach()), name_of(len(self.param_groups) - 1, group, place))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @_disable_dynamo  # a compiled training loop breaks its graph here: a step compiles what it needs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; the closure's loss. Waits for no device and no rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, skip = contract(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for index, group in enumerate(self.param_groups):
            by = self._latest.of(index, group, scale, skip)
            self._step_params(index, (0, group["amsgrad"]), group["params"], by)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for `decoupled_grad` too."""
        super().zero_grad(set_to_none)
        zero_decoupled(self._params(), set_to_none)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Set the master weights to what the parameters are now, after these were changed from outside.

        Without it a step overwrites such a change (masters in fp32), or keeps it with the old 16 bits below its last
        place ("remainder").
        """
        for param in self._params():
            refresh(param, self.state.get(param, {}))

    @torch.no_grad()
    def create_states(self, params: Collection[Tensor]) -> None:
        """Make the states that some parameters lack, as their first step would; change nothing else."""
        wanted = {id(param) for param in params}
        for group in self.param_groups:
            self._create([param for param in group["params"] if id(param) in wanted], group["amsgrad"])

    def numbers(self, param: Tensor) -> dict[str, Tensor | Coded]:
        """The moments and the master weight of a parameter, in the order of memory, for who saves and loads in pieces.

        Without a copy: flat views where numbers are stored as such, else what reads and writes a stretch of them (of a
        master with a "remainder" in the parameter too). Empty where there is no state yet.
        """
        return numbers(param, self.state[param]) if self.state.get(param) else {}

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile now what the first step would wait for; changes nothing.

        Nothing happens where that step compiles nothing. Gradients are expected in the dtype that a parameter has
        one in, or else in its `grad_dtype`.
        """
        for group in self.param_groups:
            compile_ahead(
                [param for param in group["params"] if param.requires_grad],
                self._precision,
                group["amsgrad"],
                self._backend,
                Hyperparameters.of(group),
            )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, in copies. Makes no states.

        Codes are saved as the numbers they stand for, masters in fp32 as `master_weight`, whatever they are stored as.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = _checkpoint.written(self.param_groups, self.state)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict of this class, of torch.optim.Adam(W), or of one with a step count in the group.

        What states are stored as stays as the constructor has it, and so do torch's flags; lr and betas stay floats or
        tensors. Live states keep their addresses. Masters that the state dict lacks are set to their parameters; with a
        "remainder" those are set to the rounded masters that it has. Masters may also be named `master_param`, as Apex
        and Transformer Engine do. Raises ValueError, with nothing changed, where groups, states or shapes do not fit.

        How weights decay stays too, as in torch.optim.AdamW and in Apex; where the state dict says that it was done
        the other way, with a decay that is not 0, a warning says so.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
        loaded = _checkpoint.checked(self.param_groups, saved_groups, saved_states)
        _checkpoint.warn_of_another_decay(self.param_groups, saved_groups)
        for index, (group, saved_group) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            _checkpoint.take_over(group, saved_group, self.defaults)
            self._load_group(index, loaded[index])
        self.state.update(_checkpoint.of_no_param(saved_groups, saved_states))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_precision", "_bias_correction", "_backend")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super(torch.optim.AdamW, self).__setstate__(state)  # type: ignore[no-untyped-call]  # Adam's, as above
        self._begin()

    def _begin(self) -> None:
        """What is known of the steps made so far: nothing."""
        self._plans = Plans()
        self._counts = Counts()
        self._latest = Latest()

    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def _step_params(self, index: int, how: tuple[int, bool], of_group: list[Tensor], by: Hyperparameters) -> None:
        params, here, grads = with_gradients(of_group)
        if not params:
            return
        plan = self._plans.get(index, how, params, here, grads, [self.state.get(param, {}) for param in params])
        if plan is None:
            if len(each := turns(params)) > 1:
                for turn, of_turn in enumerate(each):
                    self._step_params(index, (1 + turn, how[1]), of_turn, by)
                return
            members, counts = self._members(index, params, here, grads)
            plan = Plan(members, here, grads, self._backend, counts)
            self._plans.put(index, how, params, [self.state[param] for param in params], plan)
        plan.step_(here, grads, by)
        # Not every backend tells autograd that the weights of an earlier forward are gone.
        torch.autograd.graph.increment_version(params)

    def _members(
        self, index: int, params: list[Tensor], here: list[Tensor], grads: list[Tensor]
    ) -> tuple[list[Run], Cohort]:
        """The states of the parameters with gradients, new ones if need be; equal counts are one. And all counts."""
        group = self.param_groups[index]
        names = {id(param): name_of(index, group, place) for place, param in enumerate(group["params"])}
        for param, param_here, grad in zip(params, here, grads, strict=True):
            check_param(param_here, names[id(param)])  # it may have been given other memory since it was taken on
            check_grad(grad, param_here, names[id(param)])
        self._create(params, group["amsgrad"])
        members = [
            member_of(param_here, self.state[param], self._precision, group["amsgrad"], names[id(param)])
            for param, param_here in zip(params, here, strict=True)
        ]
        steps, counts = self._counts.joined([member.step for member in members], [names[id(param)] for param in params])
        return [replace(member, step=step) for member, step in zip(members, steps, strict=True)], counts

    def _create(self, params: list[Tensor], amsgrad: bool) -> None:
        new = [param for param in params if not self.state.get(param)]
        states = create(new, self._precision, amsgrad)
        self._counts.learn([state["step"] for state in states], [0] * len(new))
        self.state.update(zip(new, states, strict=True))

    def _load_group(self, index: int, saved_states: dict[int, State]) -> None:
        group = self.param_groups[index]
        for place, param in enumerate(group["params"]):
            if place not in saved_states or group["amsgrad"] != ("max_exp_avg_sq" in self.state.get(param, {})):
                self.state.pop(param, None)  # it is gone, or the state dict has changed what it consists of
        params = [group["params"][place] for place in saved_states]
        self._create(params, group["amsgrad"])
        for place, saved_state in saved_states.items():
            param = group["params"][place]
            _checkpoint.copy_in(param, self.state[param], saved_state, name_of(index, group, place))
        steps = [self.state[param]["step"] for param in params]
        counts = [float(state["step"]) for state in saved_states.values()]
        for step, count in zip(steps, counts, strict=True):
            step.fill_(count)
        self._counts.learn(steps, counts)
