"""When updated parameters come back: all at once after a step, or each under the next forward, before it is needed."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version

from stepstack_sharded_states._bucket import Bucket, Member
from stepstack_sharded_states._collectives import Pending
from stepstack_sharded_states._mesh import this_rank


class Gather:
    """Gathers buckets at once, or lazily those that modules wait for, which are those that hold their parameters."""

    def __init__(self) -> None:
        self._lazy: set[Bucket] = set()
        self._pending: dict[Bucket, Pending] = {}
        # The model may outlive its optimizer, but not half gathered. At exit others may have gone, and nobody reads it.
        weakref.finalize(self, _wait_for_all, self._pending).atexit = False

    def start(self, buckets: Iterable[Bucket], changed: Iterable[Member]) -> None:
        """Every rank starts the same gathers in the same order. All are over, unless they are waited for lazily.

        The parameters `changed` count as written in place: a backward through what read them before raises.
        """
        increment_version([member.param for member in changed])
        for bucket in buckets:
            self._pending[bucket] = bucket.gather()
        for bucket in list(self._pending):
            if bucket not in self._lazy:
                self._wait(bucket)

    def finish(self) -> None:
        """Wait for all that is under way."""
        for bucket in list(self._pending):
            self._wait(bucket)

    def under_forward(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        """From now on let the modules in `module` wait, each for its own parameters, before its forward or state dict.

        Raises ValueError for a parameter that is in no module: nobody would wait for it.
        """
        home = {member.param: bucket for bucket in buckets for member in bucket.members}
        of_part = {part: [param for param in _read_by(part) if param in home] for part in module.modules()}
        found = {param for params in of_part.values() for param in params}
        for bucket in buckets:
            for member in bucket.members:
                if member.param not in found:
                    raise ValueError(
                        f"{this_rank()}: parameter {member.name!r} is in no part of the module given, so nothing would "
                        "wait for it: give the whole model whose parameters this optimizer has"
                    )
        ours = weakref.ref(self)
        for part, params in of_part.items():
            if params:
                needed = list(dict.fromkeys(home[param] for param in params))
                for register in (
                    part.register_forward_pre_hook,
                    part.register_state_dict_pre_hook,
                    part.register_load_state_dict_pre_hook,
                ):
                    handle: Any = register(_Waiting(ours, needed))
                    weakref.finalize(self, handle.remove)
        self._lazy.update(buckets)

    def _wait(self, bucket: Bucket) -> None:
        pending = self._pending.pop(bucket, None)
        if pending is not None:
            pending.wait()


def _read_by(part: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module's own forward reads: its own, and those in lists, which have no forward."""
    lists = [child for child in part.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    return [param for holder in (part, *lists) for param in holder.parameters(recurse=False)]


def _wait_for_all(pending: dict[Bucket, Pending]) -> None:
    for under_way in pending.values():
        under_way.wait()


class _Waiting:
    """A hook of a module. In a copy of the module, or a pickle, it has nothing to wait for."""

    def __init__(self, gather: Callable[[], Gather | None], buckets: list[Bucket]) -> None:
        self._gather, self._buckets = gather, buckets

    def __call__(self, *_: Any, **__: Any) -> None:
        alive = self._gather()
        if alive is not None:
            for bucket in self._buckets:
                alive._wait(bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Waiting, (type(None), [])  # which, when called, is None, as a reference to what has gone
