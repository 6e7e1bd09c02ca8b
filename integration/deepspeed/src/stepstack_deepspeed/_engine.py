"""`Engine`: a model, its optimizer and its schedule, with the calls of DeepSpeed's engine."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stepstack import OptimizerStep, StepResult
from stepstack_deepspeed._config import Config
from stepstack_deepspeed._config_calls import ConfigCalls
from stepstack_deepspeed._curves import rates_of
from stepstack_deepspeed._elsewhere import ENGINE, explained
from stepstack_deepspeed._fsdp import forget_backward_, reshard_
from stepstack_deepspeed._precision import in_half, scaled
from stepstack_deepspeed._processes import ranks, this_rank
from stepstack_deepspeed._saved_calls import SavedCalls
from stepstack_deepspeed._schedules import ScheduledRates, SteppedScheduler
from stepstack_deepspeed._tensors import remember_
from stepstack_deepspeed._weights import keep_masters_up_
from stepstack_sharded_states import ShardedOptimizer


class Engine(ConfigCalls, SavedCalls, nn.Module):
    """What `initialize` makes of a model and a config. In a loop:

        for batch in dataloader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    Every `gradient_accumulation_steps`-th `step` is one of the optimizer: the norm of the gradient of all ranks,
    clipping, the update, the loss scale, the learning rate. The others count only. No call waits for the device, except
    those that give a Python number.

    `module`, `optimizer` and `lr_scheduler` are what they are called; what else is asked of the engine is looked up in
    the module. Every rank calls `forward`, `backward`, `step` and the checkpoints' methods alike.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        optimizer_step: OptimizerStep,
        schedule: ScheduledRates | SteppedScheduler | None,
        *,
        config: Config,
        device: torch.device,
        training_dataloader: DataLoader[Any] | None = None,
        handed_over: Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer if handed_over is None else handed_over
        self.lr_scheduler = schedule.scheduler if isinstance(schedule, SteppedScheduler) else schedule
        self.training_dataloader = training_dataloader
        self.device = device
        """Of this process, for its batches."""
        self.global_rank, self.world_size = this_rank(), ranks()
        self.dp_world_size, self.mp_world_size = self.world_size, 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank))
        self.micro_steps = 0
        """Calls of `step`."""
        self.global_steps = 0
        """Steps of the optimizer, skipped ones included."""
        self.global_samples = 0
        """What all ranks have seen in these."""
        self.scaler = optimizer_step.scaler if config.precision.loss_scale is not None else None
        """Of the loss, with fp16."""
        self.applied_steps = optimizer_step.applied_steps
        """Steps of the optimizer that changed the parameters: 0-d fp32, on the device."""
        self._config = config
        self._optimizer, self._optimizer_step = optimizer, optimizer_step
        self._schedule = schedule
        self._skipped_steps = torch.zeros_like(optimizer_step.applied_steps)
        self._result: StepResult | None = None
        self._last_step_was_whole = False
        self._boundary: bool | None = None
        self._in_step = False
        self._backwards = 0
        self._steps_counted = 0  # since the last one of the optimizer
        self._no_sync = False
        self._is_made = True
        keep_masters_up_(module, optimizer)
        remember_(module, optimizer)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module gives. With `fp16.auto_cast` it gets positional inputs in fp16."""
        if self._config.precision.casts_inputs:
            inputs = in_half(inputs)
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of the loss of a micro-batch, divided by the accumulation steps, times the loss scale.

        Gives the loss as it was divided; `scale_wrt_gas=False` does not divide. In stages 0 and 1 ranks reduce
        gradients in the last backward of a step, in 2 and 3 in each of them. If it raises on all ranks, the gradients
        are forgotten, those of earlier micro-batches too, and training may go on with the next batch.
        """
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise TypeError(f"loss must be a tensor of one number, got {getattr(loss, 'shape', type(loss))}")
        if scale_wrt_gas and self._config.batch.accumulation > 1:
            loss = loss / self._config.batch.accumulation
        try:
            with self._reducing_or_not():
                torch.autograd.backward(scaled(loss, self.scaler), retain_graph=retain_graph)
        except Exception:
            # Of some parameters there is a gradient now, of others not, and some of them are reduced.
            forget_backward_(self.module)
            self.zero_grad()
            raise
        self._backwards += 1
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as `backward` would give it to autograd, for a loop that calls `.backward()` itself.

        Each such backward reduces the gradients, unless it is in `no_sync()`.
        """
        self._backwards += 1
        return scaled(loss / self._config.batch.accumulation, self.scaler)

    def step(self, lr_kwargs: None = None) -> None:
        """Count a micro-batch, and at the end of an accumulation make a step of the optimizer.

        If the gradient is not finite on some rank, nothing changes on any of them but the loss scale. Gradients are
        used up. RuntimeError in `no_sync()`, or where no `backward` was since the last step.
        """
        if lr_kwargs:
            raise ValueError(f"lr_kwargs is {lr_kwargs!r}: torch's schedulers and those of the config take none")
        if self._no_sync:
            raise RuntimeError("step() inside of no_sync(): the gradients are not reduced there; call it outside")
        self._in_step = True
        self._last_step_was_whole = self.is_gradient_accumulation_boundary()
        self._in_step = False
        if self._last_step_was_whole:
            self._step_optimizer()
        self._steps_counted = 0 if self._last_step_was_whole else self._steps_counted + 1
        self.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. A step does so itself."""
        self._optimizer.zero_grad(set_to_none=set_to_none)
        self._backwards = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate, in stages 0 and 1. RuntimeError in the others."""
        if self._config.sharding.stage >= 2:
            raise RuntimeError(
                f"no_sync() in stage {self._config.sharding.stage}: there each rank keeps its share of the gradients "
                "only, so each backward reduces them"
            )
        if self._no_sync:
            raise RuntimeError("no_sync() inside of no_sync(): leave the inner one out")
        with self._not_reducing():
            self._no_sync = True
            try:
                yield
            finally:
                self._no_sync = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward at hand is the last one before a step of the optimizer, and `step` makes that."""
        if self._boundary is not None:
            return self._boundary
        if not self._config.managed_accumulation:
            return self._in_step
        return (self._steps_counted + 1) % self._config.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on each backward is the last one before a step, or none is; to be set before the forward."""
        if not self._config.managed_accumulation:
            raise RuntimeError("managed_gradient_accumulation is false in the config: every step() is a boundary")
        self._boundary = is_boundary

    def get_global_grad_norm(self) -> Tensor | None:
        """The norm of the whole gradient of the last step, unscaled, before clipping: 0-d fp32, on the device.

        Not finite if the step was skipped. None before the first step.
        """
        return None if self._result is None else self._result.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters: it was one of the optimizer, and not skipped. Waits."""
        return self._last_step_was_whole and self._result is not None and not self._result.skipped

    @property
    def skipped_steps(self) -> int:
        """How many steps of the optimizer changed nothing, since a gradient was not finite. Waits."""
        return int(self._skipped_steps)

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self._skipped_steps.fill_(number)

    def loss_scale(self) -> float:
        """What the loss is multiplied by, 1 without fp16. Waits."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, for the next step. Waits, if a schedule has made it a tensor."""
        return rates_of(self._optimizer)

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas; 0 for one that has neither."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._optimizer.param_groups]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` of the module, in place, with these arguments; `compile_kwargs` among them are unpacked."""
        kwargs |= kwargs.pop("compile_kwargs", None) or {}
        self.module.compile(*args, **kwargs)

    @property
    def is_compiled(self) -> bool:
        """Whether that was called."""
        return self.module._compiled_call_impl is not None

    def empty_partition_cache(self) -> None:
        """Give back the memory of parameters that are gathered (stage 3)."""
        reshard_(self.module)

    def destroy(self) -> None:
        """Give back the memory of the gradients and gathered parameters, for an engine that is not used any more.

        The rest goes with the last reference; the process group is its maker's.
        """
        self.zero_grad()
        reshard_(self.module)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("module", "optimizer", "lr_scheduler") and "_is_made" in vars(self):
            raise AttributeError(f"engine.{name} can't be replaced, the engine would go on with the one that it has: "
                                 "give it to initialize")  # fmt: skip
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if hasattr(self.module, name):
                return getattr(self.module, name)
            who = f"neither the engine nor its module, of class {type(self.module).__name__}, has"
            raise AttributeError(explained(who, name, ENGINE)) from None

    def _step_optimizer(self) -> None:
        if not self._backwards:
            raise RuntimeError(
                "step() without a backward() of the engine since the last one: gradients of loss.backward() lack the "
                "loss scale and the division by the accumulation steps. Call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        backwards, self._backwards = self._backwards, 0
        self._result = self._optimizer_step()
        reshard_(self.module)
        self._skipped_steps += self._result.skipped
        if self._schedule is not None:
            self._schedule.move()
        self.global_steps += 1
        batch = self._config.batch
        self.global_samples += (
            batch.train if self._config.managed_accumulation else (backwards * batch.micro * batch.ranks)
        )

    def _reducing_or_not(self) -> AbstractContextManager[None]:
        if self._config.sharding.reduces_always or self.is_gradient_accumulation_boundary():
            return nullcontext()
        return self._not_reducing()

    def _not_reducing(self) -> AbstractContextManager[None]:
        assert isinstance(self._optimizer, ShardedOptimizer)
        return self._optimizer.no_sync()
