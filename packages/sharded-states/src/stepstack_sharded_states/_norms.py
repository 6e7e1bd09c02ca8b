"""Norms of gradients that are cut over ranks, those of a whole optimizer in one go."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_sharded_states._mesh import Ranks

if TYPE_CHECKING:
    from stepstack_sharded_states._bucket import Member
    from stepstack_sharded_states._gradients import Gradients


class Norms:
    """The norms of all gradients of one mesh. The first that is asked for costs one reduction, which brings the others.

    They are kept until their gradients change. A write through `.grad` is that parameter's alone; any other is taken
    to be one to all. All ranks of a shard axis ask for the same norms in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.members: list[Member] = []
        self._norms: dict[float, dict[Member, Tensor]] = {}
        self._seen: dict[Gradients, tuple[int, int]] = {}

    def of(self, member: "Member", order: float) -> Tensor:
        """0-d, in fp64."""
        if not self.is_current(member):
            self._norms.clear()
            self._seen = {one.gradients: one.gradients.state for one in self.members}
        norms = self._norms.setdefault(order, {})
        if member not in norms:
            wanted = [member] if norms else self.members
            norms.update(zip(wanted, norms_of([one.own_grad for one in wanted], order, self.ranks), strict=True))
        return norms[member]

    def is_current(self, member: "Member") -> bool:
        """Nobody has written where this gradient lies, as far as is known here."""
        return self._seen.get(member.gradients) == member.gradients.state

    def wrote(self, member: "Member", *, was_current: bool) -> None:
        """A write to this gradient is over, before which `is_current` was that."""
        for norms in self._norms.values():
            norms.pop(member, None)
        if was_current:
            self._seen[member.gradients] = member.gradients.state


def norms_of(pieces: Sequence[Tensor], order: float, ranks: Ranks) -> Sequence[Tensor]:
    """The norm of each gradient of which the ranks of a shard axis have pieces, 0-d in fp64, the same bits on all."""
    local = torch.stack(_local_norms(pieces, order))
    if order == math.inf:  # a maximum may lose NaN
        is_nan = local.isnan()
        both = torch.cat([local.masked_fill(is_nan, 0), is_nan.to(local)])
        ranks.all_reduce_shards(both, dist.ReduceOp.MAX)
        highest, nans = both.view(2, -1)
        norms = highest.masked_fill(nans > 0, math.nan)
    else:
        norms = local if order == 0 else local.pow_(order)
        ranks.all_reduce_shards(norms, dist.ReduceOp.SUM)
        norms = norms if order == 0 else norms.pow_(1 / order)
    return list(norms)


def _local_norms(pieces: Sequence[Tensor], order: float) -> list[Tensor]:
    device = pieces[0].device
    norms = [torch.zeros((), dtype=torch.float64, device=device)] * len(pieces)  # where this rank has nothing
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, piece in enumerate(pieces):
        if piece.numel():
            alike.setdefault((piece.device, piece.dtype), []).append(place)
    for (_, dtype), places in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        of_these = torch._foreach_norm([pieces[place] for place in places], order, dtype=wide)
        for place, norm in zip(places, torch.stack(of_these).to(device, torch.float64).unbind(), strict=True):
            norms[place] = norm
    return norms
