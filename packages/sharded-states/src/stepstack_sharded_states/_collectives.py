"""A reduce-scatter and an all-gather of flat buffers, in place, each in the way that its backend does fastest.

gloo's own on CPUs cost up to twice what their traffic asks for. There ranks exchange slices, by one all-to-all, and
each adds up what it got, in the order of ranks; and instead of an all-gather each broadcasts its slice.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 deprecates the older names of these two.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Pending:
    """Collectives under way, none of them if there is nothing to do, and what is left to do after them."""

    def __init__(self, works: Sequence[dist.Work | None] = (), then: Callable[[], None] | None = None) -> None:
        self._works, self._then = works, then

    @property
    def under_way(self) -> bool:
        """There is something to wait for."""
        return bool(self._works) or self._then is not None

    def wait(self) -> None:
        """Make what follows (on the device's stream, or here) see the result. A second wait does nothing."""
        (works, then), (self._works, self._then) = (self._works, self._then), ((), None)
        for work in works:
            if work is not None:
                work.wait()
        if then is not None:
            then()


def reduce_scatter(flat: Tensor, mine: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup) -> Pending:
    """Start to leave in `mine`, this rank's slice of `flat`, the sum or mean over the group. `flat` is used up."""
    if not _on_gloo(flat, group):
        return Pending([_reduce_scatter(mine, flat, op=op, group=group, async_op=True)])
    received = torch.empty_like(flat)
    work = dist.all_to_all_single(received, flat, group=group, async_op=True)
    slices = received.view(group.size(), -1).unbind()

    def add_up() -> None:
        torch.add(slices[0], slices[1], out=mine)
        for other in slices[2:]:
            mine.add_(other)
        if op is dist.ReduceOp.AVG:
            mine.div_(len(slices))

    return Pending([work], then=add_up)


def all_gather(flat: Tensor, mine: Tensor, group: ProcessGroup) -> Pending:
    """Start to fill `flat` with the slices of all ranks of the group, of which `mine` is this one's."""
    if not _on_gloo(flat, group):
        return Pending([_all_gather(flat, mine, group=group, async_op=True)])
    slices = flat.view(group.size(), -1).unbind()
    return Pending(
        [dist.broadcast(part, group=group, group_src=owner, async_op=True) for owner, part in enumerate(slices)]
    )


def _on_gloo(tensor: Tensor, group: ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)
