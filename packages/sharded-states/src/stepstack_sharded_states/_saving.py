"""What a ShardedOptimizer saves and loads: for the same ranks, for any, and as a whole."""

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from stepstack_sharded_states._agreement import Skipped
from stepstack_sharded_states._backward import Backward
from stepstack_sharded_states._checkpoint import Checkpoint, checkpoint_of
from stepstack_sharded_states._distribution import Distribution
from stepstack_sharded_states._edits import Listing
from stepstack_sharded_states._full_state import gather, spread
from stepstack_sharded_states._gather import Gather
from stepstack_sharded_states._inner import copy_options
from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._options import shown
from stepstack_sharded_states._params import names_in
from stepstack_sharded_states._state import from_inner, load_masters, to_inner
from stepstack_sharded_states._together import agree

Result = TypeVar("Result")


class SavedStates(Optimizer):
    """The half of `ShardedOptimizer` that has to do with state dicts."""

    _listing: Listing
    _inner: Optimizer
    _backward: Backward
    _distribution: Distribution
    _gather: Gather
    _skipped: Skipped

    _whole: dict[str, Any] | None = None
    """What `consolidate_state_dict()` has left here, {} where it is on another rank; None: nothing that still holds."""
    _warned_of_share = False

    def state_dict(self) -> dict[str, Any]:
        """The whole states in torch's format, where `consolidate_state_dict()` has left them. Else this rank's share,
        `local_state_dict()`, with a warning where other ranks have others: who saves it alone loses theirs.

        Calls the hooks of `register_state_dict_pre_hook` and `register_state_dict_post_hook`, on this rank.
        """
        refuse_to_be_looked_up(sys._getframe(1))
        if self._whole is None and self._inner.state and not self._warned_of_share:
            shares = max(ranks.shards for ranks in self._distribution.ranks)
            if shares > 1:
                self._warned_of_share = True
                warnings.warn(
                    f"{this_rank()}: state_dict() has this rank's share of the states alone, one of {shares}, which "
                    "nobody but the same rank of as many can load. To save all of them from one rank, call "
                    "consolidate_state_dict() on all ranks before; to save each rank's share, call local_state_dict(), "
                    "which has the same without this warning",
                    stacklevel=2,
                )
        return self._hooked(self._consolidated if self._whole else self._share)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's share, for the same rank of a run with the same mesh, parameters and buckets.

        torch's format, with this rank's piece of each state (1-D) and, under "cut", which pieces those are. Calls the
        hooks that `state_dict()` calls.
        """
        return self._hooked(self._share)

    @torch.no_grad()
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the whole states to the CPU of one rank, counted in the mesh, or of all (None), as
        `torch.distributed.optim.ZeroRedundancyOptimizer` does: until the next step or load, `state_dict()` gives them
        there. Every rank of the mesh calls this; to others than the first they go by way of all.

            optimizer.consolidate_state_dict()         # on every rank
            if dist.get_rank() == 0:
                torch.save(optimizer.state_dict(), file)  # which load_state_dict takes, on any number of ranks
        """
        first = next(iter(self._distribution.ranks))
        self._agreed(lambda: _check_rank(to, first.size))
        whole = gather(self._agreed(self._checkpoint), to_all=to != 0)
        self._whole = whole if to is None or to == first.number else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take whole states, which all ranks are given, from any number of ranks or from one of torch's optimizers; or
        on each rank the share that it had, whose cut must be the same. After the model's parameters are loaded.

        Every rank of the mesh calls this. Raises ValueError or TypeError on all of them where one can't take its own.
        Calls the hooks of `register_load_state_dict_pre_hook` and `register_load_state_dict_post_hook`, as torch does.
        """
        given = self._agreed(lambda: self._hooked_before(state_dict))
        is_share = isinstance(given, dict) and "cut" in given
        everywhere = {kind for ranks in self._distribution.ranks for kind in ranks.gather_objects(is_share)}
        if len(everywhere) > 1:
            raise ValueError(
                f"{this_rank()}: some ranks were given whole states and others a share: give all the same whole, or "
                "each its own share"
            )
        if is_share:
            self._take_share(given)
        else:
            self.load_full_state_dict(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def parameter_names(self) -> list[list[str]]:
        """By group, in the order in which they were given; frozen ones too, of which `param_groups` has nothing."""
        self._listing.follow(self.param_groups)
        return [names_in(group) for group in self._listing.groups]

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part for torch.distributed.checkpoint: `save`, `async_save`, and `load`, which fills it in place.

        By parameter name, in logical shape: keys are those of torch's flattened optimizer states. Makes no states.
        """
        return self._named_checkpoint().state_dict()

    @torch.no_grad()
    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `sharded_state_dict()` that `torch.distributed.checkpoint.load` has filled, after the model's.

        What has been taken out of it has not been saved: a parameter without states has made no step, a master weight
        becomes what the parameter is, an option stays. Every rank of the mesh calls this. Raises ValueError on all of
        them where one can't take it.
        """
        self._take(checkpoint_of(state_dict, self._agreed(self._named_checkpoint)), state_dict)

    @torch.no_grad()
    def full_state_dict(self, rank0_only: bool = True) -> dict[str, Any]:
        """All states, whole and on the CPU, as `torch.optim.AdamW(params)` loads them, of the same `params`.

        On the mesh's first rank and {} on others, or on all. Every rank of the mesh calls this. One state of one
        parameter travels at a time. Masters are there as `master_weight`.
        """
        checkpoint = self._agreed(self._checkpoint)
        checkpoint.agree(checkpoint.check)
        return gather(checkpoint, to_all=not rank0_only)

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Take a whole state dict, by number or name, that the mesh's first rank has (others None), or all, after the
        model's. Every rank of the mesh calls this. Raises ValueError on all of them where one doesn't fit.
        """
        checkpoint = self._agreed(self._checkpoint)
        self._take(checkpoint, spread(checkpoint, state_dict))

    @torch.no_grad()
    def refresh_from_model(self) -> None:
        """Take the model's parameters, changed from outside (weights loaded, averaged, …), for the master copy's.

        Masters that the inner optimizer has are its own to refresh: its `refresh_master_weights()` is called, if any.
        """
        self._gather.finish()
        for bucket in self._backward.buckets:
            bucket.refresh()
        getattr(self._inner, "refresh_master_weights", lambda: None)()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ShardedOptimizer is part of its processes and can't be pickled or copied: save state_dict()")

    def _hooked(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = make()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _hooked_before(self, state_dict: Any) -> Any:
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _share(self) -> dict[str, Any]:
        self._skipped.say()
        self._follow_edits()
        self._listing.make_local()
        return from_inner(self._inner.state_dict(), self._listing.groups)

    def _consolidated(self) -> dict[str, Any]:
        """The whole, with the options of now."""
        assert self._whole is not None
        groups = zip(self._whole["param_groups"], self.param_groups, strict=True)
        return {"state": dict(self._whole["state"]), "param_groups": [group | shown(now) for group, now in groups]}

    def _take_share(self, share: dict[str, Any]) -> None:
        def checked() -> dict[str, Any]:
            self._follow_edits()
            return to_inner(share, self._listing.groups)

        inner = self._agreed(checked)
        self._whole = None
        self.refresh_from_model()  # copies that only differ in where they are; masters come from the state dict
        load_masters(share, self._listing.groups)
        self._agreed(lambda: self._inner.load_state_dict(inner))
        self._listing.show_only_these(self.state)
        copy_options(self._inner.param_groups, self.param_groups)

    def _checkpoint(self) -> Checkpoint:
        self._follow_edits()
        self._listing.make_local()
        groups, buckets, check = self._listing.groups, self._backward.buckets, self._backward.check_used
        return Checkpoint(groups, buckets, self._inner, self.param_groups, self._distribution.ranks, check)

    def _named_checkpoint(self) -> Checkpoint:
        checkpoint = self._checkpoint()
        checkpoint.check_named()
        return checkpoint

    def _agreed(self, function: Callable[[], Result]) -> Result:
        """What the function returns; ValueError or TypeError on all ranks of the meshes if it raises on one."""
        return agree(self._distribution.ranks, self._backward.buckets[0].params.device, function)

    def _take(self, checkpoint: Checkpoint, entries: dict[str, Any]) -> None:
        self._whole = None
        self._gather.finish()
        checkpoint.take(entries)
        for bucket in self._backward.buckets:
            bucket.after_step()
        self._gather.start(
            reversed(self._backward.buckets), [m for bucket in self._backward.buckets for m in bucket.members]
        )
        copy_options(self.param_groups, self._inner.param_groups)
        self._listing.show_only_these(self.state)

    def _follow_edits(self) -> None:
        """What callers have changed in `param_groups` and `state` takes effect."""
        self._listing.follow(self.param_groups)
        self._listing.take_states(self.state)
        copy_options(self.param_groups, self._inner.param_groups)


def _check_rank(to: int | None, size: int) -> None:
    if to is not None and (not isinstance(to, int) or not 0 <= to < size):
        raise ValueError(
            f"{this_rank()}: to must be a rank of the mesh, 0 to {size - 1}, or None for all of them; got {to!r}"
        )


def refuse_to_be_looked_up(caller: FrameType | None) -> None:
    """Raise NotImplementedError for functions of torch's that would find nothing, and say `KeyError: 0`.

    They call from here, or from behind the two wrappers that torch puts around a step.
    """
    frames = [caller, behind := caller and caller.f_back, behind and behind.f_back]
    names = [frame.f_globals.get("__name__") for frame in frames if frame is not None]
    if "torch.distributed.checkpoint.state_dict" in names:
        raise NotImplementedError(
            f"{this_rank()}: get_optimizer_state_dict and get_state_dict look for the model's parameters in "
            "param_groups, where a ShardedOptimizer has shards of them: save its sharded_state_dict(), which has the "
            "keys of their flattened form, or full_state_dict()"
        )
