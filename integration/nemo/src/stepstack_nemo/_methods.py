"""What Apex's optimizer and NeMo's can be asked to do, in our packages' words."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from stepstack_clip import clip_coefficient
from stepstack_megatron import is_expert, model_norm, parallel_state
from stepstack_nemo._checkpoint import Held, loaded, sharded_for_megatron, whole
from stepstack_nemo._mesh import Meshes
from stepstack_nemo._pending import Pending
from stepstack_nemo._unscale import agree_on, check_stage, inverse_of, tell_scaler, unscale_
from stepstack_sharded_states import ShardedOptimizer


class ApexMethods(ShardedOptimizer):
    """The methods. The constructor is the subclass's, which also fills in the attributes."""

    _step_supports_amp_scaling = False
    _custom_amp_unscale_grads = True  # how NeMo's scaler knows to call `unscale_grads`

    overlap_param_sync: bool
    _pending: Pending
    _params: list[list[Parameter]]
    _meshes: Meshes
    _has_views: bool
    _has_masters: bool

    def parameters(self) -> Iterator[Parameter]:
        """The model's parameters, those that are trained, in the order of the groups."""
        return chain.from_iterable(self._params)

    def parameter(self, group: int, place: int) -> Parameter:
        """One of them."""
        return self._params[group][place]

    def grad_sync(self) -> None:
        """Reduce the gradients that no backward has reduced. Every rank calls this."""
        self.grad_shards()

    def param_sync(self) -> None:
        """Wait until the parameters are those of the last step."""
        self.synchronize()

    @contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Backwards in here only accumulate on this rank. They do so in the buckets, as `greedy_grad_copy` asks."""
        with super().no_sync():
            yield

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what clipping and unscaling have noted of them. With views of one buffer
        (`contiguous_grad_buffer`, `capturable`) that is one fill a bucket, at the same addresses."""
        super().zero_grad(set_to_none)
        self._pending.clear()

    def grad_buffer_view(self, param: Parameter) -> Tensor:
        """Where the gradient of a parameter accumulates, with its size and strides, in the dtype of the reduction.

        With `contiguous_grad_buffer` or `capturable`, else RuntimeError.
        """
        self._check_ours([param])
        if not self._has_views:
            raise RuntimeError("there is no gradient buffer to look at: set contiguous_grad_buffer (or capturable)")
        if param.grad is None:  # a view of its bucket, else
            raise RuntimeError("model.zero_grad() took the views out of .grad: use zero_grad() of the optimizer")
        return param.grad

    def init_params(self, params: Tensor | Iterable[Tensor] | None = None, **dtypes: Any) -> None:
        """Nothing is left to do: the constructor has given each parameter its place in a bucket.

        ValueError for parameters that are not trained here, and for dtypes of their own: all have the constructor's.
        """
        for argument, dtype in dtypes.items():
            if dtype is not None:
                raise ValueError(f"{argument}={dtype} for some parameters only: say it to the constructor, for all")
        self._check_ours([params] if isinstance(params, Tensor) else params or ())

    def init_params_bucket(self, params: Tensor | Iterable[Tensor], **dtypes: Any) -> None:
        """As `init_params`. Buckets are reduced in the order in which backward completes them, whatever is in them."""
        self.init_params(params, **dtypes)

    def init_param_buffer(self) -> None:
        """Nothing is left to do: parameters are views of flat buffers, with their own strides."""

    def try_grad_sync(self, params: Tensor | Iterable[Tensor]) -> None:
        """Nothing is left to do: a bucket is reduced from the moment it is full, unless that was switched off."""
        self._check_ours([params] if isinstance(params, Tensor) else params)

    @torch.no_grad()
    def grad_norm(
        self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0, force: bool = False
    ) -> Tensor:
        """The norm of the averaged gradients, as the next step will see them: 0-d fp32 on the device.

        Of all parameters, or of some (ValueError for others). By default that is the norm of the whole model:
        over tensor and pipeline parallel ranks too, with duplicates and shared weights counted once. It is computed
        each time, so `force` changes nothing. Any `norm_type` of `stepstack_gradnorm.total_norm`. Every rank calls it.
        """
        grads = list(zip(self.parameters(), self.grad_shards(), strict=True))
        return model_norm(grads, parameters, norm_type, parallel_state()) / self._pending.divisor

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Let the next step scale all gradients down so that their norm is at most `max_norm`; the norm before that.

        No gradient is touched and nothing waits. If the norm is not finite, the next step changes nothing.
        `parameters`, `norm_type`: of what the norm is, as in `grad_norm`. ValueError unless `max_norm` is above 0.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {max_norm}")
        norm = self.grad_norm(parameters, norm_type)
        self._pending.skip_unless(norm.isfinite())
        self._pending.divide(clip_coefficient(norm, max_norm).reciprocal())
        return norm

    @torch.no_grad()
    def unscale_grads(
        self,
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        allow_fp16: bool = True,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by `inv_scale`; 1.0 by device if one was not finite on any rank, else 0.0.

        Either `unscale_grads(inv_scale)`, or `unscale_grads(grad_scaler=scaler)`, which does for this optimizer what
        `scaler.unscale_` does, or what NeMo's scaler calls, `unscale_grads(inv_scale, found_inf, allow_fp16)`, where a
        `found_inf` that is set stays so. fp16 gradients are always allowed, since they are not multiplied in place.
        Every rank calls this.
        """
        if (inv_scale is None) == (grad_scaler is None):
            raise ValueError("unscale_grads takes one of the two, inv_scale or grad_scaler")
        grads = self.grad_shards()
        if grad_scaler is not None and not grad_scaler.is_enabled():
            return {}
        if grad_scaler is not None:
            check_stage(grad_scaler, self)
            inv_scale = inverse_of(grad_scaler, self._pending.divisor.device)
        assert inv_scale is not None
        inv_scale = inv_scale.reshape(()).to(self._pending.divisor)
        found = self._unscale(grads, inv_scale)
        if found_inf is not None:
            found = torch.maximum(found, (found_inf.reshape(()).to(found) != 0).float())
        found = agree_on(found, self._meshes.groups)
        if grad_scaler is not None:
            tell_scaler(grad_scaler, self, found)
        return {found.device: found}

    def state_dict(self, *, state_dict_format: int | None = None, gather_on_root: Any = None) -> dict[str, Any]:
        """Apex's format 2: {"state": {"step", 0: {"param", "exp_avg", "exp_avg_sq", "step"}, …}, "param_groups",
        "format": 2}, whole tensors on the CPU in logical shape, on every rank. Every rank calls this.

        Independent of the number of ranks, of memory formats and of all options. A parameter's own "step" is 0 where it
        has never had a gradient. `gather_on_root` is Apex's, and changes nothing there either. ValueError for format 1.
        """
        if state_dict_format not in (None, 2):
            raise ValueError(
                f"state_dict_format={state_dict_format}: only 2 is written; format 1 is one rank's memory as it lies, "
                "which nobody else can read"
            )
        if self._whole is not None:
            return self._whole
        return whole(super().local_state_dict(), self._held())

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Have `state_dict()` ready, which until the next step need not be called on every rank then, as Lightning does
        not. On every rank: `to` changes nothing. Every rank calls this.
        """
        self._whole = None
        self._whole = self.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on what `state_dict` gave, here or in Apex, with any number of ranks; or a torch AdamW's state dict.

        Every rank passes all of it, after the model's own state dict was loaded. The dict is left as it is. Weights
        that it has ("param") become the masters, which the whole model sees from the next step on; where there are no
        masters, the model's. ValueError where shapes, counts or groups don't fit, and for format 1.
        """
        super().load_state_dict(loaded(state_dict, super().local_state_dict(), self._held()))

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, optimizer_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For torch.distributed.checkpoint without arguments (as ShardedOptimizer's); with `model_sharded_state_dict`
        for Megatron-core's dist_checkpointing, as NeMo saves it, in `optimizer.state.{exp_avg,exp_avg_sq,fp32_param}`.
        """
        if model_sharded_state_dict is None:
            return super().sharded_state_dict()
        state_dict = self.state_dict() if optimizer_state_dict is None else optimizer_state_dict
        return sharded_for_megatron(state_dict, model_sharded_state_dict, self.parameters())

    def _unscale(self, grads: list[Tensor], inv_scale: Tensor) -> Tensor:
        """fp16 gradients would lose bits, so those are only looked at, and what to divide by is noted."""
        if not any(grad.dtype == torch.float16 for grad in grads):
            return unscale_(grads, inv_scale)
        self._pending.divide(inv_scale.reciprocal())
        return unscale_(grads, torch.ones_like(inv_scale))

    def _held(self) -> list[Held]:
        return [
            Held(
                params,
                [shard.numel() for shard in group["params"]],
                self._meshes.experts
                if params and is_expert(params[0]) and self._meshes.experts
                else self._meshes.dense,
                moments=("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2],
                has_masters=self._has_masters,
            )
            for params, group in zip(self._params, self.param_groups, strict=True)
        ]

    def _check_ours(self, params: Iterable[Tensor]) -> None:
        ours = set(self.parameters())
        for param in params:
            if param not in ours:
                raise ValueError(f"a parameter of shape {tuple(param.shape)} is not trained by this optimizer")
