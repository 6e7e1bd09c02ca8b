"""The whole states, on the CPU: gathered a stretch at a time, and spread again.

The format is that of torch.optim.AdamW: states by number, in the order in which parameters were given, frozen ones
counted, with the names beside. A master weight is one more state, `master_weight`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata

from stepstack_sharded_states._boxes import memory_order
from stepstack_sharded_states._checkpoint import Checkpoint, names_in
from stepstack_sharded_states._chunks import Chunks
from stepstack_sharded_states._match import Match, refuse_strangers
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._named import Named, TensorOfPiece
from stepstack_sharded_states._options import shown
from stepstack_sharded_states._states import scalars_of

_STRETCH = 2**24  # elements that travel at a time


def gather(checkpoint: Checkpoint, *, to_all: bool) -> dict[str, Any]:
    """The whole states in logical shape, on the first rank of each mesh or on all; {} where there is nothing to have.

    Every rank of the meshes calls this.
    """
    checkpoint.agree(checkpoint.check)
    names = [names_in(group) for group in checkpoint.groups]
    number_of = {name: number for number, name in enumerate(name for of_group in names for name in of_group)}
    states = {
        number_of[name]: state
        for ranks in checkpoint.meshes
        for name, state in _gathered(checkpoint, ranks, to_all=to_all)
    }
    if not (to_all or any(ranks.is_first for ranks in checkpoint.meshes)):
        return {}
    return {
        "state": dict(sorted(states.items())),
        "param_groups": [
            {**shown(options), "params": [number_of[name] for name in of_group], "param_names": of_group}
            for of_group, options in zip(names, checkpoint.options, strict=True)
        ],
    }


def spread(checkpoint: Checkpoint, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fill a checkpoint's targets from whole states, which every rank has or the first of each mesh. Its entries then.

    Every rank of the meshes calls this. ValueError on all of them where one doesn't fit, with nothing changed.
    """
    entries, meshes = checkpoint.state_dict(), checkpoint.meshes
    lacking = torch.tensor(float(not state_dict), device=checkpoint.device)
    for ranks in meshes:
        ranks.all_reduce_max(lacking)
    from_first = bool(lacking)  # waits, once for a load
    values = checkpoint.agree(lambda: _read(checkpoint, state_dict))
    saved = {key: _metadata(value) for key, value in values.items()}
    numbers = {key: value for key, value in values.items() if not (isinstance(value, Tensor) and value.ndim)}
    if from_first:
        for ranks in meshes:
            of_mesh = {key for key in saved if checkpoint.mesh_of(key) is ranks}
            here = {key: saved[key] for key in of_mesh}, {key: numbers[key] for key in numbers.keys() & of_mesh}
            for known, told in zip((saved, numbers), ranks.broadcast_object(here), strict=True):
                known.update(told)
    match = Match("", checkpoint, saved)
    checkpoint.agree(lambda: refuse_strangers([match.strangers()]))
    found = checkpoint.agree(lambda: match.into(entries))
    for key, (where, name) in found.items():
        where[name] = numbers[key]
    for key in sorted(entries):
        entry, there = entries[key], saved.get(key)
        if isinstance(entry, Chunks) and isinstance(entry.holding.place, TensorOfPiece):
            assert isinstance(there, TensorStorageMetadata)
            named = entry.holding.origin[1]
            has = values.get(key) if named.bucket.ranks.is_first or not from_first else None
            for start, stretch in _stretches(named, has, there.properties.dtype, from_first=from_first):
                _take(named, entry.holding.place, start, stretch)
        elif isinstance(entry, Chunks):
            for _ in entry.holding.boxes:
                entry.holding.place.target(0, 1).fill_(float(numbers[key]))
        elif isinstance(entry, Tensor):
            entry.fill_(float(numbers[key]))
    return entries


def _gathered(checkpoint: Checkpoint, ranks: Ranks, *, to_all: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, the states of the parameters that are spread over one mesh."""
    here: dict[str, tuple[dict[str, torch.dtype], dict[str, Any]]] = {}
    for name, named in checkpoint.named.items():
        if named.bucket.ranks is ranks and named.piece is not None:
            numbers = {state: _on_cpu(value) for state, value in scalars_of(checkpoint.inner, named.piece).items()}
            here[name] = {state: place.dtype for state, place in named.tensors.items() if place.exists}, numbers
    there = {name: states for of_rank in reversed(ranks.gather_objects(here)) for name, states in of_rank.items()}
    if not to_all and ranks.replica:
        return
    for name in [name for name in checkpoint.named if name in there]:
        dtypes, numbers = there[name]
        whole = {state: _whole(checkpoint.named[name], state, dtype, to_all) for state, dtype in dtypes.items()}
        if whole or numbers:
            yield name, {**numbers, **whole}


def _whole(named: Named, state: str, dtype: torch.dtype, to_all: bool) -> Tensor | None:
    """One state in logical shape, where it is wanted."""
    member, ranks, device = named.member, named.bucket.ranks, named.bucket.params.device
    wanted = to_all or ranks.is_first
    flat = torch.empty(member.param.numel() if wanted else 0, dtype=dtype)
    for shard, first, last in named.owners():
        for start in range(first, last, _STRETCH):
            stop = min(start + _STRETCH, last)
            if ranks.shard == shard:
                part = named.tensors[state].read(start - first, stop - first).to(device).contiguous()
            else:
                part = torch.empty(stop - start if to_all or ranks.shard == 0 else 0, dtype=dtype, device=device)
            ranks.from_shard(shard, part, to_all=to_all)
            if wanted:
                flat[start:stop] = part
    return flat.as_strided(member.param.shape, member.stride).contiguous() if wanted else None


def _stretches(
    named: Named, whole: Tensor | None, dtype: torch.dtype, *, from_first: bool
) -> Iterator[tuple[int, Tensor]]:
    """A whole state in the order of memory, in parts: where they start, and what they are."""
    member, device = named.member, named.bucket.params.device
    if whole is not None:
        whole = whole.permute(memory_order(member.param.shape, member.stride)).reshape(-1)
    for start in range(0, member.param.numel(), _STRETCH):
        stop = min(start + _STRETCH, member.param.numel())
        if whole is not None:
            stretch = whole[start:stop].to(device)
        else:
            stretch = torch.empty(stop - start, dtype=dtype, device=device)
        if from_first:
            named.bucket.ranks.broadcast(stretch)
        yield start, stretch


def _take(named: Named, place: TensorOfPiece, start: int, stretch: Tensor) -> None:
    """Keep what belongs to this rank's piece."""
    first, last = (min(end, named.member.param.numel()) for end in named.member.interval)
    begin, end = max(start, first), min(start + stretch.numel(), last)
    if begin < end:
        place.target(begin - first, end - first).copy_(stretch[begin - start : end - start])


def _read(checkpoint: Checkpoint, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """A state dict's values by flat keys."""
    if not state_dict:
        if any(ranks.is_first for ranks in checkpoint.meshes):
            raise ValueError(
                f"{this_rank()} is the mesh's first and has been given no states: give them to it, or to all"
            )
        return {}
    if "param_groups" not in state_dict:
        return dict(state_dict)  # flat already
    flat: dict[str, Any] = {}
    for number, group in enumerate(state_dict["param_groups"]):
        for name, key in zip(_names_of(checkpoint, number, group), group["params"], strict=True):
            flat |= {f"state.{name}.{state}": value for state, value in state_dict["state"].get(key, {}).items()}
            flat |= {
                f"param_groups.{name}.{option}": value
                for option, value in group.items()
                if option not in ("params", "param_names")
            }
    return flat


def _names_of(checkpoint: Checkpoint, number: int, group: Mapping[str, Any]) -> list[str]:
    """Of the parameters of a group: its own, or ours where it has numbers only."""
    if "param_names" in group:
        return list(group["param_names"])
    if all(isinstance(key, str) for key in group["params"]):
        return list(group["params"])
    names = names_in(checkpoint.groups[number]) if number < len(checkpoint.groups) else []
    if len(names) != len(group["params"]):
        raise ValueError(
            f"{this_rank()}: group {number} of the state dict has {len(group['params'])} parameters without names, "
            f"that of this optimizer {len(names)}: make groups as they were when it was saved"
        )
    return names


def _metadata(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Tensor):
        return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks=[])
    return BytesStorageMetadata()


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
