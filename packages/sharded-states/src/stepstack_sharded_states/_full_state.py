"""The whole states, on the CPU: gathered a stretch at a time, and spread again.

The format is that of torch.optim.AdamW: states by number, in the order in which parameters were given, frozen ones
counted, with the names beside. A master weight is one more state, `master_weight`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata

from stepstack_sharded_states._boxes import memory_order
from stepstack_sharded_states._checkpoint import Checkpoint
from stepstack_sharded_states._chunks import Chunks
from stepstack_sharded_states._given import read
from stepstack_sharded_states._match import Match, refuse_strangers
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._named import Named, TensorOfPiece
from stepstack_sharded_states._options import shown
from stepstack_sharded_states._params import names_in
from stepstack_sharded_states._states import scalars_of

_STRETCH = 2**24  # elements that travel at a time


def gather(checkpoint: Checkpoint, *, to_all: bool) -> dict[str, Any]:
    """The whole states in logical shape, on the first rank of each mesh or on all; {} where there is nothing to have.

    Every rank of the meshes calls this.
    """
    checkpoint.agree(checkpoint.check_states)
    here = checkpoint.agree(lambda: {name: _here(checkpoint, named) for name, named in checkpoint.named.items()})
    options = checkpoint.agree(lambda: [shown(group) for group in checkpoint.options])
    names = [names_in(group) for group in checkpoint.groups]
    number_of = {name: number for number, name in enumerate(name for of_group in names for name in of_group)}
    states = {
        number_of[name]: state
        for ranks in checkpoint.meshes
        for name, state in _gathered(checkpoint, ranks, here, to_all=to_all)
    }
    if not (to_all or any(ranks.is_first for ranks in checkpoint.meshes)):
        return {}
    param_groups = []
    for group, of_group, plain in zip(checkpoint.groups, names, options, strict=True):
        known = {"param_names": of_group} if group.named else {}
        param_groups.append({**plain, "params": [number_of[name] for name in of_group], **known})
    return {"state": dict(sorted(states.items())), "param_groups": param_groups}


def spread(checkpoint: Checkpoint, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fill a checkpoint's targets from whole states, which every rank has or the first of each mesh. Its entries then.

    Every rank of the meshes calls this. ValueError or TypeError on all of them where one doesn't fit, with nothing
    changed.
    """
    meshes = checkpoint.meshes
    given = checkpoint.agree(lambda: read(state_dict, checkpoint.groups))
    lacking = torch.tensor(float(given is None), device=checkpoint.device)
    for ranks in meshes:
        ranks.all_reduce_max(lacking)
    from_first = bool(lacking)  # waits, once for a load
    checkpoint.agree(lambda: _check_first(meshes, given))
    values = given or {}
    if from_first:
        values = {key: value for key, value in values.items() if checkpoint.mesh_of(key).is_first}
    saved = {key: _metadata(key, value) for key, value in values.items()}
    numbers = {key: _number(values[key]) for key, there in saved.items() if not getattr(there, "size", ())}
    if from_first:
        for ranks in meshes:
            of_mesh = {key for key in saved if checkpoint.mesh_of(key) is ranks}
            here = {key: saved[key] for key in of_mesh}, {key: numbers[key] for key in numbers.keys() & of_mesh}
            for known, told in zip((saved, numbers), ranks.broadcast_object(here), strict=True):
                known.update(told)
    checkpoint.agree(lambda: checkpoint.expect(numbers))
    entries = checkpoint.agree(checkpoint.state_dict)
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
        elif isinstance(entry, Chunks) and key in numbers:
            for _ in entry.holding.boxes:
                entry.holding.place.target(0, 1).fill_(float(numbers[key]))
        elif isinstance(entry, Tensor) and entry.numel():
            entry.fill_(float(numbers[key]))
    return entries


Here = tuple[dict[str, torch.dtype], dict[str, Any]]


def _here(checkpoint: Checkpoint, named: Named) -> Here | None:
    """Of a parameter's states on this rank: the dtypes of the tensors, and the numbers."""
    if named.piece is None:
        return None
    numbers = {state: _on_cpu(value) for state, value in scalars_of(checkpoint.inner, named.piece).items()}
    return {state: place.dtype for state, place in named.tensors.items() if place.exists}, numbers


def _gathered(
    checkpoint: Checkpoint, ranks: Ranks, of_this_rank: Mapping[str, Here | None], *, to_all: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, the states of the parameters that are spread over one mesh."""
    here = {
        name: states
        for name, states in of_this_rank.items()
        if checkpoint.named[name].bucket.ranks is ranks and states is not None
    }
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
            ranks.from_shard(shard, part.view(torch.uint8), to_all=to_all)  # which every backend knows
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
            stretch = whole[start:stop].to(device).contiguous()  # an expanded one is not
        else:
            stretch = torch.empty(stop - start, dtype=dtype, device=device)
        if from_first:
            named.bucket.ranks.broadcast(stretch.view(torch.uint8))  # which every backend knows
        yield start, stretch


def _take(named: Named, place: TensorOfPiece, start: int, stretch: Tensor) -> None:
    """Keep what belongs to this rank's piece."""
    first, last = (min(end, named.member.param.numel()) for end in named.member.interval)
    begin, end = max(start, first), min(start + stretch.numel(), last)
    if begin < end:
        place.target(begin - first, end - first).copy_(stretch[begin - start : end - start])


def _check_first(meshes: Sequence[Ranks], given: Mapping[str, Any] | None) -> None:
    if given is None and any(ranks.is_first for ranks in meshes):
        raise ValueError(f"{this_rank()} is the mesh's first and has been given no states: give them to it, or to all")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and not value.ndim else value


def _metadata(key: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Tensor) and key.startswith("state."):
        return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks=[])
    return BytesStorageMetadata()


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
