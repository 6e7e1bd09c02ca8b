"""Writes to what `param_groups` lists, which other ranks get with the next step only."""

from collections.abc import Iterable

from stepstack_sharded_states._bucket import Bucket, Member
from stepstack_sharded_states._mesh import this_rank


def brought(buckets: Iterable[Bucket]) -> None:
    """Note that all ranks have, or are about to get, what is in the shards now."""
    for bucket in buckets:
        if bucket.ranks.shards > 1:
            for member in bucket.members:
                member.shard_version = member.shard._version


def check_unwritten(buckets: Iterable[Bucket]) -> None:
    """Raise RuntimeError for a shard that was written, by a view or between backwards, and not brought since."""
    for bucket in buckets:
        if bucket.ranks.shards > 1:
            for member in bucket.members:
                if member.shard._version != member.shard_version:
                    raise RuntimeError(unseen(member, "was"))


def unseen(member: Member, when: str) -> str:
    """What is said of a write that other ranks don't see."""
    return (
        f"{this_rank()}: parameter {member.name!r} {when} written in param_groups, where this rank has a part of it, "
        "and until the next step() other ranks would go on with other values: write to the model's parameters instead, "
        "alike on every rank (for p in model.parameters(): p.data.clamp_(-1, 1); with inner_dtype or state_device, "
        "call refresh_from_model() then), or write between the last backward and step()"
    )
