"""The gradients of one bucket, from their arrival to the mean of this rank's slice, in a flat buffer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_sharded_states._collectives import Pending
from stepstack_sharded_states._layout import BLOCK
from stepstack_sharded_states._mesh import Ranks

if TYPE_CHECKING:
    from stepstack_sharded_states._bucket import Member


@dataclass(frozen=True)
class Reduction:
    """Over which ranks gradients are summed, and what by they are divided: the sum, and each of them before it."""

    ranks: Ranks
    divisor: float
    """In all, the part before the sum included."""
    predivisor: float


class Signature:
    """Tells, in a bucket's last block and in the sum that is taken anyway, whether ranks differ in what has a gradient.

    A rank writes 32 bits of a hash of its set of parameters, each with the number of its group, and their complements.
    A bit on which all agree leaves a sum of exactly zero in one of the two places, in any dtype and for any number of
    ranks; one that differs does not.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._written: dict[int, Tensor] = {}

    def write(self, block: Tensor, members: Sequence["Member"]) -> None:
        digest = 0
        for number, member in enumerate(members):
            if member.used:
                digest ^= _code(number, member.group)
        if digest not in self._written:
            bits = [digest >> place & 1 for place in range(BLOCK // 2)]
            self._written[digest] = torch.tensor(bits + [1 - bit for bit in bits]).to(self._like)
        block.copy_(self._written[digest])

    def differs(self, block: Tensor) -> Tensor:
        """0-d bool, of a block that was summed over the ranks."""
        return (block.view(2, -1) > 0).all(0).any()


class Gradients:
    """A flat buffer of the bucket's size, in which this rank's slice is reduced in place.

    `.grad`s are moved here as they arrive. A further backward before the step finds the slice occupied by what earlier
    ones have left; that is set aside then, and added to what it brings.
    """

    reduces_always = False
    """In `no_sync()` too, since there is no place for what is not reduced."""

    def __init__(self, reduction: Reduction, like: Tensor, dtype: torch.dtype, mine: slice, padding: Tensor) -> None:
        self._ranks, self._mine = reduction.ranks, mine
        averages = reduction.predivisor == 1 and reduction.divisor == reduction.ranks.size
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._before, self._after = reduction.predivisor, reduction.divisor / reduction.predivisor
        self._padding = padding  # where this rank's slice holds no parameter (indices)
        self._reduction: Pending | None = None
        self._reduced = False  # the slice holds what earlier backwards of this step have reduced
        self.set_aside = False
        """What earlier backwards have left waits in `_aside` for another reduction."""
        self._aside: Tensor | None = None
        self._buffer = torch.zeros_like(like, dtype=dtype)
        self.slice = self._buffer[mine]
        self._signature = Signature(self.slice)
        self.differ: Tensor | None = None
        """Whether the last reduction found that ranks differ in what has a gradient; known where its last slice is."""

    @property
    def under_way(self) -> bool:
        """Launched, and not yet collected."""
        return self._reduction is not None

    def is_new(self, member: "Member") -> bool:
        """Whether `.grad` holds something that is not here."""
        return member.param.grad is not None

    def before_accumulation(self) -> None:
        """Autograd is about to add to a `.grad` of this bucket."""

    def receive(self, member: "Member") -> None:
        """Move `.grad` to its place: copy the first of a step, add the later ones."""
        if self._reduced:
            self._make_room()
        place, grad = member.place_in(self._buffer), _strided(member.param.grad)
        if member.unreduced:
            place.add_(grad)
        else:
            place.copy_(grad)
        member.param.grad = None

    def launch(self, members: Sequence["Member"]) -> None:
        """Start the reduction. Every rank launches its buckets in the same order."""
        if self._reduced:
            self._make_room()
        missing = [member.place_in(self._buffer) for member in members if not member.unreduced]
        if len(missing) == len(members):
            self._buffer.zero_()
        elif missing:
            torch._foreach_zero_(missing)
        self._reduce(members)

    def across_replicas(self) -> Pending:
        """Wait for the reduction inside the shard axis and start the one over the replicate axis."""
        assert self._reduction is not None
        self._reduction.wait()
        return self._ranks.all_reduce(self._buffer[self._mine], self._operation)

    def collect(self) -> None:
        """The reduction is over: leave in `slice` the sum of all backwards of this step."""
        received = self._buffer[self._mine]
        if self._operation is dist.ReduceOp.SUM and self._after != 1:
            received.div_(self._after)
        if self._ranks.size > 1 and self._ranks.shard == self._ranks.shards - 1:
            self.differ = self._signature.differs(received[-BLOCK:])
        self._take(received)
        if self._padding.numel():  # it stays zero, though callers may multiply a shard by a coefficient that is NaN
            self.slice.index_fill_(0, self._padding, 0)
        self._reduction, self._reduced = None, True

    def zero(self, members: Sequence["Member"], *, set_to_none: bool) -> None:
        """Forget the gradients; without `set_to_none`, what is there counts as zero."""
        self._abandon()
        if not set_to_none:
            self._buffer.zero_()
        for member in members:
            if member.group is not None:
                member.param.grad = None
            member.unreduced = member.used = member.used and not set_to_none

    def _reduce(self, members: Sequence["Member"]) -> None:
        if self._ranks.size > 1:
            self._signature.write(self._buffer[-BLOCK:], members)
        if self._before != 1:
            self._buffer.div_(self._before)
        self._reduction = self._ranks.reduce_scatter(self._buffer, self._buffer[self._mine], self._operation)

    def _make_room(self) -> None:
        if self._aside is None:
            self._aside = torch.empty_like(self.slice)
        self._aside.copy_(self.slice)
        self.set_aside, self._reduced = True, False

    def _take(self, received: Tensor) -> None:
        if self.set_aside:
            assert self._aside is not None
            received.add_(self._aside)
            self.set_aside = False

    def _abandon(self) -> None:
        if self._reduction is not None:  # of a backward that never came to its end
            self._reduction.wait()
        self._reduction, self._reduced, self.set_aside, self.differ = None, False, False, None


class ViewedGradients(Gradients):
    """The `.grad`s are views of the buffer for ever: autograd adds to it itself, and a CUDA graph may capture that."""

    def is_new(self, member: "Member") -> bool:
        grad = member.param.grad
        return grad is not None and grad.data_ptr() != member.place_in(self._buffer).data_ptr()

    def before_accumulation(self) -> None:
        if self._reduced:
            self._make_room()
            self._buffer.zero_()

    def receive(self, member: "Member") -> None:
        if self.is_new(member):  # the caller's own, or a sum that autograd has not made in place
            self.before_accumulation()
            place = member.place_in(self._buffer)
            place.copy_(_strided(member.param.grad))
            member.param.grad = place

    def launch(self, members: Sequence["Member"]) -> None:
        self.before_accumulation()
        self._reduce(members)

    def zero(self, members: Sequence["Member"], *, set_to_none: bool) -> None:
        super().zero(members, set_to_none=set_to_none)
        if set_to_none:
            self._buffer.zero_()
        for member in members:
            if member.group is not None:
                member.param.grad = member.place_in(self._buffer)


@cache  # making a generator takes longer than all else that is done for a gradient
def _code(number: int, group: int | None) -> int:
    return random.Random(f"{number} in {group}").getrandbits(BLOCK // 2)


def _strided(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad if grad.layout is torch.strided else grad.to_dense()
