"""The arguments of Apex's optimizer and of NeMo's, as our packages say the same; or why they don't."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "byte": torch.uint8,
    "int": torch.int32,
    "long": torch.int64,
}


def dtype_of(argument: str, given: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, or the name of one as configs have it: "bf16", "fp32", "torch.bfloat16". ValueError for no dtype."""
    if given is None or isinstance(given, torch.dtype):
        return given
    name = str(given).strip().lower().removeprefix("torch.")
    name = name.replace("fp", "float", 1) if name.startswith("fp") else name
    dtype = _DTYPES.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{argument} is {given!r}, which is no dtype; write float32, bf16, float16 or the like")
    return dtype


def precision(
    params: Iterable[Tensor],
    *,
    dtype: torch.dtype | str,
    grad_sync_dtype: torch.dtype | str | None,
    param_sync_dtype: torch.dtype | str | None,
    store_params: bool | None,
    store_param_remainders: bool,
    exp_avg_dtype: torch.dtype | str | None,
    exp_avg_sq_dtype: torch.dtype | str | None,
) -> dict[str, Any]:
    """What a ShardedOptimizer of FusedAdam is told, by name. ValueError for what it can't do, with the way out."""
    states = dtype_of("dtype", dtype)
    grads = dtype_of("grad_sync_dtype", grad_sync_dtype) or states
    if states not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"dtype is {states}; states are float32 or bfloat16, since the squares of small gradients are below what "
            'float16 holds. For less memory: exp_avg_dtype="block8", exp_avg_sq_dtype="block8", 8 bits with a scale '
            "for each 64 elements"
        )
    if grads not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"grad_sync_dtype is {grads}; gradients are reduced in float32, bfloat16 or float16")
    _check_gathering(dtype_of("param_sync_dtype", param_sync_dtype), params)
    if store_param_remainders and (store_params or states is not torch.float32):
        raise ValueError(
            f"store_param_remainders keeps the low half of float32 weights, so it goes with dtype=float32 and without "
            f"store_params; given were dtype={states}, store_params={store_params}"
        )
    master_weights = "fp32" if store_params is not False and states is torch.float32 else None
    return {
        "grad_dtype": grads,
        "master_weights": "remainder" if store_param_remainders else master_weights,
        "exp_avg_dtype": _state_dtype("exp_avg_dtype", exp_avg_dtype) or states,
        "exp_avg_sq_dtype": _state_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype) or states,
    }


def refuse(
    *,
    device: torch.device | str | None,
    params: Iterable[Tensor],
    pipeline_size: int,
    with_scaled_states: bool,
    nccl_ub: bool,
    lock_timeout: float | None,
) -> None:
    """ValueError for arguments that say how Apex works inside, and are not how this does; with what to do instead."""
    if with_scaled_states:
        raise ValueError(
            'with_scaled_states is not needed: exp_avg_dtype="block8" and exp_avg_sq_dtype="block8" take half as much '
            "again, with a scale for each 64 elements instead of one for a parameter"
        )
    if nccl_ub:
        raise ValueError(
            "nccl_ub: buffers come from torch's allocator. To have them registered with NCCL, make the optimizer "
            "inside `torch.cuda.use_mem_pool(pool)` with pool = torch.cuda.MemPool(backend.mem_allocator), and call "
            "backend.register_mem_pool(pool)"
        )
    if pipeline_size != 2:
        raise ValueError(
            f"pipeline_size={pipeline_size}: there are no side streams to count, all collectives are queued on the "
            "backend's own; leave it out, and set bucket_cap_mb"
        )
    if lock_timeout is not None:
        raise ValueError(
            f"lock_timeout={lock_timeout}: gradients arrive in autograd's own thread and no lock is taken; leave it out"
        )
    for param in params:
        if device is not None and torch.device(device).type != param.device.type:
            raise ValueError(
                f"device is {str(device)!r}, but a parameter of shape {tuple(param.shape)} is on "
                f"{str(param.device)!r}: states live where parameters are; move the model before, or leave device out"
            )


def _state_dtype(argument: str, given: torch.dtype | str | None) -> torch.dtype | str | None:
    return given if given == "block8" else dtype_of(argument, given)


def _check_gathering(dtype: torch.dtype | None, params: Iterable[Tensor]) -> None:
    if dtype is None:
        return
    for param in params:
        holds = dtype.itemsize >= param.dtype.itemsize
        if dtype.is_floating_point:
            holds = torch.promote_types(dtype, param.dtype) is dtype
        if not holds:
            raise ValueError(
                f"param_sync_dtype is {dtype}, of which a parameter of {param.dtype} would come back rounded. "
                "Parameters are gathered as what they are: make the model bfloat16 (with store_param_remainders or "
                "store_params) to gather half as much"
            )
