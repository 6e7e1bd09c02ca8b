"""Whether a step counts: all ranks say the same, or none steps."""

import ctypes
import math
import warnings
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from stepstack_sharded_states._bucket import Bucket
from stepstack_sharded_states._mesh import Ranks, this_rank


def agreed(
    found_inf: Tensor | None, buckets: Sequence[Bucket], meshes: Collection[Ranks], *, already: bool
) -> Tensor | None:
    """Whether some rank wants to skip the step, or ranks differ in what has a gradient; left in `found_inf` too.

    `already`: `found_inf` says both, of all ranks of a mesh, which is enough where there is only one. None where nobody
    could want to skip: in one process, without a `found_inf`.
    """
    if found_inf is None and all(ranks.size == 1 for ranks in meshes):
        return None
    flags = [] if found_inf is None else [found_inf != 0]  # NaN too, which a maximum may lose
    reduced = already and found_inf is not None and len(meshes) == 1
    if not reduced:
        flags += [differ for ranks in meshes if (differ := _differ(buckets, ranks)) is not None]
    device = buckets[0].params.device
    here = [moved(flag, device) for flag in flags]
    flag = torch.stack(here).any().float() if here else torch.zeros((), device=device)
    if not reduced:
        for ranks in meshes:
            ranks.all_reduce_max(flag)
    if found_inf is not None:
        found_inf.copy_(flag)
    return flag


def objections(buckets: Sequence[Bucket], meshes: Collection[Ranks]) -> list[Tensor]:
    """One more gradient for each mesh: zero, and NaN on a rank that has seen that ranks differ in what has one."""
    shards = []
    for ranks in meshes:
        if ranks.size > 1:
            element, differ = torch.zeros(1, device=buckets[0].params.device), _differ(buckets, ranks)
            if differ is not None:
                element.masked_fill_(differ, math.nan)
            shards.append(ranks.sharded(element, ranks.shards))
    return shards


class Skipped:
    """Whether a step was skipped since ranks differed in what has a gradient: said once, when the host hears of it.

    The device writes to the host's memory what the host never waits for. It only ever turns from no to yes, so that
    the host may look at any time, and sees it a little later at worst.
    """

    def __init__(self) -> None:
        self._on_device: Tensor | None = None
        self._on_host: Tensor | None = None
        self._said = False

    def note(self, buckets: Sequence[Bucket], meshes: Collection[Ranks]) -> None:
        """This step, as far as this rank has seen it: one of each mesh has."""
        for differ in (_differ(buckets, ranks) for ranks in meshes):
            if differ is None:
                continue
            if self._on_device is None:
                self._on_device = self._on_host = torch.zeros_like(differ)
                if differ.device.type != "cpu":
                    self._on_host = torch.zeros_like(differ, device="cpu", pin_memory=True)
            self._on_device.logical_or_(differ)
        if self._on_host is not None and self._on_host is not self._on_device:
            assert self._on_device is not None
            self._on_host.copy_(self._on_device, non_blocking=True)

    def say(self) -> None:
        """Warn, if there is something new to say."""
        # Not `bool(tensor)`, which looks like a wait to whoever watches for one.
        if self._on_host is None or self._said or not ctypes.c_bool.from_address(self._on_host.data_ptr()).value:
            return
        self._said = True
        warnings.warn(
            f"{this_rank()}: ranks differed in which parameters have a gradient, so a step was skipped on all of them, "
            "though no gradient need have been infinite. With find_unused_parameters=True a gradient on one rank "
            "counts for all; edits of param_groups have to be the same on all. Further steps like this one are not "
            "reported",
            stacklevel=3,
        )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. Waits for a copy to the CPU only, which could be read there before it has arrived."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _differ(buckets: Sequence[Bucket], ranks: Ranks) -> Tensor | None:
    """Whether this rank has seen that ranks of this mesh differ, 0-d bool; None on those that see nothing."""
    seen = [b.gradients.differ for b in buckets if b.ranks is ranks and b.gradients.differ is not None]
    if not seen:
        return None
    device = seen[0].device
    return torch.stack([moved(differ, device) for differ in seen]).any()
