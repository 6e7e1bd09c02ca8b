"""Apex's checkpoint format 2, from the pieces of all ranks and back to this rank's.

A ShardedOptimizer's own state dict has this rank's piece of each state: an interval of the parameter's memory, padded
to blocks of 64 elements. Here they are put together to whole tensors, in the order of a contiguous parameter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

_AT_ONCE = 2**24  # elements that are put together in one reduction


@dataclass(frozen=True)
class Held:
    """One parameter group: what is trained, and of whose ranks each holds a piece."""

    params: Sequence[Parameter]
    padded: Sequence[int]
    """Elements of each parameter's pieces together."""
    mesh: DeviceMesh | None
    moments: Sequence[str]
    has_masters: bool
    """Of its 16-bit parameters."""

    def master_of(self, param: Tensor) -> bool:
        return self.has_masters and param.dtype.itemsize < 4


def whole(pieces: Mapping[str, Any], groups: Sequence[Held]) -> dict[str, Any]:
    """The state dict in format 2. `pieces`: this rank's, of a ShardedOptimizer. Every rank of the meshes calls this."""
    state: dict[Any, Any] = {}
    for held, cut in zip(groups, pieces["cut"], strict=True):
        own = [pieces["state"].get(len(state) + place, {}) for place in range(len(held.params))]
        intervals = [(int(start), int(stop)) for *_, start, stop in cut]
        steps = _steps([float(states.get("step", 0)) for states in own], held)
        entries: list[dict[str, Any]] = [
            {"step": step, "param": _contiguous(param, torch.promote_types(param.dtype, torch.float32))}
            for param, step in zip(held.params, steps, strict=True)
        ]
        for name in ("master_weight", *held.moments):
            wanted = [
                place for place, param in enumerate(held.params) if name != "master_weight" or held.master_of(param)
            ]
            of_pieces = [(place, own[place].get(name), intervals[place]) for place in wanted]
            for place, tensor in _put_together(of_pieces, held):
                if name != "master_weight":
                    entries[place][name] = tensor
                elif steps[place]:
                    entries[place]["param"] = tensor
        state |= {len(state) + place: entry for place, entry in enumerate(entries)}
    state["step"] = max((entry["step"] for entry in state.values()), default=0)
    return {"state": state, "param_groups": [_plain(group) for group in pieces["param_groups"]], "format": 2}


@torch.no_grad()
def loaded(state_dict: Mapping[str, Any], pieces: Mapping[str, Any], groups: Sequence[Held]) -> dict[str, Any]:
    """What a ShardedOptimizer loads on this rank, of a state dict in format 2 or of a torch AdamW.

    `pieces`: what this rank has now, for the form. Weights without masters are written into the parameters.
    """
    given, saved = state_dict.get("state"), state_dict.get("param_groups")
    if state_dict.get("format", 2) != 2 or given is None or saved is None or "buckets" in given:
        raise ValueError(
            f"the state dict has {sorted(map(str, state_dict))}, format {state_dict.get('format')!r}; readable are "
            "Apex's format 2 and torch.optim.AdamW's. Format 1 is one rank's memory: load it in Apex, save it as 2"
        )
    sizes, saved_sizes = [len(held.params) for held in groups], [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise ValueError(f"the groups train {sizes} parameters, those of the state dict have {saved_sizes}")
    state: dict[int, dict[str, Any]] = {}
    position = 0
    found: list[tuple[int, Parameter, dict[str, Any], tuple[int, int], bool]] = []
    for number, (held, cut, group) in enumerate(zip(groups, pieces["cut"], saved, strict=True)):
        for place, (param, key, (*_, start, stop)) in enumerate(zip(held.params, group["params"], cut, strict=True)):
            step = given.get("steps", {}).get(key, given.get("step"))  # as sharded_for_megatron leaves them
            entry = {"step": step, **given.get(key, {})}
            if len(entry) == 1 and step is None:
                entry["step"] = 0  # torch has no entry for a parameter without steps
            _check(entry, held.moments, param, f"parameter {place} of group {number}")
            found.append((position, param, entry, (int(start), int(stop)), held.master_of(param)))
            position += 1
    for position, param, entry, (start, stop), has_master in found:
        stepped = float(entry["step"]) > 0
        if "param" in entry and not (has_master and stepped):
            param.copy_(entry["param"])
        if not stepped or start == stop:
            continue
        names = {"master_weight": "param"} if has_master and "param" in entry else {}
        names |= {name: name for name in entry if name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
        state[position] = {ours: _piece(entry[theirs], param, start, stop) for ours, theirs in names.items()}
        state[position]["step"] = torch.tensor(float(entry["step"]))
    # Options that the saver did not know keep their values.
    options = [
        {**ours, **theirs, "params": ours["params"]} for ours, theirs in zip(pieces["param_groups"], saved, strict=True)
    ]
    return {**pieces, "state": state, "param_groups": options}


def sharded_for_megatron(
    state_dict: dict[str, Any], model_sharded_state_dict: Any, params: Iterable[Parameter]
) -> dict[str, Any]:
    """A state dict in format 2 with Megatron-core's ShardedTensors in it, named as NeMo names them."""
    try:
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace  # type: ignore[import-not-found]
        from megatron.core.dist_checkpointing.mapping import ShardedTensor  # type: ignore[import-not-found]
        from megatron.core.dist_checkpointing.optimizer import (  # type: ignore[import-not-found]
            get_param_id_to_sharded_param_map,
            optim_state_to_sharding_state,
        )
    except ImportError as error:
        raise ImportError(
            "sharded_state_dict(model_sharded_state_dict) makes Megatron-core's ShardedTensors, and megatron-core is "
            "not installed; without arguments it is for torch.distributed.checkpoint"
        ) from error

    common = {"step": state_dict["state"]["step"], "steps": {}}
    tensors = {}
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict):
            common["steps"][key] = entry["step"]
            tensors[key] = {name: value for name, value in entry.items() if name != "step"}
    sharded = {**state_dict, "state": tensors, "param_groups": [dict(group) for group in state_dict["param_groups"]]}
    by_number = get_param_id_to_sharded_param_map(model_sharded_state_dict, params)
    saved_format = sharded.pop("format")
    optim_state_to_sharding_state(sharded, by_number)

    def renamed(value: Any) -> Any:
        if isinstance(value, ShardedTensor) and value.key.startswith("optimizer.state.param."):
            value.key = value.key.replace("optimizer.state.param", "optimizer.state.fp32_param", 1)
        return value

    dict_list_map_inplace(renamed, sharded)
    sharded["state"] |= common
    return {**sharded, "format": saved_format}


def _steps(own: list[float], held: Held) -> list[int]:
    """How many steps each parameter has made; known where a piece of it is."""
    counts = torch.tensor(own, dtype=torch.int64, device=held.params[0].device if held.params else None)
    group = _shard_group(held.mesh)
    if group is not None:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    return [int(count) for count in counts.tolist()]


def _put_together(
    pieces: Sequence[tuple[int, Tensor | None, tuple[int, int]]], held: Held
) -> Iterator[tuple[int, Tensor]]:
    """Whole tensors of pieces, by place: each rank writes what it has into zeros, and their bits are added up."""
    group = _shard_group(held.mesh)
    for together in _batches(pieces, held):
        params = [held.params[place] for place, _, _ in together]
        dtype = torch.promote_types(params[0].dtype, torch.float32)
        sizes = [held.padded[place] for place, _, _ in together]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=params[0].device)
        parts = torch.split(flat, sizes)
        for part, (_, piece, (start, stop)) in zip(parts, together, strict=True):
            if piece is not None:
                part[start:stop].copy_(piece)
        if group is not None:
            dist.all_reduce(flat.view(torch.int64 if dtype.itemsize == 8 else torch.int32), group=group)
        for (place, _, _), param, part in zip(together, params, parts, strict=True):
            yield place, _contiguous(part.as_strided(param.shape, param.stride()), dtype)


def _batches(pieces: Sequence[Any], held: Held) -> Iterator[list[Any]]:
    """Pieces of parameters of one dtype that are put together at once."""
    together: list[Any] = []
    for piece in pieces:
        several = [*together, piece]
        numel = sum(held.padded[place] for place, *_ in several)
        if together and (numel > _AT_ONCE or len({held.params[place].dtype for place, *_ in several}) > 1):
            yield together
            several = [piece]
        together = several
    if together:
        yield together


def _check(entry: Mapping[str, Any], moments: Sequence[str], param: Tensor, name: str) -> None:
    if entry["step"] is None or not float(entry["step"]) >= 0:
        raise ValueError(f"the saved state of {name} has step {entry['step']}, beside {sorted(entry)}")
    for key in moments if float(entry["step"]) > 0 else ():
        if not isinstance(entry.get(key), Tensor):
            raise ValueError(f"the saved state of {name} has no {key}, only {sorted(entry)}")
    for key, value in entry.items():
        if key != "step" and isinstance(value, Tensor) and value.shape != param.shape:
            raise ValueError(f"the saved {key} of {name} has shape {tuple(value.shape)}, not {tuple(param.shape)}")


def _piece(tensor: Tensor, param: Tensor, start: int, stop: int) -> Tensor:
    """This rank's interval of a whole tensor, in the order of the parameter's memory, zeros behind its end."""
    flat = torch.zeros(max(stop, param.numel()), dtype=tensor.dtype, device=param.device)
    flat.as_strided(param.shape, param.stride()).copy_(tensor)
    return flat[start:stop].clone()


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU, in logical order."""
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}


def _shard_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    return None if mesh is None or mesh.size(mesh.ndim - 1) == 1 else mesh.get_group(mesh.ndim - 1)
