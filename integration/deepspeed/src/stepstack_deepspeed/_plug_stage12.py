"""ZeRO stages 1 and 2: one flat buffer for each parameter group, each rank with its partition of every one."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_deepspeed._plug_overrides import Overrides
from stepstack_deepspeed._plug_seam import MODEL_PARALLELISM, MUON, Seam, divide_, here
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
        "complete_grad_norm_calculation_for_cpu_offload": ("params",),
        "_finalize_cpu_offload_gradient_accumulation": (),
        "has_overflow": ("partition_gradients",),
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
            return MUON
        if optimizer.model_parallel_group is not None:
            return MODEL_PARALLELISM
        return None

    def attach(self, overrides: Overrides) -> None:
        super().attach(overrides)
        optimizer = self.optimizer
        self._stale_are_zero = False
        if optimizer.cpu_offload:
            self._epilogue = overrides.replace(optimizer, "backward_epilogue", self._backward_epilogue)
            self._zero_earlier_sums()
        if self.norm:
            self.replace_in_steps(overrides, "scaled_global_norm", self._scaled_global_norm)
            overrides.replace(optimizer, "compute_grad_norm", True)
            self.replace_in_steps(overrides, "check_overflow", lambda partition_gradients=True: None)  # the norm tells
            if optimizer.cpu_offload:  # one look at each gradient, and one wait: made up for when somebody asks
                overrides.replace(optimizer, "update_offload_overflow_tracker", lambda grad: None)
                overrides.replace(optimizer, "set_norm_for_param_grad_in_gpu", self._note_grad)
                name = "complete_grad_norm_calculation_for_cpu_offload"
                self._norm_of_backward = overrides.replace(optimizer, name, self._norm_for_cpu_offload)
                self._stock_has_overflow = overrides.replace(optimizer, "has_overflow", self._has_overflow)
        if self.clip:
            self.replace_in_steps(overrides, "unscale_and_clip_grads", self._unscale_and_clip_grads)
        if self.inner is not None:
            self.replace_in_steps(overrides, "_optimizer_step", self._optimizer_step)

    def hand_back(self) -> None:
        if self.norm and self.optimizer.cpu_offload:
            self._measure_noted()
            self._look_for_overflow()

    def step(self) -> None:
        if self.optimizer.cpu_offload and not self._stale_are_zero:
            self._zero_stale()
        self._stale_are_zero = False
        self.stock_step()
        if self.optimizer.cpu_offload:  # sums in fp32 outlive a step that DeepSpeed skips
            self.optimizer.averaged_gradients = dict.fromkeys(self.optimizer.averaged_gradients)

    def _note_grad(self, param: Any) -> None:
        self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = 0.0

    def _norm_for_cpu_offload(self, params: Any) -> Tensor:
        self._measure_noted()
        norm: Tensor = self._norm_of_backward(params)
        return norm

    def _measure_noted(self) -> None:
        """The norms that DeepSpeed makes in each backward, out of what is in the buffers."""
        norms = self.optimizer.norm_for_param_grads
        for name in norms:
            norms[name] = self._buffer(name).double().norm()

    def _has_overflow(self, partition_gradients: bool = True) -> bool:
        self._look_for_overflow()
        found: bool = self._stock_has_overflow(partition_gradients)
        return found

    def _look_for_overflow(self) -> None:
        noted = self.optimizer.norm_for_param_grads
        self.optimizer.local_overflow = any(not self._buffer(name).isfinite().all() for name in noted)

    def _backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        self._epilogue(*args, **kwargs)
        if self.optimizer.is_gradient_accumulation_boundary():
            self._copy_sums()
            self._zero_stale()
        else:
            self._zero_earlier_sums()

    def _zero_earlier_sums(self) -> None:
        """What later micro-batches are added to is the sum of an earlier step where this one has no gradient yet."""
        optimizer = self.optimizer
        for name in optimizer.accumulated_grads_in_cpu.keys() - optimizer._offload_accumulated_param_ids:
            optimizer.accumulated_grads_in_cpu[name].zero_()

    def _copy_sums(self) -> None:
        """DeepSpeed copies the sums of the parameters that the last micro-batch uses; here are the others'."""
        optimizer = self.optimizer
        used = optimizer._offload_accumulated_param_ids
        if missing := used - optimizer.norm_for_param_grads.keys():
            optimizer._offload_accumulated_param_ids = missing
            optimizer._finalize_cpu_offload_gradient_accumulation()
            optimizer._offload_accumulated_param_ids = used

    def _zero_stale(self) -> None:
        """Parameters without a gradient in this step have that of an earlier one in the buffers on the CPU."""
        for name in self._unused():
            self._buffer(name).zero_()
        self._stale_are_zero = True

    def _unused(self) -> list[int]:
        optimizer = self.optimizer
        names = [optimizer.get_param_id(param) for group in optimizer.params_in_partition for param in group]
        return [name for name in names if name not in optimizer.norm_for_param_grads]

    def _buffer(self, param_id: int) -> Tensor:
        group, _, offset, numel = self.optimizer.grad_position[param_id]
        grad: Tensor = self.optimizer.single_partition_of_fp32_groups[group].grad
        return grad.view(-1).narrow(0, offset, numel)

    def _scaled_global_norm(self, norm_type: float = 2) -> Tensor:
        self._refuse_unused()
        optimizer = self.optimizer
        norm = total_norm(Part(self._grads(), optimizer.dp_process_group), norm_type)
        self.check(norm, self._stock_norm)
        if optimizer.cpu_offload:
            norm = norm.to("cpu")  # where its users are; here the host waits, and so not when it asks for overflow
        self.unscaled(norm)
        return norm

    def _refuse_unused(self) -> None:
        optimizer = self.optimizer
        if not optimizer.cpu_offload or optimizer.ignore_unused_parameters:
            return
        unused = self._unused()
        found = torch.tensor(len(unused), device=optimizer.bit16_groups_flat[0].device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)  # all ranks raise, or none
        if found.item():
            names = {id(param): name for name, param in self.engine.module.named_parameters()}
            params = (param for group in optimizer.params_in_partition for param in group)
            named = [names[id(param)] for param in params if optimizer.get_param_id(param) in unused]
            raise AssertionError(
                f"{here()}: no gradient in this step for {', '.join(named) or 'parameters of another rank'}, which "
                "ignore_unused_parameters: false forbids: use all trainable parameters in the loss, freeze these, "
                "or set it to true"
            )

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
        is_checked = self.optimizer.check_grad_overflow or self.optimizer.dtype != torch.bfloat16
        if isinstance(divisor, Tensor) and total_norm is not None and not is_checked:
            # The step may be made though the norm is not finite: DeepSpeed clips finite gradients to zero then.
            is_valid = total_norm.isfinite() & (total_norm >= 0)
            self._divisor = divisor = divisor.where(is_valid.to(divisor.device), math.inf)
        if self.inner is None:
            divide_(grad_groups_flat, divisor)

    def _optimizer_step(self, group_no: int) -> None:
        optimizer = self.optimizer
        assert self.inner is not None
        params = [optimizer.single_partition_of_fp32_groups[group_no]]
        group = optimizer.optimizer.param_groups[group_no]
        self.inner.step_(group_no, params, group, optimizer.optimizer, self._divisor)
        optimizer._lazy_init_hp_params_optimizer_state()
