"""When updated parameters come back: all at once after a step, or each under the next forward, before it is needed."""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from stepstack_sharded_states._awaited import Awaited, kind_of, read_elsewhere
from stepstack_sharded_states._bucket import Bucket, Member
from stepstack_sharded_states._collectives import Pending
from stepstack_sharded_states._mesh import this_rank


class Gather:
    """Gathers buckets at once, or lazily: then whoever reads a parameter waits for its bucket."""

    def __init__(self) -> None:
        self._lazy: dict[Bucket, type[Awaited]] = {}
        self._pending: dict[Bucket, Pending] = {}
        self._lock = threading.RLock()  # one thread's wait is no reason for another to read
        self._number = next(_numbers)
        self._stopped = self._said = False
        self._to_say: list[str] = []
        # The model may outlive its optimizer, but not half gathered. At exit others may have gone, and nobody reads it.
        weakref.finalize(self, _wait_for_all, self._pending).atexit = False

    def start(self, buckets: Iterable[Bucket], changed: Iterable[Member]) -> None:
        """Every rank starts the same gathers in the same order. All are over, unless they are waited for lazily.

        The parameters `changed` count as written in place: a backward through what read them before raises.
        """
        increment_version([member.param for member in changed])
        lazily = [bucket for bucket in self._pending_of(buckets) if bucket in self._lazy and self._can_wait(bucket)]
        for bucket in list(self._pending):
            if bucket not in lazily:
                self._wait(bucket)
        for bucket in lazily:
            for member in bucket.members:
                member.param.__class__ = self._lazy[bucket]
        if lazily:
            _watch_compiler(self._number)
        said, self._to_say = self._to_say, []
        for warning in said:
            warnings.warn(warning, stacklevel=4)

    def finish(self) -> None:
        """Wait for all that is under way."""
        for bucket in list(self._pending):
            self._wait(bucket)

    def under_forward(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        """From now on let whoever reads a parameter wait for it; and let the modules in `module` wait in front of their
        forward, for kernels that torch does not know.

        Raises ValueError for a parameter that is in no module: before those nobody would wait for it.
        """
        home = {member.param: bucket for bucket in buckets for member in bucket.members}
        of_part = {part: [param for param in _read_by(part) if param in home] for part in module.modules()}
        found = {param for params in of_part.values() for param in params}
        for bucket in buckets:
            for member in bucket.members:
                if member.param not in found:
                    raise ValueError(
                        f"{this_rank()}: parameter {member.name!r} is in no part of the module given, so no forward "
                        "would wait for it: give the whole model whose parameters this optimizer has"
                    )
        # Here, since as a decorator it would import the compiler with this package.
        torch.compiler.assume_constant_result(_traced)  # type: ignore[no-untyped-call]
        ours = weakref.ref(self)
        for part, params in of_part.items():
            if isinstance(part, torch.jit.ScriptModule):
                self.stop(f"{type(part).__name__} is scripted, and reads its weights where nothing can wait")
            elif params:
                needed = list(dict.fromkeys(home[param] for param in params))
                hook = _Waiting(ours, needed, self._number)
                handle: Any = part.register_forward_pre_hook(hook, prepend=True)
                weakref.finalize(self, handle.remove)
        for bucket in buckets:
            if bucket not in self._lazy:
                self._lazy[bucket] = kind_of(partial(_arrive, ours, weakref.ref(bucket)))
        _gathers[self._number] = self
        if self._stopped:
            self._lazy.clear()

    def stop(self, reason: str) -> None:
        """Gather in the step from now on, and say so then: a warning must not disturb a compilation."""
        self.finish()
        self._lazy.clear()
        if not self._stopped:
            self._stopped = True
            self._to_say.append(
                f"{this_rank()}: overlap_gather is off from here on: {reason}. The optimizer gathers in step(), which "
                "gives the same numbers"
            )

    def _pending_of(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            self._pending[bucket] = bucket.gather()
        return list(self._pending)

    def _can_wait(self, bucket: Bucket) -> bool:
        if not self._pending[bucket].under_way:
            return False
        if bucket.params.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # a graph that ends half gathered can't be captured
        for member in bucket.members:
            reason = read_elsewhere(member.param)
            if reason is not None:
                if not self._said:
                    self._said = True
                    self._to_say.append(
                        f"{this_rank()}: parameter {member.name!r} {reason}, which could be read before the parameter "
                        "has arrived, so its bucket is gathered in step(); others like it are not reported"
                    )
                return False
        return True

    def _wait(self, bucket: Bucket) -> None:
        with self._lock:
            pending = self._pending.get(bucket)
            if pending is not None:
                try:
                    # On a GPU this orders the current stream, the reader's, and no other: then all find plain
                    # parameters, so a second stream that reads them has to wait for the first, as for any tensor.
                    pending.wait()
                finally:
                    self._pending.pop(bucket, None)
                    _make_plain(bucket)


_numbers = count()
_gathers: "weakref.WeakValueDictionary[int, Gather]" = weakref.WeakValueDictionary()
"""Those that may be lazy, by number."""


def _arrive(gather: Callable[[], Gather | None], bucket: Callable[[], Bucket | None]) -> None:
    alive, of = gather(), bucket()
    if alive is not None and of is not None:
        alive._wait(of)


def _make_plain(bucket: Bucket) -> None:
    for member in bucket.members:
        if isinstance(member.param, Awaited):
            member.param.__class__ = Parameter  # type: ignore[assignment]


def _wait_for_all(pending: dict[Bucket, Pending]) -> None:
    for bucket, under_way in pending.items():
        under_way.wait()
        _make_plain(bucket)


def _before_fork() -> None:
    """A child has the memory as it is, and nobody there who could wait."""
    for gather in list(_gathers.values()):
        gather.finish()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _traced(number: int) -> None:
    """Called once, while the compiler looks at a module that would wait: what it makes reads weights past all this."""
    gather = _gathers.get(number)
    if gather is not None and gather._lazy:
        gather.stop("a compiled model reads its weights where nothing can wait")


def _watch_compiler(number: int) -> None:
    """Let a compilation wait for what is pending, and be the last to find anything so.

    What has been compiled for plain parameters does not fit others, and would be compiled anew in each step.
    """
    from torch._dynamo.callback import callback_handler

    watch = _Watch(number)
    if watch not in callback_handler.start_callbacks:  # torch._dynamo.reset() may have forgotten it
        callback_handler.register_start_callback(watch)


class _Watch:
    """What the compiler calls before it compiles."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Watch) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __call__(self, _: Any) -> None:
        gather = _gathers.get(self._number)
        if gather is not None and gather._pending:
            gather.stop("something is compiled that may read weights where nothing can wait")


def _read_by(part: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module's own forward reads: its own, those in lists, which have no forward, and all of a
    module that takes a fused kernel only where no weight has a class of its own."""
    if isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return list(part.parameters())
    if isinstance(part, nn.TransformerEncoder):
        return list(part.layers[0].parameters())
    lists = [child for child in part.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    return [param for holder in (part, *lists) for param in holder.parameters(recurse=False)]


class _Waiting:
    """A hook of a module. In a copy of the module, or a pickle, it has nothing to wait for."""

    def __init__(self, gather: Callable[[], Gather | None], buckets: list[Bucket], number: int) -> None:
        self._gather, self._buckets, self._number = gather, buckets, number

    def __call__(self, *_: Any, **__: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _traced(self._number)
            return
        alive = self._gather()
        if alive is not None:
            for bucket in self._buckets:
                alive._wait(bucket)

    @property
    def __name__(self) -> str:
        """Asked for by torch.jit.script, of a copy of the model too."""
        raise AttributeError(
            "torch.jit.script can't compile the hooks in which the modules of an overlap_gather wait: script the model "
            "before that call, or use torch.export or torch.jit.trace"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Waiting, (type(None), [], -1)  # which, when called, is None, as a reference to what has gone
