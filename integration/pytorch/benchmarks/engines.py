"""DeepSpeed's ZeRO and megatron-core's distributed optimizer as the benchmark trains with them, if they are installed.

Both are given torch's fused AdamW, since neither brings a kernel for CPUs that is on without being built. megatron-core
asks CUDA for everything: what it asks is answered for the CPU, by what the tests of its integration use, in its turns
only; that costs it a few microseconds a torch function.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
MISSING = []
with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
    warnings.simplefilter("ignore")
    try:
        import deepspeed
        import deepspeed.runtime.zero.muon.original_muon  # once, before ranks are forked
    except ImportError:
        MISSING.append("DeepSpeed")
    try:
        import megatron.core.distributed
        import megatron.core.optimizer
        import megatron.core.transformer
    except ImportError:
        MISSING.append("megatron-core")


def zero(model, dtype, adam, *, stage):
    model = model.to(dtype)  # it leaves buffers as they are
    deepspeed.utils.logger.setLevel(logging.ERROR)
    for name in deepspeed.ops.__compatible_ops__:
        if "shm" in name:  # an all-reduce through shared memory, which it would build now
            deepspeed.ops.__compatible_ops__[name] = False
    for name in ("RANK", "WORLD_SIZE"):
        os.environ[name] = str(getattr(torch.distributed, f"get_{name.lower()}")())
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed.init_distributed("gloo")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adam)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, engine.backward, engine.step


def megatrons(model, dtype, adam):
    parallel_state, optimizer = megatron.core.parallel_state, megatron.core.optimizer
    with turn_of_megatron():
        parallel_state.initialize_model_parallel()
        config = megatron.core.transformer.TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        ddp = megatron.core.distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = megatron.core.distributed.DistributedDataParallel(config, ddp, model.to(dtype))
        config = optimizer.OptimizerConfig(
            optimizer="adam",
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            **adam,
        )
        with mock.patch.object(optimizer, "Adam", partial(torch.optim.AdamW, fused=True)):
            adam = optimizer.get_megatron_optimizer(config, [model])

    def backward(loss):
        adam.scale_loss(loss).backward()
        model.finish_grad_sync()

    def step():
        adam.step()
        model.zero_grad_buffer()
        adam.zero_grad()

    return model, backward, step


@contextlib.contextmanager
def turn_of_megatron():
    with contextlib.ExitStack() as exits:
        for name, value in _cpu().NO_CUDA.items():
            exits.enter_context(mock.patch.object(torch.cuda, name, value))
        exits.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        exits.enter_context(_cpu().OnCpu())
        yield


def _cpu():
    """What answers megatron-core in the place of CUDA."""
    if "megatron_on_cpu" not in sys.modules:
        path = Path(__file__).parents[2] / "megatron" / "tests" / "conftest.py"
        spec = importlib.util.spec_from_file_location("megatron_on_cpu", path)
        module = sys.modules["megatron_on_cpu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.NO_CUDA = module._NO_CUDA
    return sys.modules["megatron_on_cpu"]
