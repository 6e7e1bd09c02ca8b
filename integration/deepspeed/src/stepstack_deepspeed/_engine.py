"""`Engine`: a model, its optimizer and its schedule, with the calls of DeepSpeed's engine."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepstack import OptimizerStep, StepResult
from stepstack_deepspeed import _engine_checkpoint
from stepstack_deepspeed._config import Config
from stepstack_deepspeed._fsdp import forget_backward_, reshard_
from stepstack_deepspeed._precision import scaled
from stepstack_deepspeed._processes import ranks, this_rank
from stepstack_deepspeed._schedules import ScheduledRates, SteppedScheduler
from stepstack_sharded_states import ShardedOptimizer


class Engine(nn.Module):
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
        lr_scheduler: ScheduledRates | SteppedScheduler | None,
        *,
        config: Config,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.device = device
        """Of this process, for its batches."""
        self.global_rank, self.world_size = this_rank(), ranks()
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
        self._optimizer_step = optimizer_step
        self._skipped_steps = torch.zeros_like(optimizer_step.applied_steps)
        self._result: StepResult | None = None
        self._last_step_was_whole = False
        self._boundary: bool | None = None
        self._in_step = False
        self._backwards = 0
        self._no_sync = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module gives."""
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
        self.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. A step does so itself."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
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
        return (self.micro_steps + 1) % self._config.batch.accumulation == 0

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
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write everything into `save_dir/tag`, complete or not at all; return the checkpoint's path.

        Every rank calls this and writes its share; RuntimeError in the middle of an accumulation. `tag` is
        `global_step{n}` unless given. `client_state` consists of numbers, text, lists, dicts and the like (see
        `stepstack.save_checkpoint`). `save_latest` writes the tag into `save_dir/latest`, when all is complete.
        """
        if exclude_frozen_parameters:
            raise ValueError("exclude_frozen_parameters is true: a checkpoint has the whole model")
        if self._backwards:
            raise RuntimeError(
                f"save_checkpoint() with the gradients of {self._backwards} backwards, which it would lose: "
                "save after the step, or call zero_grad()"
            )
        return _engine_checkpoint.save(self, save_dir, tag, client_state or {}, save_latest)

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[Path | None, Any]:
        """Make everything what it was, on any number of ranks and in any stage; return the path and the client state.

        Every rank calls this. Without a tag it is the one in `load_dir/latest`; (None, None), and a log message, if
        there is none. What isn't loaded stays as it is: counts go with all but `load_module_only`. Gradients are
        forgotten.
        `stepstack.CheckpointError`, on every rank, for what is incomplete or doesn't fit; then nothing has changed.
        """
        if not load_module_strict:
            raise ValueError("load_module_strict is false: a checkpoint must have the model's names, all of them")
        return _engine_checkpoint.load(
            self,
            load_dir,
            tag,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def train_batch_size(self) -> int:
        """Samples in a step of the optimizer, of all ranks."""
        return self._config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a backward of one rank."""
        return self._config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backwards in a step of the optimizer."""
        return self._config.batch.accumulation

    def gradient_clipping(self) -> float:
        """The norm that gradients are scaled down to; 0 for no clipping."""
        return self._config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._config.sharding.stage

    def fp16_enabled(self) -> bool:
        """Whether the weights are fp16 in forward and backward."""
        return self._config.precision.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the weights are bf16 in forward and backward."""
        return self._config.precision.dtype == torch.bfloat16

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if hasattr(self.module, name):
                return getattr(self.module, name)
            kind = type(self.module).__name__
            raise AttributeError(f"neither the engine nor its module, of class {kind}, has {name!r}") from None

    def _step_optimizer(self) -> None:
        if not self._backwards:
            raise RuntimeError(
                "step() without a backward() of the engine since the last one: gradients of loss.backward() lack the "
                "loss scale and the division by the accumulation steps. Call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        self._backwards = 0
        self._result = self._optimizer_step()
        reshard_(self.module)
        self._skipped_steps += self._result.skipped
        if self.lr_scheduler is not None:
            self.lr_scheduler.move()
        self.global_steps += 1
        self.global_samples += self._config.batch.train

    def _reducing_or_not(self) -> AbstractContextManager[None]:
        if self._config.sharding.reduces_always or self.is_gradient_accumulation_boundary():
            return nullcontext()
        return self._not_reducing()

    def _not_reducing(self) -> AbstractContextManager[None]:
        assert isinstance(self.optimizer, ShardedOptimizer)
        return self.optimizer.no_sync()
