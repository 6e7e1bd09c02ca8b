"""Data parallelism without a wrapper around the model: a strategy for Lightning's trainer."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_nemo._optimizer import DistributedFusedAdam
from stepstack_sharded_states import ShardedOptimizer

try:
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(f"stepstack_nemo.strategy needs Lightning, which NeMo brings: {error}") from error


class ShardedStrategy(DDPStrategy):  # type: ignore[misc]
    """As Lightning's `ddp`, without DistributedDataParallel: the optimizer averages gradients as they come.

        trainer: {strategy: stepstack}     # or: Trainer(strategy=ShardedStrategy(broadcast_buffers=False))

    For models whose optimizers are all `DistributedFusedAdam` (or another ShardedOptimizer); another one is refused
    when training starts, since its gradients would not be averaged.

    - Under `accumulate_grad_batches` only the last backward reduces.
    - With `overlap_param_sync`, parameters are gathered under the next forward, by module.
    - Buffers are those of rank 0, as in DistributedDataParallel: before each step of training and validation they are
      sent to all, unless `broadcast_buffers=False`. The arguments that are DistributedDataParallel's alone are refused.
    """

    def __init__(self, *args: Any, broadcast_buffers: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        theirs = {name: value for name, value in self._ddp_kwargs.items() if value not in (None, False)}
        if theirs or self._ddp_comm_hook or self._model_averaging_period:
            raise ValueError(
                f"{', '.join(theirs) or 'ddp_comm_hook and model_averaging_period'}: there is no "
                "DistributedDataParallel here that could be told; find_unused_parameters, bucket_cap_mb and the dtypes "
                "of what is sent are arguments of the optimizer"
            )
        self._broadcast_buffers = broadcast_buffers
        self._accumulates = False

    def configure_ddp(self) -> None:
        """Lightning would wrap the model here."""
        self._send_buffers()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, ShardedOptimizer):
                raise ValueError(
                    f"strategy 'stepstack' leaves averaging to the optimizers, but one is {type(optimizer).__name__}: "
                    "set optim.name to stepstack_distributed_fused_adam, or take strategy 'ddp'"
                )
            if isinstance(optimizer, DistributedFusedAdam) and optimizer.overlap_param_sync:
                optimizer.overlap_gather(self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            self._accumulates = True
            try:
                yield
            finally:
                self._accumulates = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """What is not reduced by now (`overlap_grad_sync=False`) is reduced here, for all that look at gradients."""
        super().post_backward(closure_loss)
        if not self._accumulates:
            for optimizer in self.optimizers:
                optimizer.grad_shards()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._broadcast_buffers and not self._accumulates:
            self._send_buffers()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._broadcast_buffers:
            self._send_buffers()
        return super().validation_step(*args, **kwargs)

    @torch.no_grad()
    def _send_buffers(self) -> None:
        for buffers in _by_dtype(self.lightning_module.buffers()):
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, 0)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))


def _by_dtype(buffers: Iterable[Tensor]) -> list[list[Tensor]]:
    lists: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        if buffer.numel() and buffer.layout is torch.strided:
            lists.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(lists.values())
