"""`plug`: a Megatron optimizer whose step stays on the device, until the plug is removed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stepstack_megatron._border import DISTRIBUTED, kind_of, members_of
from stepstack_megatron._inner import Exchange, is_adam, make_states
from stepstack_megatron._scaler import DynamicGradScaler
from stepstack_megatron._step import DeviceStep, on_host

_MISSING = object()
_DYNAMIC = "megatron.core.optimizer.grad_scaler.DynamicGradScaler"


def plug(megatron_optimizer: Any, *, results_on_host: bool = False) -> "Plug":
    """Let `megatron_optimizer.step()` measure, clip, update and scale without waiting for the device.

        optimizer = get_megatron_optimizer(config, model_chunks)
        plug(optimizer)
        ...
        update_successful, grad_norm, num_zeros = optimizer.step()

    What it takes: FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer (with any number of
    instances), and a ChainedOptimizer of these, of a version in `VERSIONS`. An inner Adam (of torch, Transformer Engine
    or Apex) becomes a `FusedAdamW` with its states and the very same parameter groups; any other one stays, and without
    torch's `_step_supports_amp_scaling` it costs the one wait of a step. A DynamicGradScaler becomes one on the device.

    `step()`, called on all ranks, returns
    - update_successful: a 0-d bool. False: a gradient was not finite on some rank, or the norm is beyond fp32 or above
      the config's `grad_norm_skip_threshold`; then no parameter, state or count has changed. So it is in every
      precision, with a loss scale or without.
    - grad_norm: a 0-d fp32 tensor, the norm without the loss scale before clipping, also where `clip_grad` is 0.
      What counts is what Megatron counts; the gradients that don't (shared ones, duplicates) are only looked at.
    - num_zeros: a 0-d int64 tensor, or None without `log_num_zeros_in_grad`.

    `results_on_host=True`: the same as bool, float and float, or (False, None, None) after an overflow, for one wait at
    the end. The trainer of Megatron-LM needs it: it takes for a skipped step whatever `is` not True.

    Members of a chain decide together: one norm, one flag, one loss scale. Checkpoints are Megatron's; those made
    before load after, and the other way round. TypeError, ValueError or RuntimeError, with nothing changed, for
    classes, options and versions that are not handled.
    """
    return Plug(megatron_optimizer, results_on_host=results_on_host)


class Plug:
    """What `plug` has changed of an optimizer. As a context manager it removes itself at the end."""

    def __init__(self, megatron_optimizer: Any, *, results_on_host: bool = False) -> None:
        self._undo: list[Callable[[], None]] = []
        members = members_of(megatron_optimizer)
        try:
            for member in members:
                self._exchange_inner(member)
                self._exchange_scaler(member)
        except BaseException:
            self.remove()
            raise
        step = DeviceStep(megatron_optimizer, members)
        self._replace(
            megatron_optimizer, "step", (lambda: on_host(step(), step.skip_above)) if results_on_host else step
        )

    def remove(self) -> None:
        """Give the optimizer back what it had, its own inner optimizer and scaler as far as they have come by now."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Plug":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _exchange_inner(self, member: Any) -> None:
        if member.is_stub_optimizer or not is_adam(member.optimizer):
            return
        exchange = Exchange(member.optimizer)
        self._undo.append(exchange.undo)
        self._replace(member, "optimizer", exchange.replacement)
        self._replace(member, "init_state_fn", lambda inner, config=None: make_states(inner))
        if kind_of(member) == DISTRIBUTED:
            self._replace(member, "_set_main_param_and_optimizer_states", _setting(member))

    def _exchange_scaler(self, member: Any) -> None:
        scaler: Any = vars(member).get("grad_scaler")
        if kind_of(scaler) != _DYNAMIC:
            return
        ours = DynamicGradScaler(
            scaler.scale.item(),  # waits for the device, once
            scaler.min_scale.item(),
            scaler.growth_factor.item(),
            scaler.backoff_factor.item(),
            scaler.growth_interval,
            scaler.hysteresis,
            device=scaler.scale.device.type,
        )
        ours.load_state_dict(scaler.state_dict())
        self._undo.append(lambda: scaler.load_state_dict(ours.state_dict()))
        self._replace(member, "grad_scaler", ours)

    def _replace(self, thing: Any, name: str, value: object) -> None:
        """Set an attribute of the object itself, until `remove`."""
        before = vars(thing).get(name, _MISSING)
        setattr(thing, name, value)
        self._undo.append(lambda: delattr(thing, name) if before is _MISSING else setattr(thing, name, before))


def _setting(member: Any) -> Callable[[Any, Mapping[str, Tensor]], None]:
    """Megatron's way to load what it keeps of a parameter, without its demand that the file has the step count too.

    That comes with the groups; no file has it among the tensors.
    """

    @torch.no_grad()
    def set_main_param_and_optimizer_states(model_param: Any, tensors: Mapping[str, Tensor]) -> None:
        group, place = member.model_param_group_index_map[model_param]
        main_param = member.optimizer.param_groups[group]["params"][place]
        for name, tensor in {"param": main_param, **member.optimizer.state[main_param]}.items():
            if name != "step":
                tensor.copy_(tensors[name])

    return set_main_param_and_optimizer_states
