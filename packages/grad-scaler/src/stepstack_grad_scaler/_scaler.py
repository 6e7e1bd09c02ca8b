"""The scaler: torch's calls and state dict, all that it remembers in tensors on the device."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stepstack_grad_scaler._agreement import agree_, groups_that_agree
from stepstack_grad_scaler._gradients import local_gradients, multiply_and_check_, parameters_of
from stepstack_grad_scaler._presets import PRESETS
from stepstack_grad_scaler._rule import Rule, ScaleState, adapted


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling on the device, one decision for all devices and ranks."""

    _hysteresis_tracker: Tensor
    _last_step_skipped: Tensor
    _skipped_steps: Tensor

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
        groups: Sequence[ProcessGroup] = (),
    ) -> None:
        if preset not in PRESETS:
            raise ValueError(f"preset is {preset!r}; there are {', '.join(PRESETS)}")
        preset_scale, rule = PRESETS[preset]
        super().__init__(
            device,
            _first(init_scale, preset_scale),
            _first(growth_factor, rule.growth_factor),
            _first(backoff_factor, rule.backoff_factor),
            _first(growth_interval, rule.growth_interval),
            enabled,
        )
        self.hysteresis = _first(hysteresis, rule.hysteresis)
        self.refill_hysteresis = _first(refill_hysteresis, rule.refill_hysteresis)
        self.min_scale = _first(min_scale, rule.min_scale)
        self.max_scale = _first(max_scale, rule.max_scale)
        self.groups = tuple(groups)
        self._growth_restart = rule.growth_restart
        self._init_hysteresis_tracker = self.hysteresis
        self._init_last_step_skipped = False
        self._init_skipped_steps = 0
        if self._enabled:
            self._init_growth_tracker = rule.growth_restart
            bounds = self._rule
            if not bounds.min_scale <= self._init_scale <= bounds.max_scale:
                raise ValueError(
                    f"init_scale is {init_scale!r}; it must be in [{bounds.min_scale}, {bounds.max_scale}]"
                )
        else:  # torch leaves these out then
            self._init_scale, self._init_growth_tracker = 1.0, 0
            self._scale = self._growth_tracker = None

    @property
    def scale_tensor(self) -> Tensor:
        """The scale: a 0-d fp32 tensor on the device, the same one for ever. 1 when disabled.

        To be read; `update(new_scale)` writes it. It lives with the first loss that is scaled, or if it is asked for
        before that, on the scaler's device.
        """
        return self._tensors().scale

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether the step before the last `update` was skipped: a 0-d bool on the device, the same one for ever."""
        self._tensors()
        return self._last_step_skipped

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped so far: a 0-d int64 on the device, the same one for ever."""
        self._tensors()
        return self._skipped_steps

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step(*args, **kwargs)`, which changes nothing if a gradient is not finite anywhere."""
        if not self._enabled:
            return _step(optimizer, *_take_contract(optimizer, None), args, kwargs)
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return super().step(optimizer, *args, **kwargs)  # an older contract, which torch knows
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")

        device = self.scale_tensor.device
        grad_scale, found_inf = _take_contract(optimizer, device)
        if state["stage"] is OptState.READY:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self._check_inf_per_device(optimizer)
                # A product or a copy: the scale itself changes with the next update.
                grad_scale = self.scale_tensor.clone() if grad_scale is None else self.scale_tensor * grad_scale
            else:
                self.unscale_(optimizer)
        found = list(state["found_inf_per_device"].values())
        if found_inf is not None:
            found.append(self._agreed(found_inf))
        # What the optimizer writes into the flag, `update` sees.
        found_inf = _any(found, device).float()
        state["found_inf_per_device"] = {device: found_inf}
        result = _step(optimizer, grad_scale, found_inf, args, kwargs)
        state["stage"] = OptState.STEPPED
        return result

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None, *, found_inf: Tensor | bool | None = None) -> None:
        """Adapts the scale to what became of the step, on the device."""
        if not self._enabled:
            return
        device = self.scale_tensor.device
        states = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        checked = [state["checked"] if "checked" in state else torch.ones((), device=device) for state in states]
        if found_inf is not None:
            found.append(self._agreed(found_inf))
            checked.append(torch.ones((), device=device))
        if not found and new_scale is None:
            raise AssertionError(
                "No inf checks were recorded prior to update: call step(optimizer), or give found_inf or new_scale."
            )
        if found:
            overflow = _any(found, device)
            clean = _any(checked, device) & ~overflow
            state = self._tensors()
            if new_scale is None:
                for tensor, value in zip(
                    state, adapted(state, self._rule, overflow=overflow, clean=clean), strict=True
                ):
                    tensor.copy_(value)
            self.last_step_skipped.copy_(overflow)
            self.skipped_steps.add_(overflow)
        if new_scale is not None:
            self.scale_tensor.copy_(_scalar(new_scale, device).clamp(self.min_scale, self.max_scale))
        self._per_optimizer_states.clear()

    @property
    def _rule(self) -> Rule:
        return Rule(
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            growth_restart=self._growth_restart,
            hysteresis=self.hysteresis,
            refill_hysteresis=self.refill_hysteresis,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )

    def _tensors(self) -> ScaleState:
        if self._scale is None:
            here = self._enabled or self._device != "cuda" or torch.cuda.is_available()
            self._lazy_init_scale_growth_tracker(torch.device(self._device if here else "cpu"))
        assert self._scale is not None
        assert self._growth_tracker is not None
        return ScaleState(self._scale, self._growth_tracker, self._hysteresis_tracker)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._last_step_skipped = torch.full((), self._init_last_step_skipped, dtype=torch.bool, device=dev)
        self._skipped_steps = torch.full((), self._init_skipped_steps, dtype=torch.int64, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # torch refuses a scaler that has scaled nothing; but of a pipeline only the last rank has a loss.
        return self._tensors()[:2]

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's unscale_ and _check_inf_per_device do their work here.
        gradients = local_gradients(optimizer, allow_fp16=allow_fp16)
        found_inf = multiply_and_check_(gradients, inv_scale)
        any_gradient = torch.full_like(found_inf, bool(gradients))
        flags = torch.stack([found_inf, any_gradient])
        found_inf, self._per_optimizer_states[id(optimizer)]["checked"] = agree_(
            flags, groups_that_agree(parameters_of(optimizer), self.groups)
        ).unbind()
        return {device: found_inf.to(device, non_blocking=True) for device in (found_inf.device, *gradients)}

    def _agreed(self, found_inf: Tensor | bool) -> Tensor:
        flag = _any([_scalar(found_inf, self.scale_tensor.device)], self.scale_tensor.device).float()
        return agree_(flag, groups_that_agree((), self.groups))


def _step(
    optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None, args: Any, kwargs: Any
) -> float | None:
    """A step that divides gradients by `grad_scale` and changes nothing if `found_inf` is 1; None is 1 and 0."""
    step: Callable[..., float | None] = optimizer.step
    if grad_scale is None and found_inf is None:
        return step(*args, **kwargs)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros_like(grad_scale) if found_inf is None else found_inf  # type: ignore
        try:
            return step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    if grad_scale is not None:
        with torch.no_grad():
            multiply_and_check_(local_gradients(optimizer), grad_scale.double().reciprocal().float())
    # This optimizer cannot skip by itself: the one wait for the device.
    if found_inf is not None and found_inf.item():
        return None
    return step(*args, **kwargs)


def _take_contract(optimizer: Optimizer, device: torch.device | None) -> tuple[Tensor | None, Tensor | None]:
    """The `grad_scale` and `found_inf` that somebody set for the next step. They are gone from the optimizer then."""
    given = (optimizer.__dict__.pop(name, None) for name in ("grad_scale", "found_inf"))
    grad_scale, found_inf = (None if value is None else _scalar(value, device) for value in given)
    return grad_scale, found_inf


def _any(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether one of these scalars is not 0 (NaN is not): a 0-d bool on the device."""
    return torch.stack([_scalar(flag, device) for flag in flags]).ne(0).any()


def _scalar(value: Tensor | float, device: torch.device | None) -> Tensor:
    """A number, or a tensor of one element, as a 0-d fp32 tensor on the device (None: where it is)."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), device=device)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)


def _first(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given
