"""`OptimizerStep`: everything between a backward and the next forward, in one call."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepstack._scale import update_scale
from stepstack._schedule import schedule_of
from stepstack_clip import clip_coefficient, multiply_
from stepstack_gradnorm import Part, grads_of, total_norm
from stepstack_sharded_states import ShardedOptimizer


class StepResult(NamedTuple):
    """What a step did, in three 0-d tensors on the parameters' device. Reading one waits for the device.

    They are fp32; the norm and the coefficient are fp64 if a gradient is.
    """

    grad_norm: Tensor
    """The norm of the whole gradient, without the loss scale, before clipping. Not finite: the step was skipped."""
    clip_coefficient: Tensor
    """What the gradient was multiplied by, at most 1."""
    skipped: Tensor
    """1 if the gradient was not finite, so that nothing has changed, else 0."""


class OptimizerStep:
    """A whole step of the optimizer: norm, clip, update, loss scale, learning rate, gradients forgotten.

        optimizer_step = OptimizerStep(optimizer, max_norm=1.0, scaler=scaler)
        scaler.scale(model(batch)).backward()
        result = optimizer_step()

    does what the following does, without the passes over the gradients that unscaling and clipping make, and without
    waiting for the device:

        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    Parameters
    - optimizer: any torch optimizer that takes `grad_scale` and `found_inf` (`_step_supports_amp_scaling`, as torch
      calls it): `FusedAdamW`, `torch.optim.AdamW(fused=True)`, `ShardedOptimizer`. For any other, the step divides the
      gradients itself and waits for the device once, to know whether to call the optimizer at all. Of a trainer's
      wrapper, the optimizer inside is told, and the wrapper's `step()` called; one with a loss scale of its own scales
      twice, so give that scaler here and not to the wrapper.
    - max_norm: the gradient is scaled down to this norm if its own is greater. None measures only.
    - scaler: the one that scaled the loss, ours or torch's. Its `unscale_` and `update` are not called by the loop.
      None, or a disabled one: no loss scale; a gradient that is not finite skips the step all the same.
    - lr_scheduler: either of two, and neither advances on a skipped step.
      A function from the number of applied steps, a 0-d fp32 tensor on the device, to a factor, likewise: each group's
      learning rate becomes `initial_lr` times that, without a wait. `group["lr"]` is made a tensor.
      Or a torch scheduler: it is moved just before the next update, when it is known whether this one was applied. That
      flag travels to the host while the next forward and backward are queued; the call after waits for it, so the host
      is never more than one step ahead of the device. Until then `get_last_lr()` is what the last update used.

    - parts: a `stepstack_gradnorm.Part` or Parts of *parameters*, as `stepstack_clip.clip_grad_norm_` takes them: of
      those that ranks outside of their mesh hold other pieces of (experts, pipeline stages), with the groups of these
      ranks. Or a function that gives them, asked in each step, where parameters are added later.

    Every rank that holds a part of the gradient calls it. The norm of a `ShardedOptimizer` or of DTensors is that of
    the whole gradient; plain gradients are taken as the same on all ranks, as DistributedDataParallel leaves them.

    Raises ValueError for a max_norm that is negative or NaN, for DTensors or a `ShardedOptimizer` with parameters in
    several meshes, if nothing says what the ranks outside of one of them hold, and for a Part of what is no parameter
    of the optimizer; TypeError for what is not a scaler, a schedule or a Part, and for an optimizer whose `step` can't
    be called without a closure.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        lr_scheduler: LRScheduler | Callable[[Tensor], Tensor] | None = None,
        parts: Part | Iterable[Part] | Callable[[], Iterable[Part]] = (),
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{_here()}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"{_here()}: max_norm must be 0 or more, or None for no clipping; got {max_norm}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"{_here()}: scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        _check_needs_no_closure(optimizer)
        self._parts = parts if callable(parts) else _listed(parts)
        self.optimizer = optimizer
        self._told = _innermost(optimizer)
        if isinstance(self._told, ShardedOptimizer) and not self._parts:
            _check_one_mesh(self._told)
        self.max_norm = float("inf") if max_norm is None else max_norm
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        devices = (param.device for group in optimizer.param_groups for param in group["params"])
        self.applied_steps = torch.zeros((), dtype=torch.float32, device=next(devices, None))
        """How many calls have changed the parameters: 0-d fp32 (exact to 2²⁴), on the device."""
        is_of_wrapper = isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is optimizer
        if is_of_wrapper:
            _check_same_groups(optimizer, self._told)
        self._schedule = schedule_of(lr_scheduler, optimizer if is_of_wrapper else self._told, self.applied_steps)

    @torch.no_grad()
    def __call__(self, closure: None = None) -> StepResult:
        """Step. The gradients are used up: `.grad` is None afterwards, in a skipped step too.

        ValueError if somebody else has set `grad_scale` or `found_inf` on the optimizer for this step, or if the
        gradient of a parameter is where the optimizer does not look; TypeError for a closure.
        """
        if closure is not None:
            raise TypeError(
                f"{_here()}: OptimizerStep takes no closure, since it measures gradients before the optimizer is "
                "called: call the closure first (zero_grad, forward, backward), then the step without it"
            )
        for name in ("grad_scale", "found_inf"):
            if vars(self._told).get(name) is not None:
                raise ValueError(
                    f"{_here()}: {name} is set on the optimizer, and OptimizerStep sets it itself: delete it, and "
                    "leave clipping, unscaling and skipping to this step"
                )
        grads = self._grads()
        device = self.applied_steps.device
        norm = total_norm(grads).to(device, non_blocking=device.type != "cpu")  # on the CPU it could be read too early
        scale = torch.ones_like(norm)
        if self.scaler is not None:
            scale = self.scaler.scale(scale)
        norm = norm / scale
        coefficient = clip_coefficient(norm, self.max_norm)
        found_inf = (~norm.isfinite()).float()
        self._schedule.before_update(self.applied_steps)
        self._update(grads, scale / coefficient, found_inf)
        self._schedule.after_update(found_inf)
        if self.scaler is not None:
            update_scale(self.scaler, found_inf)
        self.applied_steps += 1 - found_inf
        self.optimizer.zero_grad()
        return StepResult(norm, coefficient, found_inf)

    def state_dict(self) -> dict[str, Any]:
        """The count of applied steps and the schedule; the optimizer and the scaler have state dicts of their own."""
        return {"applied_steps": self.applied_steps.clone(), "lr_scheduler": self._schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, with the same kind of lr_scheduler. Load the optimizer's as well."""
        self._schedule.load_state_dict(state_dict["lr_scheduler"])
        self.applied_steps.copy_(state_dict["applied_steps"])

    def _grads(self) -> list[Tensor | Part]:
        parts = _listed(self._parts()) if callable(self._parts) else self._parts
        if isinstance(self._told, ShardedOptimizer):
            return _shards(self._told, parts)
        params = [param for group in self._told.param_groups for param in group["params"]]
        if _reads_grad_alone(self._told):
            _check_in_grad(params)
        _check_among(params, parts, parts)
        taken = {id(param) for part in parts for param in part.tensors}
        return [*_of_grads(parts), *grads_of(param for param in params if id(param) not in taken)]

    def _update(self, grads: list[Tensor | Part], divisor: Tensor, found_inf: Tensor) -> None:
        told: Any = self._told
        if divisor.dtype is torch.float64:  # `grad_scale` is fp32, without the range and the digits of fp64 gradients
            multiply_(grads, divisor.reciprocal())
            divisor = torch.ones_like(found_inf)
        if getattr(told, "_step_supports_amp_scaling", False):
            told.grad_scale, told.found_inf = divisor, found_inf
            if isinstance(told, ShardedOptimizer):
                told.found_inf_is_agreed = True
            try:
                self.optimizer.step()
            finally:
                del told.grad_scale, told.found_inf
        elif not found_inf.item():  # The one wait: an optimizer without the flag can't be told on the device.
            multiply_(grads, divisor.reciprocal())  # by 1 if that has been done
            self.optimizer.step()


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps: a trainer's wrapper hands its step to one inside, which has the same parameters."""
    wrapped = [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer) and value is not optimizer and _ids(value) == _ids(optimizer)
    ]
    return _innermost(wrapped[0]) if wrapped else optimizer


def _ids(optimizer: Optimizer) -> list[int]:
    # Not `param_groups` itself, of which a wrapper may have a copy, and which a load puts others into the place of.
    return [id(param) for group in optimizer.param_groups for param in group["params"]]


def _check_same_groups(wrapper: Optimizer, told: Optimizer) -> None:
    if any(ours is not theirs for ours, theirs in zip(wrapper.param_groups, told.param_groups, strict=True)):
        raise ValueError(
            f"{_here()}: lr_scheduler writes learning rates into the groups of a {type(wrapper).__name__} that are not "
            f"those of the {type(told).__name__} inside, as after a load: make the scheduler for the one inside"
        )


def _check_needs_no_closure(optimizer: Optimizer) -> None:
    # Of the class, since a schedule puts a function in the place of the bound method.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [one.name for one in parameters if one.default is one.empty and one.kind not in several]:
        raise TypeError(
            f"{_here()}: {type(optimizer).__name__}.step needs {', '.join(needed)}, and OptimizerStep calls it without "
            "any: an optimizer that evaluates the loss again, as LBFGS does, is stepped by a loop of its own"
        )


def _reads_grad_alone(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's own."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _check_in_grad(params: list[Tensor]) -> None:
    """ValueError for a gradient that the norm would count and one of torch's optimizers would not find."""
    for number, param in enumerate(params):
        if not vars(param):  # the common case, quickly
            continue
        for place in ("grad_shard",) if param.grad is not None else ("grad_shard", "decoupled_grad"):
            if getattr(param, place, None) is not None:
                raise ValueError(
                    f"{_here()}: parameter {number} of the optimizer, of shape {tuple(param.shape)}, has its gradient "
                    f"in `{place}`, and torch's optimizers read `grad` alone: put it there, or take FusedAdamW (for "
                    "decoupled_grad) or the ShardedOptimizer that has put it into grad_shard"
                )


def _check_one_mesh(optimizer: ShardedOptimizer) -> None:
    shards = (shard for group in optimizer.param_groups for shard in group["params"])
    if len({shard.device_mesh for shard in shards if isinstance(shard, DTensor)}) > 1:
        raise ValueError(
            f"{_here()}: parameters in several meshes, such as experts, have no norm that is known here: ranks outside "
            "of a mesh may hold other experts, or the same. Say which by OptimizerStep(…, parts=[Part(experts, "
            "sharded_over=<the group whose ranks hold other ones>)])"
        )


def _shards(optimizer: ShardedOptimizer, parts: list[Part]) -> list[Tensor | Part]:
    if not parts:
        return [*optimizer.grad_shards_with_objections()]
    shards = optimizer.grad_shards()
    objections = optimizer.grad_shards_with_objections()[len(shards) :]
    of_parts = _of_grads(parts)
    _check_among(shards, of_parts, parts)
    everybody = [group for part in parts for group in part.sharded_over]  # an objection is to be heard by all of them
    return [*of_parts, *shards, Part(objections, everybody)]


def _of_grads(parts: list[Part]) -> list[Part]:
    # One that is empty says all there is to say, also on a rank outside of its groups.
    return [Part(grads_of(part.tensors), part.sharded_over) if part.tensors else part for part in parts]


def _listed(parts: Part | Iterable[Part]) -> list[Part]:
    listed = [parts] if isinstance(parts, Part) else list(parts)
    for part in listed:
        if not isinstance(part, Part):
            raise TypeError(f"{_here()}: parts must be stepstack_gradnorm.Parts, got {type(part).__name__}")
    return listed


def _check_among(known: list[Tensor], found: list[Part], parts: list[Part]) -> None:
    """ValueError unless what was found for the tensors of Parts is known."""
    ids = set(map(id, known))
    for number, (part, there) in enumerate(zip(parts, found, strict=True)):
        for tensor, of_tensor in zip(part.tensors, there.tensors, strict=True):
            if id(of_tensor) not in ids:
                raise ValueError(
                    f"{_here()}: a tensor of parts[{number}], of shape {tuple(tensor.shape)}, is no parameter of the "
                    "optimizer. Parts are made of the model's parameters, of those that the optimizer was given"
                )


def _here() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
