"""The model's weights as files and state dicts have them: whole, and without what is not trained."""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stepstack_deepspeed._fsdp import reshard_
from stepstack_deepspeed._processes import on_first, this_rank
from stepstack_sharded_states import ShardedOptimizer


def state_dict_of(module: nn.Module, *, exclude_frozen: bool) -> dict[str, Any]:
    """The module's, of which DTensors stay DTensors."""
    frozen = {name for name, param in module.named_parameters(remove_duplicate=False) if not param.requires_grad}
    return {name: value for name, value in module.state_dict().items() if not (exclude_frozen and name in frozen)}


@torch.no_grad()
def whole_on_first(state: dict[str, Any], params: set[str], dtype: torch.dtype) -> dict[str, Any] | None:
    """The state dict with whole tensors on the CPU, on the first rank; None on others. Every rank calls this.

    `params` become of that dtype. One tensor at a time is whole on the device; tied ones stay tied.
    """
    whole: dict[str, Any] = {}
    known: dict[int, Any] = {}
    for name, value in state.items():
        if id(value) not in known:
            known[id(value)] = _whole(value, dtype if name in params else None)
        whole[name] = known[id(value)]
    return whole if this_rank() == 0 else None


def save_(state: dict[str, Any] | None, folder: Path, name: str) -> None:
    """Write what the first rank has. CheckpointError on all of them if that fails. Every rank calls this."""

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / name)

    on_first(write)


def load_(module: nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Copy whole tensors into the module, whose parameters may be DTensors. Every rank calls this with the same."""
    if not any(isinstance(param, DTensor) for param in module.parameters()):
        module.load_state_dict(state, strict=strict)
        return
    set_model_state_dict(module, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))
    reshard_(module)


def keep_masters_up_(module: nn.Module, optimizer: Optimizer) -> None:
    """From here on `module.load_state_dict()` reaches the masters too, which would overwrite it in the next step."""
    if not isinstance(optimizer, ShardedOptimizer):
        return
    ours, of_optimizer = weakref.ref(module), weakref.ref(optimizer)

    def refresh(loaded: nn.Module, _: Any) -> None:
        found = of_optimizer()
        if loaded is ours() and found is not None:  # not a copy of the model, which has the hook too
            found.refresh_from_model()

    module.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]


def without_frozen(module: nn.Module) -> nn.Module:
    """A module of the same names that has what is trained of this one, and its persistent buffers: no copies."""
    stand_in = nn.Module()
    for name, param in module._parameters.items():
        if param is not None and param.requires_grad:
            stand_in.register_parameter(name, param)
    for name, buffer in module._buffers.items():
        stand_in.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module.named_children():
        stand_in.add_module(name, without_frozen(child))
    return stand_in


def _whole(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    if this_rank() != 0:
        return None
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
