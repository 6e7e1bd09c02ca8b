"""What a scaler remembers: its rule, and tensors that are made late, written in place, saved and loaded."""

import math
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor

from stepstack_grad_scaler._rule import LARGEST, Rule, ScaleState


class RememberingScaler(torch.amp.GradScaler):
    """A scaler of torch's with a rule of ours, all of whose numbers are tensors with the same address for ever.

    torch's part is made as torch makes it, where the first scaled loss is; all the rest is made with it. When disabled
    there are the same tensors, which nobody changes.
    """

    hysteresis: int
    refill_hysteresis: Literal["on_growth", "on_clean_step"]
    min_scale: float
    max_scale: float
    _growth_restart: int
    _hysteresis_tracker: Tensor
    _last_step_skipped: Tensor
    _skipped_steps: Tensor

    def __init__(self, device: str, init_scale: float, rule: Rule, enabled: bool) -> None:
        super().__init__(device, init_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval, enabled)
        self._take_on(rule)
        self._init_growth_tracker, self._init_hysteresis_tracker = rule.growth_restart, rule.hysteresis
        self._init_last_step_skipped, self._init_skipped_steps = False, 0
        if not self._enabled:  # torch leaves these out then
            self._init_scale, self._scale, self._growth_tracker = 1.0, None, None

    @property
    def scale_tensor(self) -> Tensor:
        """The scale: a 0-d fp32 tensor on the device, the same one for ever. 1 when disabled.

        To be read; `update(new_scale)` writes it. It is made where the first scaled loss is or, if it is asked for
        before that, on the scaler's device.
        """
        return self._state().scale

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether the step before the last `update` was skipped: a 0-d bool on the device, the same one for ever."""
        self._state()
        return self._last_step_skipped

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped so far: a 0-d int64 on the device, the same one for ever."""
        self._state()
        return self._skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """torch's keys, and beside them the rest of the rule and of what is remembered. Waits for the device."""
        if not self._enabled:
            return {}
        return {
            "scale": self._number("scale"),
            "_growth_tracker": self._number("growth_tracker"),
            "_hysteresis_tracker": self._number("hysteresis_tracker"),
            "last_step_skipped": self._number("last_step_skipped"),
            "skipped_steps": self._number("skipped_steps"),
            **asdict(self._rule()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes on a state dict, of this scaler or torch's, rule included; tensors are written in place.

        Of what torch's lacks, the rule stays as it is, hysteresis is whole and no step was skipped. The scale is
        clamped to [min_scale, max_scale]. Raises RuntimeError for that of a disabled scaler, ValueError for what is
        missing or makes no sense; nothing has changed then.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # does nothing, or says what is wrong
            return
        rule = Rule(**{name: state_dict.get(name, now) for name, now in asdict(self._rule()).items()})
        scale = _number_in(state_dict, "scale", 0, LARGEST)
        left = _number_in(state_dict, "_hysteresis_tracker", -(2**31), 2**31 - 1, rule.hysteresis)
        numbers = {
            "scale": min(max(scale, rule.min_scale), rule.max_scale),
            "growth_tracker": int(_number_in(state_dict, "_growth_tracker", -(2**31), 2**31 - 1)),
            "hysteresis_tracker": int(left),
            "last_step_skipped": bool(_number_in(state_dict, "last_step_skipped", 0, 1, 0)),
            "skipped_steps": int(_number_in(state_dict, "skipped_steps", 0, 2**53, 0)),
        }
        self._take_on(rule)
        vars(self).update({f"_init_{name}": number for name, number in numbers.items()})
        if self._scale is not None:
            for name, number in numbers.items():
                vars(self)[f"_{name}"].fill_(number)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.update({f"_init_{name}": self._number(name) for name in _REMEMBERED})
        return state | dict.fromkeys((f"_{name}" for name in _REMEMBERED), None)

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

    def _take_on(self, rule: Rule) -> None:
        self._growth_factor = rule.growth_factor
        self._backoff_factor = rule.backoff_factor
        self._growth_interval = rule.growth_interval
        self._growth_restart = rule.growth_restart
        self.hysteresis = rule.hysteresis
        self.refill_hysteresis = rule.refill_hysteresis
        self.min_scale = rule.min_scale
        self.max_scale = rule.max_scale

    def _number(self, name: str) -> Any:
        """What a tensor holds, or will hold when it is made."""
        tensor = vars(self).get(f"_{name}")
        return vars(self)[f"_init_{name}"] if tensor is None else tensor.item()

    def _state(self) -> ScaleState:
        """The tensors that the rule is about; all that is remembered is made, if it was not."""
        if self._scale is None:
            here = self._enabled or self._device != "cuda" or torch.cuda.is_available()
            self._lazy_init_scale_growth_tracker(torch.device(self._device if here else "cpu"))
        assert self._scale is not None
        assert self._growth_tracker is not None
        return ScaleState(self._scale, self._growth_tracker, self._hysteresis_tracker)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # torch refuses if nothing was scaled yet; but of a pipeline only the last rank has a loss.
        return self._state()[:2]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._last_step_skipped = torch.full((), self._init_last_step_skipped, dtype=torch.bool, device=dev)
        self._skipped_steps = torch.full((), self._init_skipped_steps, dtype=torch.int64, device=dev)


def _number_in(
    state_dict: dict[str, Any], name: str, smallest: float, largest: float, otherwise: float = math.nan
) -> float:
    try:
        number = float(state_dict.get(name, otherwise))
    except (RuntimeError, TypeError, ValueError):
        number = math.nan
    if not smallest <= number <= largest:
        given = repr(state_dict[name]) if name in state_dict else f"missing beside {', '.join(map(str, state_dict))}"
        raise ValueError(f"{name} of the state dict is {given}; it must be a number in [{smallest}, {largest}]")
    return number


# Tensors `_…`, made late from the numbers `_init_…`.
_REMEMBERED = ("scale", "growth_tracker", "hysteresis_tracker", "last_step_skipped", "skipped_steps")
