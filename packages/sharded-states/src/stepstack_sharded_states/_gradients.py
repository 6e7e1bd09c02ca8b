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
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._sharded_grad import ShardedGrad

if TYPE_CHECKING:
    from stepstack_sharded_states._bucket import Member


@dataclass(frozen=True)
class Reduction:
    """Over which ranks gradients are summed, and what by they are divided: the sum, and each of them before it."""

    ranks: Ranks
    divisor: float
    """In all, the part before the sum included."""
    predivisor: float

    @property
    def changes_nothing(self) -> bool:
        """What comes out is what this process has put in."""
        return self.ranks.size == self.divisor == self.predivisor == 1


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

    `.grad`s are moved here as they arrive, and stand-ins take their place, which are taken away again before autograd
    would add to them. A further backward before the step finds the slice occupied by what earlier ones have left; that
    is set aside then, and added to what it brings.
    """

    keeps_views = False
    """The `.grad`s are views, whatever there is in them."""
    replaceable = False
    """A `.grad` assigned by hand replaces what is here, as it does in torch, rather than being one rank's part."""

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
        self._changes = 0
        self.spent = False
        """A step has used what is in the slice."""
        self.differ: Tensor | None = None
        """Whether the last reduction found that ranks differ in what has a gradient; known where its last slice is."""

    @property
    def under_way(self) -> bool:
        """Launched, and not yet collected."""
        return self._reduction is not None

    @property
    def is_occupied(self) -> bool:
        """What comes next moves what is here."""
        return self._reduced and not self.replaceable

    @property
    def state(self) -> tuple[int, int]:
        """Another one after each change of the slice, as far as this process can see."""
        return self._changes, self.slice._version

    def whole(self, shape: torch.Size, stride: tuple[int, ...], start: int) -> Tensor | None:
        """A parameter's gradient as `.grad` shows it once it is reduced; None if the whole is not here then."""
        # .data, since a view that is made here could not be written to where gradients are enabled.
        return self.slice.as_strided(shape, stride, start).data if self._ranks.shards == 1 else None

    def start(self, members: Sequence["Member"]) -> None:
        """Begin with what callers have put into these `.grad`s before."""

    def before_accumulation(self, member: "Member") -> None:
        """Autograd is about to add to this `.grad`, in which is nothing that the caller has taken away."""
        member.take_away()

    def receive(self, member: "Member") -> None:
        """Move `.grad` to its place: copy the first of a step, add the later ones."""
        if self._reduced:
            self._make_room()
        place, grad = member.place_in(self._buffer), _without_graph(member)
        if member.unreduced:
            place.add_(grad)
        else:
            place.copy_(grad)
        self._changes += 1
        member.display(reduced=False)

    def forget(self, members: Sequence["Member"]) -> None:
        """The caller has set these `.grad`s to None: what has come for them counts no more, and the rest does."""
        held = [self.slice] + ([self._aside] if self.set_aside and self._aside is not None else [])
        torch._foreach_zero_([flat[member.part] for flat in held for member in members])
        for member in members:
            member.used = member.unreduced = member.displayed = False
            member.show(None)

    def zero_one(self, member: "Member") -> None:
        """Set one gradient to zero, all of it that is here."""
        self.slice[member.part].zero_()
        if self.set_aside and self._aside is not None:
            self._aside[member.part].zero_()
        if member.unreduced:
            member.place_in(self._buffer).zero_()

    def replace(self, member: "Member") -> None:
        """Take what the caller has made of a shown gradient and put in its place (`p.grad = p.grad * 2`)."""
        grad = member.param.grad
        assert isinstance(grad, ShardedGrad)
        if member.reduced:
            grad.write_to(member.own_grad)
            self._changes += 1
            member.param.grad = None
            member.display(reduced=True)

    def settled(self, members: Sequence["Member"]) -> None:
        """The means are in the slice, and may be looked at."""
        self._changes += 1
        self.spent = False

    def added_by_hand(self, members: Sequence["Member"]) -> list["Member"]:
        """Those without a gradient in whose `.grad`, a view that is zero then, the caller has written one."""
        return []

    def check_settled(self, members: Sequence["Member"]) -> None:
        """Raise RuntimeError if somebody has changed what is not there to be changed."""

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
        self._changes += 1
        self.spent = False
        for member in members:
            if member.group is None:
                continue
            member.used = member.unreduced = member.has_grad and not set_to_none
            member.displayed = False
            member.param.grad = None
            member.renew_whole()
            if member.used:
                member.display(reduced=False)

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

    keeps_views = True

    def whole(self, shape: torch.Size, stride: tuple[int, ...], start: int) -> Tensor | None:
        return self._buffer.as_strided(shape, stride, start).data  # whose version counts what is written through it

    def start(self, members: Sequence["Member"]) -> None:
        for member in members:
            if member.param.grad is None:
                member.display(reduced=True)

    def before_accumulation(self, member: "Member") -> None:
        self._begin()
        if member.param.grad is None:  # the caller's doing
            member.display(reduced=True)

    def receive(self, member: "Member") -> None:
        if member.is_new():  # the caller's own, or a sum that autograd has not made in place
            self._begin()
            member.place_in(self._buffer).copy_(_without_graph(member))
            member.renew_whole()
            member.display(reduced=True)

    def launch(self, members: Sequence["Member"]) -> None:
        self._begin()
        self._reduce(members)

    def forget(self, members: Sequence["Member"]) -> None:
        for member in members:
            self.zero_one(member)
        super().forget(members)
        for member in members:
            member.display(reduced=True)

    def settled(self, members: Sequence["Member"]) -> None:
        super().settled(members)
        for member in members:
            if member.used:  # else it is what the caller has added
                member.version = member.whole_version

    def added_by_hand(self, members: Sequence["Member"]) -> list["Member"]:
        written = [m for m in members if not m.used and m.group is not None and m.version != m.whole_version]
        if not written or (self._buffer.is_cuda and torch.cuda.is_current_stream_capturing()):
            return []
        for member in written:
            member.version = member.whole_version
        # A wait for the device, where clipping scales zeros, say: those must not count as gradients.
        anything = torch.stack([member.place_in(self._buffer).any() for member in written]).tolist()
        return [member for member, there in zip(written, anything, strict=True) if there]

    def check_settled(self, members: Sequence["Member"]) -> None:
        if self._ranks.size > 1 and self._reduced:
            for member in members:
                if member.used and member.version != member.whole_version:
                    raise RuntimeError(
                        f"{this_rank()}: .grad of parameter {member.name!r} was changed after it was averaged, by "
                        "torch's clipping of the model's parameters, say, or by DistributedDataParallel around the "
                        "model. With capturable=True it is memory in which only this rank's part is the mean, so a "
                        "norm or a clipping of it is wrong, and another one on each rank: clip what is in param_groups "
                        "of the optimizer, or grad_shards(), zero by zero_grad() of the optimizer, and use no wrapper"
                    )

    def zero(self, members: Sequence["Member"], *, set_to_none: bool) -> None:
        super().zero(members, set_to_none=set_to_none)
        if set_to_none:
            self._buffer.zero_()
        for member in members:
            if member.group is not None:
                member.display(reduced=True)
            member.version = member.whole_version

    def _begin(self) -> None:
        """What is in the buffer is to be added to, so it holds nothing that has been reduced."""
        if self._reduced:
            self._make_room()
            self._buffer.zero_()


class WholeGradients(Gradients):
    """The gradients of a process that is alone: what is in `.grad` is the gradient, as in torch, and lies here."""

    replaceable = True

    def before_accumulation(self, member: "Member") -> None:
        """Autograd adds to the view itself."""

    def receive(self, member: "Member") -> None:
        if member.is_new():
            grad = _strided(member.param.grad)
            member.place_in(self._buffer).copy_(grad)
            member.renew_whole()
            if grad.requires_grad:  # the caller may want to differentiate it: it is taken away in the step
                member.displayed = True
                return
        self._changes += 1
        member.display(reduced=True)

    def launch(self, members: Sequence["Member"]) -> None:
        missing = [member.place_in(self._buffer) for member in members if not member.used]
        if missing:
            torch._foreach_zero_(missing)
        self._reduce(members)

    def zero(self, members: Sequence["Member"], *, set_to_none: bool) -> None:
        super().zero(members, set_to_none=set_to_none)
        for member in members:
            if member.used:
                member.display(reduced=True)


@cache  # making a generator takes longer than all else that is done for a gradient
def _code(number: int, group: int | None) -> int:
    return random.Random(f"{number} in {group}").getrandbits(BLOCK // 2)


def _without_graph(member: "Member") -> Tensor:
    grad = _strided(member.param.grad)
    if grad.requires_grad:
        raise RuntimeError(
            f"{this_rank()}: the gradient of parameter {member.name!r} can be differentiated (create_graph=True), and "
            "what becomes of it in .grad can't: use torch.autograd.grad(…, create_graph=True) where gradients are "
            "differentiated, and backward() for the sum of what is trained"
        )
    return grad


def _strided(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad if grad.layout is torch.strided else grad.to_dense()
