"""Step counts: one tensor for each parameter, and which of them are equal, known without reading them."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stepstack_fused_adam._run import flat, local, stretches

_version = attrgetter("_version")


def new_counts(number: int, device: torch.device) -> list[Tensor]:
    """Zero counts, neighbours in memory."""
    # Views of one tensor share its version counter; by `data` each has its own, which says who was edited.
    return [count.data for count in torch.zeros(number, dtype=torch.float32, device=device).unbind()]


def as_count(step: Any, device: torch.device) -> Any:
    """A number or tensor that somebody gave as a count, as 0-d fp32 on the device; anything else as it is."""
    if isinstance(step, int | float):
        return torch.full((), step, dtype=torch.float32, device=device)
    if not isinstance(step, Tensor) or step.numel() != 1:
        return step
    return local(step.detach()).reshape(()).to(device, torch.float32) if _is_odd(step, device) else step


class Cohort:
    """Counts that move together, each tensor once."""

    def __init__(self, steps: Sequence[Tensor]) -> None:
        self.steps = list({id(step): step for step in steps}.values())
        self.versions = _versions(self.steps)
        self._versioned = not any(step.is_inference() for step in self.steps)
        on: dict[torch.device, list[Tensor]] = defaultdict(list)
        for step in self.steps:
            on[step.device].append(step.data)
        self._stretches = {
            device: [flat(counts[stretch[0]], len(stretch)) for stretch in stretches([(count,) for count in counts])]
            for device, counts in on.items()
        }

    def is_untouched(self) -> bool:
        """Whether nobody else has written to one of them."""
        return self.versions == _versions(self.steps)

    def add_(self, skips: dict[torch.device, Tensor | None]) -> None:
        """One step more, unless it is skipped."""
        for device, counts in self._stretches.items():
            skip = skips[device]
            if skip is None:
                torch._foreach_add_(counts, 1)
            else:
                torch._foreach_add_(counts, [1 - skip] * len(counts))  # as a list: one tensor would be read by the host
        if self._versioned:
            torch.autograd.graph.increment_version(self.steps)  # for another optimizer that has the same tensors
            self.versions[:] = [version + 1 for version in self.versions]


class _Known(NamedTuple):
    """What a count is known to be: what all of the same label are, unless its version has changed."""

    versions: list[float]
    place: int
    label: Hashable


class Counts:
    """Which counts are equal. Those are that began or were loaded alike, and have moved together since.

    Where somebody has edited one, or given one from elsewhere, all of a plan are read, once.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Counts, ()  # a copy is of other tensors, of which nothing is known

    def learn(self, steps: Sequence[Tensor], values: Sequence[Hashable]) -> None:
        """Counts of equal values are equal from now on."""
        labels: dict[Hashable, object] = defaultdict(object)
        versions = _versions(steps)
        for place, (step, value) in enumerate(zip(steps, values, strict=True)):
            self._known[step] = _Known(versions, place, labels[value])

    def joined(self, steps: Sequence[Tensor]) -> tuple[list[Tensor], Cohort]:
        """For each count the first one that is equal and on the same device; and all, to be moved together."""
        cohort = Cohort(steps)
        labels = self._labels(cohort)
        # Those that share a label, but do not take part, will lag behind: the label is not theirs any more.
        fresh: dict[Hashable, object] = defaultdict(object)
        first: dict[tuple[torch.device, object], Tensor] = {}
        leaders = {}
        for place, (step, label) in enumerate(zip(cohort.steps, labels, strict=True)):
            self._known[step] = _Known(cohort.versions, place, fresh[label])
            leaders[id(step)] = first.setdefault((step.device, fresh[label]), step)
        return [leaders[id(step)] for step in steps], cohort

    def _labels(self, cohort: Cohort) -> list[Hashable]:
        labels: list[Hashable] = []
        for step, version in zip(cohort.steps, cohort.versions, strict=True):
            known = self._known.get(step)  # type: ignore[no-untyped-call]
            if known is None or known.versions[known.place] != version:
                return _read(cohort.steps)
            labels.append(known.label)
        return labels


def _read(steps: Sequence[Tensor]) -> list[Hashable]:
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
    return [values[place] for place in range(len(steps))]


def _versions(steps: Sequence[Tensor]) -> list[float]:
    try:
        return list(map(_version, steps))
    except RuntimeError:  # made in inference mode, they have none: anybody may have written to them
        return [float("nan") for _ in steps]


def _is_odd(step: Tensor, device: torch.device) -> bool:
    return type(step) is not Tensor or step.dim() > 0 or step.dtype != torch.float32 or step.device != device
