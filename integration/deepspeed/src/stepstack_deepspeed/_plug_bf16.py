"""BF16_Optimizer: fp32 gradients of the whole model on every rank, fp32 weights in partitions."""

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from stepstack_deepspeed._plug_seam import MODEL_PARALLELISM, MUON, Seam, divide_
from stepstack_gradnorm import Part, total_norm


class Bf16(Seam):
    """`BF16_Optimizer`, which ZeRO stage 1 is in bf16 with gradients accumulated in fp32."""

    takes_parts = False
    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scale_if_loss": ("value",),
        "step": ("closure",),
        "get_grads_for_norm": ("for_clipping",),
        "clear_hp_grads": (),
        "clear_lp_grads": ("set_to_none",),
        "update_lp_params": (),
        "_lazy_init_hp_params_optimizer_state": (),
    }

    @staticmethod
    def refusal(engine: Any) -> str | None:
        if engine.optimizer._uses_muon:
            return MUON
        if engine.optimizer.mpu is not None:
            return MODEL_PARALLELISM
        return None

    def step(self) -> None:
        """What its own step does, except for one pass over the partition's gradients and one over all of them."""
        optimizer = self.optimizer
        partitions = optimizer.fp32_groups_gradient_flat_partition
        norm = total_norm(Part(partitions, optimizer.dp_process_group))
        self.check(norm, self._stock_norm)
        optimizer.overflow = not self.unscaled(norm).isfinite().item()  # the engine has to know: it counts skips
        if optimizer.overflow:
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
            return
        divisor = self.divisor(optimizer.clip_grad)
        if self.inner is None:
            divide_(partitions, divisor)
        params = optimizer.fp32_groups_flat_partition
        for number, (param, grad) in enumerate(zip(params, partitions, strict=True)):
            if self.inner is None:
                param.grad = grad.to(param.dtype)
            else:
                param.decoupled_grad = grad
                groups = optimizer.optimizer.param_groups
                self.inner.step_(number, [param], groups[number], optimizer.optimizer, divisor)
                param.decoupled_grad = None
        if self.inner is None:
            optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        optimizer.clear_hp_grads()

    def _stock_norm(self) -> Tensor:
        optimizer = self.optimizer
        grads, _ = optimizer.get_grads_for_norm()
        module = sys.modules[type(optimizer).__module__]
        norm: Tensor = module.get_global_norm_of_tensors(grads, optimizer.norm_type, optimizer.mpu)
        return norm
