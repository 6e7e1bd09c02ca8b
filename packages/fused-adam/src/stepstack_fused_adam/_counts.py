"""Step counts: one tensor for each parameter, and which of them are equal, known without reading them."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stepstack_fused_adam._border import check_count
from stepstack_fused_adam._run import flat, local, stretches


def new_counts(number: int, device: torch.device) -> list[Tensor]:
    """Zero counts, neighbours in memory: views of one tensor, whose version says whether one of them was edited."""
    return list(torch.zeros(number, dtype=torch.float32, device=device).unbind())


def as_count(step: Any, device: torch.device) -> Any:
    """A number or tensor that somebody gave as a count, as 0-d fp32 on the device; anything else as it is."""
    if isinstance(step, int | float):
        return torch.full((), step, dtype=torch.float32, device=device)
    if not isinstance(step, Tensor) or step.numel() != 1:
        return step
    return local(step.detach()).reshape(()).to(device, torch.float32) if _is_odd(step, device) else step


@dataclass(eq=False)
class _Watch:
    """The version that a tensor has as long as only we write to it, until somebody has."""

    version: float
    over: bool = False


class Cohort:
    """Counts that move together, each tensor once; with what they are views of, and the watch over that."""

    def __init__(self, steps: Sequence[Tensor], watched: Sequence[tuple[Tensor, _Watch]] = ()) -> None:
        self._watched = watched
        on: dict[torch.device, list[Tensor]] = defaultdict(list)
        for step in {id(step): step for step in steps}.values():
            on[step.device].append(step)
        self._stretches = {
            device: [flat(counts[stretch[0]], len(stretch)) for stretch in stretches([(count,) for count in counts])]
            for device, counts in on.items()
        }

    def is_untouched(self) -> bool:
        """Whether nobody else has written to one of them."""
        return all(not watch.over and watch.version == _version(whole) for whole, watch in self._watched)

    def add_(self, skips: Mapping[torch.device, Tensor | None]) -> None:
        """One step more, unless it is skipped."""
        for device, counts in self._stretches.items():
            skip = skips[device]
            if len(counts) == 1:
                counts[0].add_(1 if skip is None else 1 - skip)
            elif skip is None:
                torch._foreach_add_(counts, 1)
            else:
                torch._foreach_add_(counts, [1 - skip] * len(counts))  # as a list: one tensor would be read by the host
        for whole, watch in self._watched:
            watch.version = _version(whole)


class _Known(NamedTuple):
    """What a count is known to be: what all of the same label are, until the watch is over."""

    watch: _Watch
    label: Hashable


class Counts:
    """Which counts are equal: those that began or were loaded alike, and have moved together since.

    Where somebody has edited one, or given one from elsewhere, all of a plan are read, once.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._watches = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Counts, ()  # a copy is of other tensors, of which nothing is known

    def learn(self, steps: Sequence[Tensor], values: Sequence[Hashable]) -> None:
        """Counts of equal values are equal from now on."""
        labels: dict[Hashable, object] = defaultdict(object)
        watched = self._watched(steps)
        for step, value in zip(steps, values, strict=True):
            self._known[step] = _Known(watched[id(_whole(step))][1], labels[value])

    def joined(self, steps: Sequence[Tensor], names: Sequence[str]) -> tuple[list[Tensor], Cohort]:
        """For each count the first one that is equal and on the same device; and all, to be moved together.

        ValueError, by the name of its parameter, where one has been set to less than 0.
        """
        watched = self._watched(steps)
        first: dict[tuple[torch.device, Hashable], Tensor] = {}
        leaders = [
            first.setdefault((step.device, label), step)
            for step, label in zip(steps, self._labels(steps, names), strict=True)
        ]
        # Those that share a label, but do not take part, will lag behind: the label is not theirs any more.
        self.learn(steps, list(map(id, leaders)))
        return leaders, Cohort(steps, list(watched.values()))

    def _labels(self, steps: Sequence[Tensor], names: Sequence[str]) -> list[Hashable]:
        labels: list[Hashable] = []
        for step in steps:
            known = self._known.get(step)  # type: ignore[no-untyped-call]
            if known is None or known.watch.over:
                return _read(steps, names)
            labels.append(known.label)
        return labels

    def _watched(self, steps: Sequence[Tensor]) -> dict[int, tuple[Tensor, _Watch]]:
        """By id, what the steps are views of, each with a watch that is not over."""
        found: dict[int, tuple[Tensor, _Watch]] = {}
        for whole in map(_whole, steps):
            if id(whole) in found:
                continue
            watch = self._watches.get(whole)  # type: ignore[no-untyped-call]
            if watch is None or watch.version != _version(whole):
                if watch is not None:
                    watch.over = True
                watch = self._watches[whole] = _Watch(_version(whole))
            found[id(whole)] = whole, watch
        return found


def _read(steps: Sequence[Tensor], names: Sequence[str]) -> list[Hashable]:
    """The host waits, which it cannot while it captures a graph: then each is on its own."""
    if any(step.is_meta for step in steps) or (
        any(step.is_cuda for step in steps) and torch.cuda.is_current_stream_capturing()
    ):
        return [object() for _ in steps]
    on: dict[torch.device, list[int]] = defaultdict(list)
    for place, step in enumerate(steps):
        on[step.device].append(place)
    values: dict[int, float] = {}
    for places in on.values():
        values |= zip(places, torch.stack([steps[place] for place in places]).tolist(), strict=True)
    for place, value in values.items():
        check_count(value, names[place])
    return [values[place] for place in range(len(steps))]


def _whole(step: Tensor) -> Tensor:
    """What shares its version counter."""
    return step if step._base is None else step._base


def _version(whole: Tensor) -> float:
    return (
        nan if whole.is_inference() else whole._version
    )  # made in inference mode, it has none: it may be edited unseen


def _is_odd(step: Tensor, device: torch.device) -> bool:
    return type(step) is not Tensor or step.dim() > 0 or step.dtype != torch.float32 or step.device != device
