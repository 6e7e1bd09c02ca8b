"""megatron-core on the CPU: what it asks of CUDA is answered for the CPU, and nothing of it is changed."""

import importlib.util
import sys
import warnings
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

IN_16_BITS = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}, torch.float32: {}}


@pytest.fixture(scope="session")
def engine():
    """`Engine`, for use on the ranks of `on_ranks`; skips where there is no megatron-core."""
    sys.modules.update(_stand_ins())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what is not installed beside it
        pytest.importorskip("megatron.core", reason="needs megatron-core (nox -s engines)")
        for name in ("dist_checkpointing", "distributed", "optimizer", "transformer", "parallel_state"):
            importlib.import_module(f"megatron.core.{name}")
    return Engine


def _stand_ins():
    """What megatron-core imports since 0.18 whether it is used or not, in Triton, which takes a gigabyte: as mocks."""
    names = ("transformer.moe.paged_stash", "transformer.moe.ops.paged_stash")
    return {} if importlib.util.find_spec("triton") else {f"megatron.core.{name}": mock.MagicMock() for name in names}


class Engine:
    """Megatron's parallel state on this rank, and its models and optimizers; a context in which it finds no CUDA."""

    def __init__(self, *, tp=1, pp=1, ep=1, instances=1):
        self.core = importlib.import_module("megatron.core")
        self.clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
        self.checkpointing = self.core.dist_checkpointing
        self.parallel_state = self.core.parallel_state
        self.instances = instances
        self._sizes = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1 if ep > 1 else None,
            "num_distributed_optimizer_instances": instances,
        }

    def __enter__(self):
        self._exits = ExitStack()
        warnings.simplefilter("ignore")
        for name, value in _NO_CUDA.items():
            self._exits.enter_context(mock.patch.object(torch.cuda, name, value))
        # As quiet as the kernels that it has beside Apex or Transformer Engine; its own stand-ins read every norm.
        for module, name, kernel in (
            (self.clip_grads, "l2_norm_impl", _l2_norm),
            (self.clip_grads, "multi_tensor_scale_impl", _scale),
            (self.core.optimizer.optimizer, "multi_tensor_scale_impl", _scale),
        ):
            self._exits.enter_context(mock.patch.object(module, name, kernel))
        self._exits.enter_context(OnCpu())
        self.parallel_state.initialize_model_parallel(**self._sizes)
        return self

    def __exit__(self, *error):
        self.parallel_state.destroy_model_parallel()
        self._exits.close()

    def wrapped(self, module, *, dtype=torch.float32, distributed=False, **options):
        """A module under Megatron's DistributedDataParallel, whose config has these options too."""
        config = self.core.transformer.TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        ddp = self.core.distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            num_distributed_optimizer_instances=self.instances,
            **{"grad_reduce_in_fp32": True, **options},
        )
        return self.core.distributed.DistributedDataParallel(config, ddp, module.to(dtype))

    def optimizer(self, *chunks, dtype=torch.float32, distributed=False, **options):
        """What `get_megatron_optimizer` makes of wrapped modules: always a ChainedOptimizer."""
        given = {
            "optimizer": "adam",
            "lr": 1e-2,
            "weight_decay": 0.1,
            "clip_grad": 0.05,
            "log_num_zeros_in_grad": True,
            "initial_loss_scale": 4096.0,
            "loss_scale_window": 3,
            "hysteresis": 2,
        }
        config = self.core.optimizer.OptimizerConfig(
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            **IN_16_BITS[dtype],
            **{**given, **options},
        )
        return self.core.optimizer.get_megatron_optimizer(config, list(chunks))

    def backward(self, chunk, optimizer, grads, *, before_reduction=None):
        """Leave these gradients, times the loss scale, by an actual backward: of the sum of products with them."""
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        params = dict(chunk.module.named_parameters())
        loss = sum((params[name].float() * grad).sum() for name, grad in grads.items())
        optimizer.scale_loss(loss).backward()
        if before_reduction is not None:
            before_reduction(params)
        chunk.finish_grad_sync()


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU, and their type is said to be one of CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


def _is_cuda(device):
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    norms = torch._foreach_norm(tensor_lists[0])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _scale(chunk_size, noop_flag, tensor_lists, factor):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * factor)


class _Stream:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


_NO_CUDA = {
    "current_device": lambda: torch.device("cpu"),
    **dict.fromkeys(("synchronize", "empty_cache", "set_device"), lambda *args: None),
    **dict.fromkeys(("device", "stream"), nullcontext),
    **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), lambda *args, **kwargs: _Stream()),
}
