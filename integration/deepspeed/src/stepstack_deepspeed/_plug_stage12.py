"""ZeRO stages 1 and 2: one flat buffer for each parameter group, each rank with its partition of every one."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from stepstack_deepspeed._plug_overrides import Overrides
from stepstack_deepspeed._plug_seam import Seam, divide_
from stepstack_gradnorm import Part, total_norm


class Stage12(Seam):
    """`DeepSpeedZeroOptimizer`, with or without `offload_optimizer` to the CPU."""

    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scale_if_loss": ("value",),
        "step": ("closure",),
        "backward_epilogue": ("args", "kwargs"),
        "check_overflow": ("partition_gradients",),
        "update_offload_overflow_tracker": ("grad",),
        "set_norm_for_param_grad_in_gpu": ("param",),
        "scaled_global_norm": ("norm_type",),
        "unscale_and_clip_grads": ("grad_groups_flat", "total_norm"),
        "_optimizer_step": ("group_no",),
    }

    @staticmethod
    def refusal(engine: Any) -> str | None:
        optimizer = engine.optimizer
        if optimizer.zenflow:
            return "ZenFlow updates a part of the parameters on its own"
        if "muon" in type(optimizer.optimizer).__name__.lower():
            return "Muon's updates are no gradients any more when they are measured"
        if optimizer.model_parallel_group is not None:
            return "model parallelism (an mpu)"
        return None

    def attach(self, overrides: Overrides) -> None:
        super().attach(overrides)
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            self._epilogue = overrides.replace(optimizer, "backward_epilogue", self._backward_epilogue)
        if self.norm:
            overrides.replace(optimizer, "scaled_global_norm", self._scaled_global_norm)
            overrides.replace(optimizer, "compute_grad_norm", True)
            overrides.replace(optimizer, "check_grad_overflow", True)  # a norm that is not finite skips in any dtype
            overrides.replace(optimizer, "check_overflow", lambda partition_gradients=True: None)  # the norm tells
            if optimizer.cpu_offload:  # one look at each gradient, and one wait, that nobody needs
                overrides.replace(optimizer, "update_offload_overflow_tracker", lambda grad: None)
                overrides.replace(optimizer, "set_norm_for_param_grad_in_gpu", self._note_grad)
        if self.clip:
            overrides.replace(optimizer, "unscale_and_clip_grads", self._unscale_and_clip_grads)
        if self.inner is not None:
            overrides.replace(optimizer, "_optimizer_step", self._optimizer_step)

    def step(self) -> None:
        self.stock_step()

    def _note_grad(self, param: Any) -> None:
        self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = 0.0

    def _backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """Parameters without a gradient in this step have that of an earlier one in the buffers on the CPU."""
        self._epilogue(*args, **kwargs)
        optimizer = self.optimizer
        if not optimizer.is_gradient_accumulation_boundary():
            return
        for group in optimizer.params_in_partition:
            for param in group:
                name = optimizer.get_param_id(param)
                if name not in optimizer.norm_for_param_grads:
                    self._buffer(name).zero_()

    def _buffer(self, param_id: int) -> Tensor:
        group, _, offset, numel = self.optimizer.grad_position[param_id]
        grad: Tensor = self.optimizer.single_partition_of_fp32_groups[group].grad
        return grad.view(-1).narrow(0, offset, numel)

    def _scaled_global_norm(self, norm_type: float = 2) -> Tensor:
        norm = total_norm(Part(self._grads(), self.optimizer.dp_process_group), norm_type)
        self.check(norm, self._stock_norm)
        if self.optimizer.cpu_offload:
            norm = norm.to("cpu")  # where its users are; here the host waits, and so not when it asks for overflow
        self.unscaled(norm)
        return norm

    def _grads(self) -> list[Tensor]:
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            return [param.grad for param in optimizer.single_partition_of_fp32_groups]
        return [grad for grads in optimizer.averaged_gradients.values() for grad in grads]

    def _stock_norm(self) -> Tensor:
        optimizer = self.optimizer
        if optimizer.cpu_offload:  # its norms are those of the backward; what is in the buffers now counts
            for group in optimizer.params_in_partition:
                for param in group:
                    name = optimizer.get_param_id(param)
                    optimizer.norm_for_param_grads[name] = self._buffer(name).double().norm()
        norm: Tensor = type(optimizer).scaled_global_norm(optimizer)
        return norm

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: Tensor | None) -> None:
        divisor = self.divisor(self.optimizer.clip_grad, total_norm)
        if self.inner is None:
            divide_(grad_groups_flat, divisor)

    def _optimizer_step(self, group_no: int) -> None:
        optimizer = self.optimizer
        assert self.inner is not None
        params = [optimizer.single_partition_of_fp32_groups[group_no]]
        group = optimizer.optimizer.param_groups[group_no]
        self.inner.step_(group_no, params, group, optimizer.optimizer, self._divisor)
        optimizer._lazy_init_hp_params_optimizer_state()
