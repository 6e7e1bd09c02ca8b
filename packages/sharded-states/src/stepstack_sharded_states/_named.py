"""One parameter of a checkpoint: where its states are on this rank, and what has been loaded of them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from stepstack_sharded_states._bucket import Bucket, Member
from stepstack_sharded_states._states import Coded, tensors_of

MASTER = "master_weight"
_STRETCH = 2**20  # elements that are encoded at a time


class Named:
    """A parameter's piece and its states by name: tensors, each a `Place`, and single numbers."""

    def __init__(self, member: Member, bucket: Bucket, inner: Optimizer) -> None:
        self.member, self.bucket, self.inner = member, bucket, inner
        self.tensors: dict[str, TensorOfPiece] = {}
        self.numbers: dict[str, Any] = {}
        """What each is like: a 0-d tensor, or a number of Python's."""
        self.loaded: dict[str, Any] = {}
        """The numbers that have been loaded."""
        self.options: dict[str, Any] = {}
        """The options of its group that have been loaded."""
        self.unsavable: list[str] = []
        """States that a checkpoint can't hold, and why, in words."""
        self.dropped: set[str] = set()
        """States that the optimizer will not have any more, with the options that have been loaded."""
        self.absent = False
        """The checkpoint has no states of it: it had not made a step."""

    @property
    def piece(self) -> Parameter | None:
        return self.member.piece

    def owners(self) -> Iterator[tuple[int, int, int]]:
        """The shards that own a part of it, with the interval of its elements."""
        slice_numel, numel = self.bucket.param_slice.numel(), self.member.param.numel()
        for shard in range(self.bucket.ranks.shards):
            first, last = (min(max(0, end * slice_numel - self.member.start), numel) for end in (shard, shard + 1))
            if first < last:
                yield shard, first, last

    def has_loaded(self) -> bool:
        """Whether somebody has loaded a state of it here, a master weight aside."""
        return bool(self.loaded) or any(place.filled for state, place in self.tensors.items() if state != MASTER)

    def missing(self) -> list[str]:
        """Which states nobody has loaded, though they must be."""
        if self.piece is None or self.absent:
            return []
        missing = [state for state, place in self.tensors.items() if state != MASTER and not place.filled]
        return missing + [state for state in self.numbers if state not in self.loaded]

    def install(self) -> None:
        """What has been loaded of the tensors takes effect, and the parameter and its masters agree again."""
        if self.piece is None:
            return
        piece, master = self.piece.detach(), self.tensors.get(MASTER)
        from_checkpoint = master is not None and master.filled
        owned = isinstance(master, PieceItself)
        if self.bucket.inner_params is not self.bucket.param_slice and not (owned and from_checkpoint):
            piece.copy_(self._of_model())
        if self.absent:
            self.inner.state.pop(self.piece, None)
            return
        for state in self.dropped:
            self.inner.state[self.piece].pop(state, None)
        for place in self.tensors.values():
            place.finish()
        if master is None or owned:
            return
        if not from_checkpoint:
            master.fill(piece)
        elif isinstance(there := master.there(), Tensor):
            piece.copy_(there)

    def _of_model(self) -> Tensor:
        first, last = self.member.interval
        return self.bucket.params[self.member.start + first : self.member.start + last]


class TensorOfPiece:
    """A state with as many elements as the piece."""

    def __init__(self, named: Named, state: str, dtype: torch.dtype, create: Callable[[], None]) -> None:
        self._named, self._state, self._create = named, state, create
        self.dtype = dtype
        """As it is saved."""
        self.filled = False
        """Somebody has asked where to write it."""
        self._buffer: Tensor | None = None

    @property
    def exists(self) -> bool:
        return self.there() is not None

    def read(self, start: int, stop: int) -> Tensor:
        there = self.there()
        assert there is not None
        return there[start:stop] if isinstance(there, Tensor) else there.read(start, stop)

    def target(self, start: int, stop: int) -> Tensor:
        self.filled = True
        if not self.exists:
            self._create()
        there = self.there()
        if isinstance(there, Tensor):
            return there[start:stop]
        if self._buffer is None:
            assert self._named.piece is not None
            self._buffer = torch.zeros_like(self._named.piece.detach(), dtype=self.dtype)
        return self._buffer[start:stop]

    def complete(self) -> None:
        """All of it has been written, and may leave its buffer; but a master waits for its parameter to be loaded."""
        if self.exists and self._state != MASTER:
            self.finish()

    def finish(self) -> None:
        """What was written to a buffer goes where it belongs."""
        values, self._buffer = self._buffer, None
        if values is None:
            return
        if self.exists:
            self.fill(values)
        else:
            assert self._named.piece is not None
            self._named.inner.state[self._named.piece][self._state] = values

    def fill(self, values: Tensor) -> None:
        """Write the whole, where there is such a state."""
        there = self.there()
        if isinstance(there, Tensor):
            there.copy_(values)
        elif there is not None:
            for start in range(0, values.numel(), _STRETCH):
                there.write(start, values[start : start + _STRETCH].to(there.dtype))

    def there(self) -> Tensor | Coded | None:
        """The state as it is now."""
        piece = self._named.piece
        there = None if piece is None else tensors_of(self._named.inner, piece).get(self._state)
        return there.detach() if isinstance(there, Tensor) else there


class PieceItself(TensorOfPiece):
    """The master weight that a wrapper owns: what its inner optimizer steps."""

    def there(self) -> Tensor | None:
        return None if self._named.piece is None else self._named.piece.detach()


class NumberOfPiece:
    """A single number. What is loaded waits: pieces may share one tensor."""

    def __init__(self, named: Named, state: str, dtype: torch.dtype) -> None:
        self._named, self._state = named, state
        self.dtype = dtype

    @property
    def exists(self) -> bool:
        return self._there() is not None

    def read(self, start: int, stop: int) -> Tensor:
        there = self._there()
        assert there is not None
        return there.detach().reshape(1)

    def target(self, start: int, stop: int) -> Tensor:
        loaded = self._named.loaded.setdefault(self._state, torch.zeros(1, dtype=self.dtype))
        assert isinstance(loaded, Tensor)
        return loaded

    def _there(self) -> Tensor | None:
        if self._named.piece is None:
            return None
        there: Tensor | None = self._named.inner.state.get(self._named.piece, {}).get(self._state)
        return there


class PlaceOfNothing:
    """A state of a parameter without elements, which nobody owns: where another one's is, with the same number."""

    def __init__(self, other: TensorOfPiece | NumberOfPiece) -> None:
        self._other = other
        self.dtype = other.dtype

    @property
    def exists(self) -> bool:
        return self._other.exists

    def read(self, start: int, stop: int) -> Tensor:
        return self._other.read(start, stop)

    def target(self, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start, dtype=self.dtype)
