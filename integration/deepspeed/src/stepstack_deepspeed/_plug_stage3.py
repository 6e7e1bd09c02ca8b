"""ZeRO stage 3: parameters, gradients and states in sub-groups, each rank with its partition of every one."""

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_deepspeed._plug_overrides import Overrides
from stepstack_deepspeed._plug_seam import MODEL_PARALLELISM, MUON, Seam, divide_, joined
from stepstack_gradnorm import Part, total_norm


class Stage3(Seam):
    """`DeepSpeedZeroOptimizer_Stage3`, with or without `offload_optimizer` to the CPU, whole or in part."""

    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scale_if_loss": ("value",),
        "step": ("closure",),
        "backward_epilogue": (),
        "check_overflow": ("partition_gradients",),
        "_constant_buffered_norm2": ("input", "buffer_size"),
        "_get_norm_groups": (),
        "_offload_grad_partition_at_boundary": (
            "param",
            "grad_buffer",
            "offload_fp32_gradients",
            "offload_fp32_offsets",
        ),
        "complete_grad_norm_calculation_for_cpu_offload": ("params",),
        "_finalize_offload_gradient_accumulation": (),
        "unscale_and_clip_grads": ("sub_group_id", "total_norm"),
        "_prepare_fp32_grad_for_sub_group": ("sub_group_id",),
        "_optimizer_step": ("sub_group_id",),
    }

    @staticmethod
    def refusal(engine: Any) -> str | None:
        optimizer = engine.optimizer
        if optimizer.zenflow:
            return "ZenFlow updates a part of the parameters on its own"
        if optimizer.use_muon:
            return MUON
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            return (
                "gradients or parameters on NVMe are not in memory to be measured; write "
                '"device": "cpu" for "nvme" in offload_optimizer and offload_param, or train without plug'
            )
        if optimizer.model_parallel_group is not None:
            return MODEL_PARALLELISM
        ranks = dist.get_process_group_ranks(optimizer.dp_process_group)
        if any(dist.get_process_group_ranks(group) != ranks for group in optimizer.sub_group_process_groups):
            return "parameters that are partitioned over different groups"
        return None

    def attach(self, overrides: Overrides) -> None:
        super().attach(overrides)
        self._is_at_boundary = False
        optimizer = self.optimizer
        self._epilogue = overrides.replace(optimizer, "backward_epilogue", self._backward_epilogue)
        if self.norm:
            self.replace_in_steps(overrides, "_get_norm_groups", self._get_norm_groups)
            self.replace_in_steps(overrides, "check_overflow", lambda partition_gradients=True: None)  # the norm tells
            if optimizer.offload_optimizer:  # a norm and a wait for each gradient: made up for when somebody asks
                overrides.replace(optimizer, "_constant_buffered_norm2", self._norm2)
                name = "_offload_grad_partition_at_boundary"
                self._stock_at_boundary = overrides.replace(optimizer, name, self._at_boundary)
                name = "complete_grad_norm_calculation_for_cpu_offload"
                self._norm_of_backward = overrides.replace(optimizer, name, self._norm_for_cpu_offload)
        if self.clip:
            self.replace_in_steps(overrides, "unscale_and_clip_grads", self._unscale_and_clip_grads)
        if self.inner is not None:
            self.replace_in_steps(overrides, "_optimizer_step", self._optimizer_step)
            if self.clip:
                self.replace_in_steps(overrides, "_prepare_fp32_grad_for_sub_group", self._prepare_grad)

    def hand_back(self) -> None:
        if self.norm and self.optimizer.offload_optimizer:
            self._measure(self.optimizer.norm_for_param_grads)

    def _at_boundary(self, *args: Any, **kwargs: Any) -> None:
        self._is_at_boundary = True
        try:
            self._stock_at_boundary(*args, **kwargs)
        finally:
            self._is_at_boundary = False

    def _norm2(self, input: Tensor, buffer_size: int = 250_000_000) -> Any:
        if self._is_at_boundary:
            return 0.0
        return type(self.optimizer)._constant_buffered_norm2(self.optimizer, input, buffer_size)

    def _norm_for_cpu_offload(self, params: Any) -> Tensor:
        self._measure(self.optimizer.norm_for_param_grads)
        norm: Tensor = self._norm_of_backward(params)
        return norm

    def _measure(self, names: Container[int]) -> None:
        """The norms that DeepSpeed makes in each backward, out of what is in the buffers."""
        optimizer = self.optimizer
        for param in (param for group in optimizer.fp16_groups for param in group):
            name = optimizer.get_param_id(param)
            if name in names:
                *_, grad = self._buffers(param)
                optimizer.norm_for_param_grads[name] = self._norm2(grad)

    def step(self) -> None:
        self.stock_step()

    def _backward_epilogue(self) -> None:
        """Parameters that had no gradient since the last step have those of an earlier one in their buffers."""
        self._epilogue()
        optimizer = self.optimizer
        for group in optimizer.fp16_groups:
            for param in group:
                if param.ds_id not in optimizer._offload_boundary_param_ids:
                    for grad in self._buffers(param):
                        grad.zero_()
        if optimizer.offload_optimizer and optimizer.is_gradient_accumulation_boundary():
            self._copy_sums()

    def _copy_sums(self) -> None:
        """DeepSpeed copies the sums of the parameters that the last micro-batch uses; here are the others'."""
        optimizer = self.optimizer
        used = optimizer._offload_boundary_param_ids
        copied = {
            param.ds_id
            for group in optimizer.fp16_groups
            for param in group
            if optimizer.get_param_id(param) in optimizer.norm_for_param_grads
        }
        if missing := used - copied:
            optimizer._offload_boundary_param_ids = missing
            optimizer._finalize_offload_gradient_accumulation()
            optimizer._offload_boundary_param_ids = used

    def _buffers(self, param: Any) -> Iterable[Tensor]:
        optimizer = self.optimizer
        yield optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id]
        if optimizer.offload_optimizer:
            sub_group_id, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            yield optimizer.fp32_partitioned_groups_flat[sub_group_id].grad.narrow(0, offset, numel)

    def _get_norm_groups(self) -> list[Tensor]:
        norm = total_norm(Part(self._grads(), self.optimizer.dp_process_group))
        self.check(norm, self._stock_norm)
        if self.optimizer.offload_optimizer:
            norm = norm.to("cpu")  # where its users are; here the host waits, and so not when it asks for overflow
        self.unscaled(norm)
        return [norm.double()]  # DeepSpeed squares it once more, and takes the root

    def _grads(self) -> list[Tensor]:
        optimizer = self.optimizer
        if optimizer.offload_optimizer:
            return [param.grad for param in optimizer.fp32_partitioned_groups_flat]
        return [grad for grads in optimizer.averaged_gradients.values() for grad in grads]

    def _stock_norm(self) -> Tensor:
        optimizer, stock = self.optimizer, type(self.optimizer)
        if optimizer.offload_optimizer:  # its norms are those of the backward; what is in the buffers now counts
            self._measure(optimizer.grad_position)
        return combined(stock._get_norm_groups(optimizer))

    def _unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        divisor = self.divisor(self.optimizer.clip_grad, total_norm)
        if self.inner is None:
            divide_([self.optimizer.fp32_partitioned_groups_flat[sub_group_id].grad], divisor)

    def _prepare_grad(self, sub_group_id: int) -> None:
        """The gradients of a sub-group for the optimizer, in the dtype that they have and where they are."""
        param = self.optimizer.fp32_partitioned_groups_flat[sub_group_id]
        param.decoupled_grad = joined(self.optimizer.averaged_gradients[sub_group_id])
        self.optimizer.averaged_gradients[sub_group_id] = None

    def _optimizer_step(self, sub_group_id: int) -> None:
        optimizer = self.optimizer
        assert self.inner is not None
        param = optimizer.fp32_partitioned_groups_flat[sub_group_id]
        group = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[sub_group_id]]
        on_device = optimizer.offload_optimizer and optimizer.subgroup_to_device[sub_group_id] != "cpu"
        owner = optimizer.backup_optimizer if on_device else optimizer.optimizer
        self.inner.step_(sub_group_id, [param], group, owner, self._divisor)
        param.decoupled_grad = None


def combined(norms: Iterable[Tensor]) -> Tensor:
    """DeepSpeed's norms of sub-groups as one: NaN if one of them is −1, its sign for a norm that is not finite."""
    on_host = torch.stack([norm.double().cpu() for norm in norms])
    return torch.where(on_host < 0, math.nan, on_host).square().sum().sqrt()
