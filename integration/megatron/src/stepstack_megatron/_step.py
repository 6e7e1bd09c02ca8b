"""One step of a Megatron optimizer: norm, clip, update and loss scale, composed on the device."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stepstack_clip import clip_coefficient, multiply_
from stepstack_gradnorm import Part, total_norm
from stepstack_megatron._border import FP32, kind_of
from stepstack_megatron._clip_grads import group_or_world
from stepstack_megatron._zeros import zeros_in

StepResult: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
HostResult: TypeAlias = tuple[bool, float | None, float | None]


class DeviceStep:
    """Steps `optimizer`, which consists of `members` (itself, or what it chains)."""

    def __init__(self, optimizer: Any, members: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._members = members
        self.skip_above = getattr(members[0].config, "grad_norm_skip_threshold", math.inf)
        """A larger norm skips the update, and the loss scale does not count that as an overflow."""

    @torch.no_grad()
    def __call__(self) -> StepResult:
        """`(update_successful, grad_norm, num_zeros)`; all ranks call it."""
        config = self._members[0].config
        for member in self._members:
            _collect_main_grads(member)
        parts = [_parts(member) for member in self._members]
        scale = self._optimizer.get_loss_scale().reshape(())
        norm, found_inf = _measured(parts, scale)
        num_zeros = zeros_in(counted for counted, _ in parts) if config.log_num_zeros_in_grad else None
        coefficient = clip_coefficient(norm, config.clip_grad) if config.clip_grad > 0 else torch.ones_like(norm)
        skipped = torch.maximum(found_inf, (norm > self.skip_above).float())
        self._update(scale / coefficient, skipped)
        for member in self._members:
            scaler = getattr(member, "grad_scaler", None)
            if scaler is not None:
                scaler.update(found_inf)
        return skipped == 0, norm, num_zeros

    def _update(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        inners = [member.optimizer for member in self._members if not member.is_stub_optimizer]
        fused = [inner for inner in inners if getattr(inner, "_step_supports_amp_scaling", False)]
        if len(fused) < len(inners):
            others = [inner for inner in inners if inner not in fused]
            multiply_([param.grad for inner in others for param in _with_grads(inner)], grad_scale.reciprocal())
            if found_inf.item():  # The one wait: an optimizer without the flag can't be told on the device.
                return
        with _told(fused, grad_scale, found_inf):
            self._optimizer.step_with_ready_grads()


def on_host(result: StepResult, skip_above: float) -> HostResult:
    """What Megatron's own step returns, for one wait. An overflow has no numbers, a norm that is too large has."""
    successful, *numbers = result
    known = torch.stack([successful.double(), *(number.double() for number in numbers if number is not None)]).tolist()
    if not known[0] and not skip_above < known[1] < math.inf:
        return False, None, None
    return bool(known[0]), known[1], known[2] if len(known) > 2 else None


def _collect_main_grads(member: Any) -> None:
    """Let the gradients that backward left be `grad` of what the inner optimizer steps; still times the loss scale."""
    if kind_of(member) == FP32:
        member.prepare_grads()  # nothing else, there
    elif not member.is_stub_optimizer:
        member._copy_model_grads_to_main_grads()


def _parts(member: Any) -> tuple[Part, Part]:
    """The gradients that count in the norm by Megatron's rules, and the others, which the same ranks hold."""
    group = group_or_world(member.get_grad_stats_parallel_group())
    # Its name until megatron-core 0.18, and since.
    choose = getattr(member, "get_main_grads_for_grad_norm", None) or member.get_grads_for_grad_norm
    counted = choose()
    known = set(map(id, counted))
    others = [param.grad for param in member.get_parameters() if param.grad is not None and id(param.grad) not in known]
    return Part(counted, group), Part(others, group)


def _measured(parts: Sequence[tuple[Part, Part]], scale: Tensor) -> tuple[Tensor, Tensor]:
    """The norm without the loss scale, and whether any gradient is not finite, one that does not count included."""
    _, norms = total_norm([part for pair in parts for part in pair], part_norms=True)
    norms = norms.to(scale.device, non_blocking=scale.device.type != "cpu")  # on the CPU they could be read too early
    norm = torch.linalg.vector_norm(norms[::2].double()).float()
    found_inf = (~(norms.isfinite().all() & norm.isfinite())).float()
    return norm / scale, found_inf


def _with_grads(inner: Any) -> list[Tensor]:
    return [param for group in inner.param_groups for param in group["params"] if param.grad is not None]


@contextmanager
def _told(inners: Sequence[Any], grad_scale: Tensor, found_inf: Tensor) -> Iterator[None]:
    """torch's contract for fused optimizers: both are there during the step, and gone after it."""
    for inner in inners:
        inner.grad_scale, inner.found_inf = grad_scale, found_inf
    try:
        yield
    finally:
        for inner in inners:
            del inner.grad_scale, inner.found_inf
