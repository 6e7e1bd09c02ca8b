"""Gradients of which only this rank's slice stays, reduced in buffers that buckets borrow from a pool."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stepstack_sharded_states._gradients import Gradients, Reduction

if TYPE_CHECKING:
    from stepstack_sharded_states._bucket import Member


class ShardedGradients(Gradients):
    """Only the slice stays. A buffer for the whole is borrowed, from a backward's first gradient to the reduction."""

    reduces_always = True

    def __init__(
        self,
        reduction: Reduction,
        like: Tensor,
        dtype: torch.dtype,
        mine: slice,
        padding: Tensor,
        *,
        pool: "Pool",
    ) -> None:
        super().__init__(reduction, like[:0], dtype, mine, padding)
        self.slice = torch.zeros_like(like[mine], dtype=dtype)
        self._pool, self._numel = pool, like.numel()
        self._whole: Tensor | None = None
        pool.reserve(self._numel)

    def receive(self, member: "Member") -> None:
        self._borrow()
        super().receive(member)

    def launch(self, members: Sequence["Member"]) -> None:
        self._borrow()
        super().launch(members)
        self._pool.launched.append(self)

    def zero(self, members: Sequence["Member"], *, set_to_none: bool) -> None:
        super().zero(members, set_to_none=set_to_none)
        self._give_back()
        if not set_to_none:
            self.slice.zero_()
            self._reduced = True
            for member in members:
                member.unreduced = False

    def _borrow(self) -> None:
        if self._whole is None:
            self._whole = self._pool.borrow(self.slice)
            self._buffer = self._whole[: self._numel]

    def _give_back(self) -> None:
        if self in self._pool.launched:
            self._pool.launched.remove(self)
        if self._whole is not None:
            self._pool.give_back(self._whole)
            self._whole, self._buffer = None, self._buffer[:0]

    def _make_room(self) -> None:
        """There is."""

    def _take(self, received: Tensor) -> None:
        if self._reduced:
            self.slice.add_(received)
        else:
            self.slice.copy_(received)
        self._give_back()


class Pool:
    """Buffers of one dtype and device that buckets borrow: two, or more if the order of arrival asks for it."""

    def __init__(self) -> None:
        self.numel = 0
        self.launched: deque[ShardedGradients] = deque()
        self._free: list[Tensor] = []
        self._lent = 0

    def reserve(self, numel: int) -> None:
        """Lend buffers of at least that many elements from now on."""
        if numel > self.numel:
            self.numel = numel
            self._free.clear()

    def borrow(self, like: Tensor) -> Tensor:
        """A flat buffer with anything in it. Before a third is made, reductions under way are waited for."""
        while not self._free and self._lent >= 2 and self.launched:
            oldest = self.launched[0]
            oldest.across_replicas().wait()
            oldest.collect()
        self._lent += 1
        if self._free:
            return self._free.pop()
        return torch.empty(self.numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        self._lent -= 1
        if buffer.numel() == self.numel:
            self._free.append(buffer)
