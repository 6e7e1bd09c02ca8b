"""`DistributedFusedAdam`: the optimizer that a NeMo config names."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from stepstack_fused_adam import FusedAdam
from stepstack_megatron import is_expert, parallel_state
from stepstack_nemo._arguments import precision, refuse
from stepstack_nemo._groups import apart, as_groups, check_hook_flags, param_of, trained
from stepstack_nemo._mesh import Meshes, Spread
from stepstack_nemo._methods import ApexMethods
from stepstack_nemo._pending import Pending
from stepstack_nemo._rates import LearningRates


class DistributedFusedAdam(ApexMethods):
    """Adam(W) whose states are spread over data-parallel ranks, with the arguments and methods of Apex's
    DistributedFusedAdam and of NeMo's subclass of it. Needs neither Apex nor a GPU.

        optim: {name: stepstack_distributed_fused_adam, lr: 2e-4, betas: [0.9, 0.95], distribute_within_nodes: true}

    It is a `stepstack_sharded_states.ShardedOptimizer` of `stepstack_fused_adam.FusedAdam`; how parameters, gradients
    and states lie and travel is told there. docs/coming-from-nemo.md goes through all arguments. The first eight are
    Adam's own, in Apex's order; dtypes may be words ("bf16"). Beside Apex's and NeMo's there are

    - zero_fill_unused: a parameter without a gradient is stepped as if it were zero, as Apex does. By default it is
      skipped, as torch does.
    - find_unused_parameters: ranks may differ in which parameters have one.
    - exp_avg_dtype, exp_avg_sq_dtype, backend: FusedAdam's.

    Where Megatron has set up its groups, gradients are averaged over its data-parallel group, those of experts over
    theirs, and a norm is that of the whole model, duplicates and shared weights counted once. A parameter group with
    experts in it becomes two.

    Clipping and unscaling. `clip_grad_norm` only notes by what the next step divides. `unscale_grads` divides in place,
    so that whoever looks at the gradients next (a trainer's own clipping) is right; fp16 gradients would lose bits
    that way, of them it is noted too. A step uses the notes up, and is skipped if the norm that was clipped by was not
    finite. With `_step_supports_amp_scaling` False, scalers unscale before a trainer clips; `grad_scale` and
    `found_inf`, set by hand or by our GradScaler, work all the same.

    Raises ValueError for what it can't do, with what to do instead.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        dtype: torch.dtype | str = torch.float32,
        grad_sync_dtype: torch.dtype | str | None = None,
        param_sync_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        process_group: ProcessGroup | None = None,
        distributed_process_group: ProcessGroup | None = None,
        redundant_process_group: ProcessGroup | None = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool | None = None,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
        disable_distributed_parameters: bool = False,
        distribute_within_nodes: bool = False,
        distributed_size: int | None = None,
        lock_timeout: float | None = None,
        zero_fill_unused: bool = False,
        find_unused_parameters: bool = False,
        exp_avg_dtype: torch.dtype | str | None = None,
        exp_avg_sq_dtype: torch.dtype | str | None = None,
        backend: str = "auto",
    ) -> None:
        groups = as_groups(params)
        flat = [param_of(item) for group in groups for item in group["params"]]
        refuse(
            device=device,
            params=flat,
            pipeline_size=pipeline_size,
            with_scaled_states=with_scaled_states,
            nccl_ub=nccl_ub,
            lock_timeout=lock_timeout,
        )
        told = precision(
            flat,
            dtype=dtype,
            grad_sync_dtype=grad_sync_dtype,
            param_sync_dtype=param_sync_dtype,
            store_params=store_params,
            store_param_remainders=store_param_remainders,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
        )
        check_hook_flags(flat, told["grad_dtype"])
        self.overlap_param_sync = overlap_param_sync
        on = flat[0].device if flat else torch.device("cpu")
        self._has_masters, self._has_views = told["master_weights"] is not None, contiguous_grad_buffer or capturable
        self._is_made = False
        self._grad_dtype: torch.dtype = told["grad_dtype"]
        spread = Spread(1 if disable_distributed_parameters else distributed_size, distribute_within_nodes)
        self._meshes = Meshes.of(flat, spread, process_group, distributed_process_group, redundant_process_group)
        self._pending = Pending(on)
        super().__init__(
            [self._prepared(part) for group in groups for part in apart(group)],
            FusedAdam,
            mesh=self._meshes.dense,
            grad_divisor=None if average_grad_sync else 1.0,
            bucket_cap_mb=bucket_cap_mb,
            capturable=self._has_views,
            zero_fill_unused=zero_fill_unused,
            find_unused_parameters=find_unused_parameters,
            lr=lr,
            bias_correction=bias_correction,
            betas=tuple(betas),
            eps=eps,
            adam_w_mode=adam_w_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            backend=backend,
            **told,
        )
        self._params = [trained(part) for group in groups for part in apart(group)]
        self._is_made = True
        self._pending.of_steps(self)
        if capturable:
            LearningRates(self.param_groups, on).of_steps(self)
        self._keeps_apart, self._shows_main_grad = ExitStack(), contiguous_grad_buffer
        if not overlap_grad_sync:
            self._keep_apart()
        self._take_on(self.parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, between steps, as the constructor takes them. Every rank calls this."""
        if not self._is_made:  # torch's constructor, with what ours has prepared
            super().add_param_group(param_group)
            return
        for part in apart(as_groups([param_group])[0]):
            check_hook_flags(trained(part), self._grad_dtype)
            super().add_param_group(self._prepared(part))
            self._params.append(trained(part))
            self._take_on(trained(part))

    def _prepared(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group of dense parameters or of experts, as a ShardedOptimizer takes it."""
        params = trained(group)
        if params and is_expert(params[0]):
            if self._meshes.experts is not None:
                group = {**group, "mesh": self._meshes.experts}
            elif parallel_state().expert_data is not None:
                raise ValueError(
                    f"experts, the first of shape {tuple(params[0].shape)}, are added to an optimizer that was made "
                    "without any, and so knows no ranks to average them over: give some to the constructor"
                )
        if self._has_views:
            for param in params:
                if param.dtype != self._grad_dtype:
                    param.grad_dtype = self._grad_dtype  # torch's leave to have a gradient of another dtype
        return group

    def _take_on(self, params: Iterable[Parameter]) -> None:
        """Hear what parameters say of themselves, and show them their gradients, once they lie in buckets."""
        for param in params:
            if getattr(param, "_disable_overlap_grad_sync", False):
                self._keep_apart()
            if self._shows_main_grad:
                param.main_grad = self.grad_buffer_view(param)  # type: ignore[attr-defined]

    def _keep_apart(self) -> None:
        """From now on backward itself sends nothing."""
        if any(mesh is not None and mesh.size() > 1 for mesh in self._meshes):
            self._keeps_apart.enter_context(self.no_sync())
