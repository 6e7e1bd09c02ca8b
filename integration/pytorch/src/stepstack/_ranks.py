"""Doing things on several ranks such that they succeed everywhere, or fail everywhere with the same words."""

import zlib
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read: on every rank, in the same words, which name the ranks that failed."""


class Ranks:
    """The ranks of a process group, or this process alone where there is none.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)
        if self.rank < 0:
            raise CheckpointError(f"rank {dist.get_rank()} is not in the process_group that it was given")

    def each(self, action: Callable[[], T]) -> T:
        """Every rank acts, and gets what it got. CheckpointError on all of them if one raises."""
        result, error = _tried(action)
        outcomes = self._gathered((None, words_of(error)))
        self._check(outcomes, error)
        return cast(T, result)

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Every rank acts, and gets what all of them got, by rank. CheckpointError on all of them if one raises."""
        result, error = _tried(action)
        outcomes = self._gathered((result, words_of(error)))
        self._check(outcomes, error)
        return [result for result, _ in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """The first rank acts for all; all get what it got. CheckpointError on all of them if it raises."""
        result, error = _tried(action) if self.rank == 0 else (None, None)
        outcome: list[Any] = [(result, words_of(error))]
        if not self.alone:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        result, words = outcome[0]
        _raise(words, error)
        return cast(T, result)

    def alike(self, names: Collection[str], advice: str) -> None:
        """Every rank has the same names. CheckpointError on all of them if not, which ends with advice."""
        digest = zlib.crc32("\n".join(sorted(names)).encode(errors="surrogatepass"))
        if len(set(self.gather(lambda: digest))) == 1:  # names are many, and ranks too
            return
        first, *others = map(set, self.gather(lambda: names))
        for rank, other in enumerate(others, 1):
            for one, two, only in ((rank, 0, other - first), (0, rank, first - other)):
                if only:
                    raise CheckpointError(f"rank {one} has {min(only)!r}, which rank {two} has not: {advice}")

    def said(self, failed: dict[int, str]) -> str:
        """What ranks said when they failed, in one text."""
        ranks_of: dict[str, list[int]] = {}
        for rank, text in failed.items():
            ranks_of.setdefault(text, []).append(rank)
        if list(ranks_of.values()) == [list(range(self.size))]:
            return next(iter(ranks_of))  # all say the same
        return "\n".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
        )

    def _gathered(self, outcome: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        outcomes: list[Any] = [outcome] * self.size
        if not self.alone:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        return outcomes

    def _check(self, outcomes: list[tuple[Any, str | None]], error: BaseException | None) -> None:
        failed = {rank: words for rank, (_, words) in enumerate(outcomes) if words is not None}
        _raise(self.said(failed) if failed else None, error)


def _tried(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:  # whatever it is, the others must not be left waiting for this rank
        return None, error


def words_of(error: BaseException | None) -> str | None:
    if error is None:
        return None
    ours = isinstance(error, CheckpointError | ValueError | TypeError)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _raise(words: str | None, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, Exception):
        raise error  # an interrupt: the others have been told
    if words is not None:
        raise CheckpointError(words) from error
