"""Stage 0: the whole gradient of every parameter on every rank, with fp32 weights beside 16-bit ones, or without."""

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from stepstack_deepspeed._plug_overrides import Overrides
from stepstack_deepspeed._plug_seam import MODEL_PARALLELISM, Seam, divide_, joined
from stepstack_gradnorm import total_norm


class _WholeStep(Seam):
    """A step that is replaced as a whole."""

    takes_parts = False

    def grads(self) -> list[Tensor]:
        """Of the parameters that have one, the same on all ranks."""
        return [param.grad for param in self.params() if param.grad is not None]

    def params(self) -> list[Tensor]:
        """Those of the model."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def measure(self) -> bool:
        """Whether the step is to be made, which the host waits for: the engine counts skips."""
        norm = total_norm(self.grads())
        self.check(norm, self._stock_norm)
        return bool(self.unscaled(norm).isfinite().item())

    def _stock_norm(self) -> float:
        return float(sys.modules["deepspeed.runtime.utils"].get_weight_norm(self.grads()))  # of what it is given


class Fp32(_WholeStep):
    """A plain torch optimizer, as stage 0 has it in fp32."""

    def attach(self, overrides: Overrides) -> None:
        super().attach(overrides)
        optimizer = self.optimizer
        overrides.replace(optimizer, "overflow", False)
        overrides.replace(optimizer, "_global_grad_norm", None)
        self._clip_now = overrides.replace(self.engine, "clip_fp32_gradients", self._clip_fp32_gradients)

    def _clip_fp32_gradients(self) -> None:
        if not self.engine._running_engine_step:  # in a step of the engine, that of the optimizer does it
            self._clip_now()

    def loss_scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self) -> None:
        optimizer = self.optimizer
        optimizer.overflow = not self.measure()
        if optimizer.overflow:
            return
        divisor = self.divisor(self.engine.gradient_clipping())
        if self.inner is None:
            divide_(self.grads(), divisor)
            self.stock_step()
            return
        for number, group in enumerate(optimizer.param_groups):
            self.inner.step_(number, group["params"], group, optimizer, divisor)


class _Half(_WholeStep):
    """16-bit parameters with fp32 weights beside them.

    DeepSpeed 0.19 divides by a loss scale here that it has not multiplied by; plugged, `engine.backward` and
    `engine.scale` multiply. It also makes a step of its inner optimizer with zero gradients when it is built, which
    counts and decays; plugged before the first step, with our Adam inside, that is taken back.
    """

    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "step": ("closure",),
        "_update_scale": ("skip",),
        "_skip_invalid_grad_norm": (),
    }

    @staticmethod
    def refusal(engine: Any) -> str | None:
        if engine.optimizer.mpu is not None:
            return MODEL_PARALLELISM
        if any(getattr(engine.optimizer, name, False) for name in ("fused_adam_legacy", "fused_lamb_legacy")):
            return "legacy fusion: its inner optimizer unscales by itself"
        has_grads = any(param.grad is not None for group in engine.optimizer.fp16_groups for param in group)
        if engine.optimizer.loss_scale_config.use_grad_scaling and has_grads:
            return (
                "gradients of a loss that DeepSpeed did not multiply by its scale; plug before a step's first backward"
            )
        return None

    def attach(self, overrides: Overrides) -> None:
        super().attach(overrides)
        if self.inner is not None and not self.engine.global_steps:
            self.optimizer.refresh_fp32_params()
            self.optimizer.optimizer.state.clear()
        if self.optimizer.loss_scale_config.use_grad_scaling:
            self._stock_backward = overrides.replace(self.engine, "backward", self._backward)
            self._stock_scale = overrides.replace(self.engine, "scale", self._scale_loss)

    def loss_scale(self) -> float:
        scale = self.optimizer.loss_scale
        return 1.0 if scale is None else float(scale)

    def params(self) -> list[Tensor]:
        return [param for group in self.optimizer.fp16_groups for param in group]

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scale = self.remember_scale()
        result: Tensor = self._stock_backward(loss.float() * scale, *args, **kwargs)
        return (result / scale).to(loss.dtype)

    def _scale_loss(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._stock_scale(loss.float() * self.remember_scale())
        return scaled

    @torch.no_grad()
    def step(self) -> bool:
        """Whether it was skipped, as DeepSpeed's own say."""
        optimizer = self.optimizer
        optimizer.overflow = not self.measure()
        if optimizer.overflow:
            optimizer._skip_invalid_grad_norm()
            return True
        optimizer._update_scale(False)
        self._update(self.divisor(optimizer.clip_grad))
        return False

    def _update(self, divisor: Tensor | float) -> None:
        optimizer = self.optimizer
        masters = self._with_grads()
        if self.inner is None:
            for param in (param for group in masters for param in group):
                param.grad, param.decoupled_grad = param.decoupled_grad.to(param.dtype), None
            divide_([param.grad for group in masters for param in group], divisor)
            optimizer.optimizer.step()
        else:
            for number, (params, group) in enumerate(zip(masters, optimizer.optimizer.param_groups, strict=True)):
                self.inner.step_(number, params, group, optimizer.optimizer, divisor)
        for param in (param for group in masters for param in group):
            param.grad = param.decoupled_grad = None
        self._copy_to_model()

    def _with_grads(self) -> list[list[Any]]:
        """The fp32 weights by group, each with what is to be its gradient as `decoupled_grad`."""
        raise TypeError(f"{type(self).__name__} has no weights")

    def _copy_to_model(self) -> None:
        raise TypeError(f"{type(self).__name__} has no weights")


class Fp16Unfused(_Half):
    """`FP16_UnfusedOptimizer`: an fp32 weight beside each parameter."""

    def _with_grads(self) -> list[list[Any]]:
        for weights, params in zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups, strict=True):
            for weight, param in zip(weights, params, strict=True):
                weight.decoupled_grad = torch.zeros_like(param) if param.grad is None else param.grad
        groups: list[list[Any]] = self.optimizer.fp32_groups
        return groups

    def _copy_to_model(self) -> None:
        for weights, params in zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups, strict=True):
            torch._foreach_copy_([param.data for param in params], [weight.data for weight in weights])


class Fp16(_Half):
    """`FP16_Optimizer`: the fp32 weights of a group in one flat tensor."""

    def _with_grads(self) -> list[list[Any]]:
        weights: list[Any] = self.optimizer.fp32_groups_flat
        for weight, params in zip(weights, self.optimizer.fp16_groups, strict=True):
            weight.decoupled_grad = joined(
                torch.zeros_like(param) if param.grad is None else param.grad for param in params
            )
        return [[weight] for weight in weights]

    def _copy_to_model(self) -> None:
        for weight, params in zip(self.optimizer.fp32_groups_flat, self.optimizer.fp16_groups, strict=True):
            pieces = weight.data.split([param.numel() for param in params])
            for param, piece in zip(params, pieces, strict=True):
                param.data.copy_(piece.view_as(param))
