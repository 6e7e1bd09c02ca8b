"""What all plugged optimizers share: the scale, the norm and the divisor of a step."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_clip import clip_coefficient, multiply_
from stepstack_deepspeed._plug_adam import InnerAdam
from stepstack_deepspeed._plug_overrides import Overrides

# Refusals that several optimizers share.
MUON = (
    "Muon's updates are no gradients any more when they are measured; give deepspeed.initialize an Adam "
    '("optimizer": {"type": "AdamW"} in its config), or train without plug'
)
MODEL_PARALLELISM = (
    "model parallelism (an mpu); call deepspeed.initialize without mpu, with the whole model on every rank "
    "(ZeRO stage 3 shards it), or train without plug"
)


class Seam:
    """One step of a DeepSpeed optimizer, as far as we do it.

    `norm`, `clip`: whether measuring and clipping are ours. `inner`: who updates, or None for DeepSpeed's own.
    Subclasses say what they need of the class they replace methods of (`signatures`, by method), and replace them, and
    say what a `step` is between `begin` and `end`.
    """

    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    takes_parts = True
    """Whether norm and clip can be replaced one without the other."""

    def __init__(self, engine: Any, *, norm: bool, clip: bool, inner: InnerAdam | None) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.norm = norm
        self.clip = clip
        self.inner = inner
        self._scale_of_backwards: float | None = None
        self._multiplied_by: float | None = None
        self._measured: Tensor | None = None
        self._divisor: Tensor | float | None = None
        self._checked = False

    @staticmethod
    def refusal(engine: Any) -> str | None:
        """Why this engine is not handled though its class is; None if it is."""
        return None

    def attach(self, overrides: Overrides) -> None:
        """Replace what there is to replace; subclasses have more."""
        self._stock_zero_grad = overrides.replace(self.optimizer, "zero_grad", self._zero_grad)
        self.stock_step = overrides.replace(self.optimizer, "step", self._step)
        if "scale_if_loss" in self.signatures:
            self._stock_scale_if_loss = overrides.replace(self.optimizer, "scale_if_loss", self._scale_if_loss)

    def hand_back(self) -> None:
        """Before all of it is put back: make up for what a stock step would need and plugged was not done."""

    def replace_in_steps(self, overrides: Overrides, name: str, ours: Callable[..., Any]) -> None:
        """Replace a method of the optimizer while it steps. Whoever calls it at another time gets DeepSpeed's own."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs) if self.is_stepping else stock(*args, **kwargs)

        stock = overrides.replace(self.optimizer, name, called)

    @property
    def is_stepping(self) -> bool:
        """Whether this is within a step."""
        return self._multiplied_by is not None

    def step(self) -> Any:
        """What is to be done in a step, and returned."""
        raise TypeError(f"{type(self).__name__} makes no steps")

    def loss_scale(self) -> float:
        """What a loss would be multiplied by now."""
        optimizer = self.optimizer
        if optimizer.custom_loss_scaler:
            return float(optimizer.external_loss_scale)
        return float(optimizer.loss_scaler.cur_scale) if hasattr(optimizer, "loss_scaler") else 1.0

    def remember_scale(self) -> float:
        """At a backward: the scale that it multiplies the loss by, which is what the step will divide by."""
        scale = self.loss_scale()
        if self._scale_of_backwards not in (None, scale):
            raise RuntimeError(
                f"{here()}: the loss scale was {self._scale_of_backwards} in an earlier backward of this step and is "
                f"{scale} now, so their gradients can't be added; change it between steps, or discard those there are "
                "by engine.optimizer.zero_grad()"
            )
        self._scale_of_backwards = scale
        return scale

    def begin(self) -> None:
        """A step begins."""
        scale = self._scale_of_backwards
        self._multiplied_by = self.loss_scale() if scale is None else scale  # None: nobody scaled a loss by the engine
        self._scale_of_backwards = self._measured = self._divisor = None

    def end(self) -> None:
        """It is over, made or skipped."""
        if self._measured is not None:
            self.optimizer._global_grad_norm = self._measured
        self._multiplied_by = self._divisor = None

    def unscaled(self, scaled_norm: Tensor) -> Tensor:
        """The norm of the gradients without their scale, 0-d fp32; it is what the engine will report."""
        assert self._multiplied_by is not None
        self._measured = (scaled_norm / self._multiplied_by).float()
        return self._measured

    def divisor(self, max_norm: float, scaled_norm: Tensor | None = None) -> Tensor | float:
        """The number to divide the gradients by: scale ÷ clip coefficient. The same object throughout a step."""
        if self._divisor is None:
            assert self._multiplied_by is not None
            norm = self._measured
            if norm is None and scaled_norm is not None:
                norm = scaled_norm / self._multiplied_by
            if max_norm > 0 and norm is not None:
                self._divisor = (self._multiplied_by / clip_coefficient(norm, max_norm)).float()
            else:
                self._divisor = self._multiplied_by
        return self._divisor

    def check(self, scaled_norm: Tensor, stock: Callable[[], Any]) -> None:
        """Once, in the first step in which DeepSpeed has a norm: raise RuntimeError unless it is ours too."""
        if self._checked:
            return
        theirs, ours = float(stock()), float(scaled_norm)  # the host waits, this once
        if not math.isfinite(theirs) or theirs < 0:
            return  # DeepSpeed's is not finite in more cases than ours
        self._checked = True
        if not math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-20):
            raise RuntimeError(
                f"{here()}: DeepSpeed measures a gradient norm of {theirs}, we of {ours} (with the loss scale "
                f"{self._multiplied_by}), so this engine is not what we take it for. Nothing has been updated. "
                "plug(engine, norm=False) leaves the norm to DeepSpeed"
            )

    def _step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise TypeError(f"a plugged {type(self.optimizer).__name__} takes no closure")
        self.begin()
        try:
            return self.step()
        finally:
            self.end()

    def _scale_if_loss(self, value: Any) -> Any:
        self.remember_scale()
        return self._stock_scale_if_loss(value)

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """What is discarded takes its scale with it, so that a checkpoint of another one can be loaded."""
        self._scale_of_backwards = None
        self._stock_zero_grad(*args, **kwargs)


def divide_(grads: Iterable[Tensor], divisor: Tensor | float) -> None:
    """Divide in place, in one pass; none if there is nothing to divide by. No host sync."""
    if isinstance(divisor, Tensor) or divisor != 1:
        multiply_(list(grads), 1 / divisor)


def joined(grads: Iterable[Tensor]) -> Tensor:
    """Gradients as one flat tensor: a view of them where they are neighbours in memory, in this order."""
    grads = list(grads)
    first = grads[0]
    if first.is_contiguous():
        storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
        for grad in grads:
            is_next = grad.untyped_storage().data_ptr() == storage and grad.storage_offset() == offset
            if not (is_next and grad.is_contiguous() and grad.dtype == first.dtype):
                break
            offset += grad.numel()
        else:
            return first.as_strided((offset - first.storage_offset(),), (1,))
    return torch.cat([grad.reshape(-1) for grad in grads])


def here() -> str:
    """Which process says so."""
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
