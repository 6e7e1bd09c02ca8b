"""The scaler: torch's calls, each decided on the device and for all ranks."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from stepstack_grad_scaler._agreement import agreed, check_groups, groups_that_agree
from stepstack_grad_scaler._contract import (
    any_set,
    cannot_divide,
    has_flag,
    layers,
    reciprocal,
    scalar,
    step_by_contract,
    take_contract,
)
from stepstack_grad_scaler._devices import moved
from stepstack_grad_scaler._gradients import local_gradients, multiply_and_check_, parameters_of
from stepstack_grad_scaler._memory import RememberingScaler
from stepstack_grad_scaler._presets import scale_and_rule
from stepstack_grad_scaler._rule import adapted


class GradScaler(RememberingScaler):
    """torch's GradScaler, wholly on the device, with one decision for all devices and ranks.

        scaler = GradScaler("cuda", preset="torch", hysteresis=2)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # changes nothing if a gradient is not finite, here or on a rank it is agreed with
        scaler.update()

    No call waits for the device, except to step an optimizer without `_step_supports_amp_scaling` (one read of the
    flag, as in torch), with `at_min_scale="raise"`, where a number is asked for (`get_scale`, `state_dict`), and for
    gradients that are on the CPU while the scale is not.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: torch's; numbers that are not
            given come from the preset.
        preset: whose rule, "torch", "apex" and so on; every other argument overrules it.
        hysteresis: the overflow that backs off. 1: the first.
        refill_hysteresis: when overflows are forgiven, "on_growth" or "on_clean_step".
        min_scale, max_scale: the scale stays between them.
        at_min_scale: what an overflow at `min_scale` does: "hold" skips the step and goes on, "raise" raises
            OverflowError in `update`, on all ranks; to know, each `update` waits for the device.
        groups: process groups over which a skip is agreed, beside those of the meshes that DTensor parameters live
            on. Every rank gives those that it is in; together they must connect as the axes of a grid do.

    Where parameters are DTensors or `groups` is given, `unscale_`, `step` and `update(found_inf=…)` are collective:
    all these ranks call them in the same order, with gradients or without. Raises ValueError for a bad argument, and
    without `groups` for DTensors on meshes of which none has all the ranks that parameters are on; and torch's
    AssertionErrors.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        enabled: bool = True,
        *,
        preset: str = "torch",
        hysteresis: int | None = None,
        refill_hysteresis: Literal["on_growth", "on_clean_step"] | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        at_min_scale: Literal["hold", "raise"] = "hold",
        groups: Sequence[ProcessGroup] = (),
    ) -> None:
        if at_min_scale not in ("hold", "raise"):
            raise ValueError(f"at_min_scale is {at_min_scale!r}; it must be hold or raise")
        init_scale, rule = scale_and_rule(
            preset,
            init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            refill_hysteresis=refill_hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        super().__init__(device, init_scale, rule, enabled)
        self.at_min_scale = at_min_scale
        self.groups = check_groups(groups)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of the optimizer by the scale, as torch's does. A wrapper is as the one inside it."""
        super().unscale_(layers(optimizer)[-1])

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step(*args, **kwargs)` on unscaled gradients, which changes nothing if one is not finite.

        A `grad_scale` that was set on the optimizer divides the gradients once more, whatever the optimizer and
        whether or not `unscale_` was called: that is deferred clipping. A `found_inf` set on it counts too, and so
        does a `grad_scale` that is 0 or not finite; on which ranks does not matter. Both are gone after the step. If no
        parameter has a gradient on any rank, nothing happens.

        What an optimizer with `_step_supports_amp_scaling` writes into its `found_inf` is what `update` sees. Of a
        trainer's wrapper, the optimizer inside is told, and the wrapper's `step` called; RuntimeError if that asks a
        scaler for the step of the one inside, which would divide twice: give the wrapper no scaler, or step it alone.
        """
        if not self._enabled:
            return step_by_contract(optimizer, *take_contract(optimizer, None), args, kwargs)
        told = layers(optimizer)[-1]
        if told is optimizer and has_flag(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return super().step(optimizer, *args, **kwargs)  # it wants the scaler itself: torch knows how
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        state = self._per_optimizer_states[id(told)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")

        grad_scale, found_inf = self._decided(optimizer)
        # Where the optimizer may write, and `update` reads.
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        before, state["stage"] = state["stage"], OptState.STEPPED  # for whoever asks again within the step
        try:
            return step_by_contract(optimizer, grad_scale, found_inf, args, kwargs)
        except BaseException:
            state["stage"] = before
            raise

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None, *, found_inf: Tensor | bool | None = None) -> None:
        """Adapts the scale to what became of the step: the last call of an iteration.

        `found_inf` is the flag of a step that was composed by hand: one element, of which anything but 0 (NaN too) says
        that the step was skipped. It counts beside those of `step` and `unscale_`, and is agreed over `groups`.

        `new_scale` sets the scale, clamped to [min_scale, max_scale], instead of adapting it; the trackers stay. So
        does the scale, if `new_scale` is a tensor that is not finite or not above 0: refusing it would take a wait.

        Raises AssertionError if there was neither, and no step; ValueError for a number as `new_scale` that is not
        finite and above 0, or for a bool, which is a flag; OverflowError with `at_min_scale="raise"`.
        """
        if not self._enabled:
            return
        found, has_gradients = self._recorded()
        if found_inf is not None:
            found.append(self._agreed(any_set([found_inf], self.scale_tensor.device).float()))
            has_gradients.append(torch.ones_like(found[-1]))
        if new_scale is not None:
            self._set_scale(new_scale)
        elif not found:
            raise AssertionError(
                "No inf checks were recorded prior to update: call step(optimizer), or give found_inf or new_scale."
            )
        self._per_optimizer_states.clear()
        if not found:
            return
        overflow = any_set(found, self.scale_tensor.device)
        self.last_step_skipped.copy_(overflow)
        self.skipped_steps.add_(overflow)
        if new_scale is None:
            self._adapt(overflow=overflow, clean=any_set(has_gradients, overflow.device) & ~overflow)

    def __getstate__(self) -> dict[str, Any]:
        if self.groups:
            raise TypeError("a GradScaler with groups can be neither pickled nor copied; its state_dict() can")
        return super().__getstate__()

    def _decided(self, optimizer: Optimizer) -> tuple[Tensor | None, Tensor]:
        """`grad_scale` and `found_inf` of the step. The gradients are unscaled then, unless the optimizer does that."""
        grad_scale, found_inf = take_contract(optimizer, self.scale_tensor.device)
        optimizer = layers(optimizer)[-1]
        state, scale, fused = self._per_optimizer_states[id(optimizer)], self.scale_tensor, has_flag(optimizer)
        ready = state["stage"] is OptState.READY
        flags = [] if found_inf is None else [found_inf]
        if grad_scale is not None:
            grad_scale = scale * grad_scale if ready and fused else grad_scale
            flags.append(cannot_divide(grad_scale))
        elif ready and fused:
            grad_scale = scale.clone()  # not the scale itself, which changes with the next update
        given = any_set(flags, scale.device).float() if flags else torch.zeros_like(scale)
        if ready:
            factor = torch.ones_like(scale) if fused else reciprocal(scale)
            state["found_inf_per_device"] = self._unscale_grads_(optimizer, factor, given, allow_fp16=fused)
            state["stage"] = OptState.READY if fused else OptState.UNSCALED
        elif flags:
            given = self._agreed(given, parameters_of(optimizer))
        return grad_scale, any_set([given, *state["found_inf_per_device"].values()], scale.device).float()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's unscale_ leaves the work to this; it gives a flag for each device, set if `found_inf` is on some rank.
        gradients = local_gradients(optimizer, allow_fp16=allow_fp16)
        found_inf = torch.maximum(found_inf, multiply_and_check_(gradients, inv_scale))
        has_gradients = torch.full_like(found_inf, bool(gradients))
        groups = groups_that_agree(parameters_of(optimizer), self.groups)
        found_inf, has_gradients = agreed([found_inf, has_gradients], groups)
        self._per_optimizer_states[id(optimizer)]["has_gradients"] = has_gradients
        return {device: moved(found_inf, device) for device in (found_inf.device, *gradients)}

    def _agreed(self, flag: Tensor, parameters: Iterable[Tensor] = ()) -> Tensor:
        return agreed([flag], groups_that_agree(parameters, self.groups))[0]

    def _recorded(self) -> tuple[list[Tensor], list[Tensor]]:
        """Flags of all optimizers since the last update: gradients that are not finite, gradients at all."""
        states = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        # Optimizers that check their gradients themselves leave no note that they had some.
        return found, [state.get("has_gradients", torch.ones_like(self.scale_tensor)) for state in states]

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, bool) or (isinstance(new_scale, Tensor) and new_scale.dtype == torch.bool):
            raise ValueError(f"new_scale is {new_scale!r}; a flag is given by its name: update(found_inf=…)")
        if not isinstance(new_scale, Tensor) and not 0 < new_scale < float("inf"):
            raise ValueError(f"new_scale is {new_scale!r}; it must be finite and above 0")
        scale = self.scale_tensor
        wanted = scalar(new_scale, scale.device)
        fine = (wanted > 0) & (wanted < float("inf"))
        scale.copy_(torch.where(fine, wanted.clamp(self.min_scale, self.max_scale), scale))

    def _adapt(self, *, overflow: Tensor, clean: Tensor) -> None:
        before = self._state()
        after = adapted(before, self._rule(), overflow=overflow, clean=clean)
        at_floor = before.scale <= self.min_scale
        for tensor, value in zip(before, after, strict=True):
            tensor.copy_(value)
        # The one wait of `update`, for those who asked for it.
        if self.at_min_scale == "raise" and overflow & (after.hysteresis_tracker == 0) & at_floor:
            raise OverflowError(
                f"a gradient is not finite though the loss scale is at min_scale, {self.min_scale}: the step was "
                "skipped, and a smaller scale is not allowed. Look for what is not finite in the model or its input, "
                'lower min_scale, or go on skipping with at_min_scale="hold".'
            )
