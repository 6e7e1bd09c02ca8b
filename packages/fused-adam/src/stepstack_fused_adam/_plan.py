"""Which runs a step consists of, and where each finds its gradient. Made once, used until the memory moves."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stepstack_fused_adam._backends import Step, assign
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, is_dense, local, same_order, stretches


class Plan:
    """The runs of parameters that share their hyper-parameters. Adjacent ones with one step tensor are one run.

    It holds no gradient: `step_` gets those, in the order of `members`. Their dtypes, shapes and strides are those
    that the plan was made with; where they lie may change as long as `holds` says so.
    """

    def __init__(self, members: Sequence[Run], grads: Sequence[Tensor], backend: str) -> None:
        self.members = members
        self._counts = _step_tensors(members)
        self._detours: list[tuple[Tensor, Tensor]] = []
        self._neighbours: list[tuple[int, int]] = []
        on_device: dict[torch.device, list[_Sourced]] = defaultdict(list)
        for sourced in self._joined(members, grads):
            on_device[sourced.run.device].append(sourced)
        self._work: list[tuple[torch.device, Step, list[_Sourced]]] = []
        for device, here in on_device.items():
            dtypes = [grads[sourced.index].dtype for sourced in here]
            assigned = assign(backend, device, [sourced.run for sourced in here], dtypes)
            self._work += [(device, step, [here[place] for place in places]) for step, places in assigned.items()]
        self._distances = self._between(grads)

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """Whether the gradients of neighbours lie to one another as they did."""
        return self._between(grads) == self._distances and all(
            sourced.fits(grads) for _, _, here in self._work for sourced in here
        )

    def step_(self, grads: Sequence[Tensor], by: Hyperparameters) -> None:
        """One step of all members, their counts included."""
        on = {device: by.on(device) for device in self._counts}
        for device, counts in self._counts.items():
            skip = on[device].skip
            if skip is None:
                torch._foreach_add_(counts, 1)
            else:
                torch._foreach_add_(counts, [1 - skip] * len(counts))  # as a list: one tensor would be read by the host
        for holed, dense in self._detours:
            dense.copy_(holed)
        for device, step, here in self._work:
            step([sourced.run for sourced in here], [sourced.gradient(grads) for sourced in here], on[device])
        for holed, dense in self._detours:
            holed.copy_(dense)

    def _joined(self, members: Sequence[Run], grads: Sequence[Tensor]) -> "list[_Sourced]":
        found: list[_Sourced] = []
        counted_alike: dict[int, list[int]] = defaultdict(list)
        for index, (member, grad) in enumerate(zip(members, grads, strict=True)):
            if not is_dense(member.stored.param):
                dense = torch.empty_like(member.stored.param)
                self._detours.append((member.stored.param, dense))
                found.append(_Sourced(Run(member.step, member.stored._replace(param=dense)), index, reordered=True))
            elif not is_dense(grad) or not same_order(member.stored.param, grad):
                found.append(_Sourced(member, index, reordered=True))
            elif member.numel:
                counted_alike[id(member.step)].append(index)
        for indices in counted_alike.values():
            for stretch in stretches([members[index].stored for index in indices]):
                self._neighbours += pairwise(indices[place] for place in stretch)
            for stretch in stretches([(*members[index].stored, grads[index]) for index in indices]):
                found.append(_together([indices[place] for place in stretch], members, grads))
        return sorted(found, key=lambda sourced: sourced.index)  # addresses differ from run to run

    def _between(self, grads: Sequence[Tensor]) -> list[int]:
        return [grads[later].data_ptr() - grads[earlier].data_ptr() for earlier, later in self._neighbours]


def layout(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Mapping[str, object] | None]
) -> tuple[object, list[object]]:
    """Where parameters and states lie, and how gradients are laid out. And the objects whose ids it has, to be kept."""
    kept = [value for state in states if state for value in state.values()]
    return (
        [(param.data_ptr(), param.stride()) for param in map(local, params)],
        [None if grad is None else (grad.layout, grad.dtype, grad.shape, *_strides(grad)) for grad in grads],
        list(map(id, kept)),
    ), kept


@dataclass(frozen=True)
class _Sourced:
    """A run whose gradient is the one at an index, or starts with it."""

    run: Run
    index: int
    flat: bool = False
    reordered: bool = False

    def fits(self, grads: Sequence[Tensor]) -> bool:
        grad = grads[self.index]
        end = grad.storage_offset() + self.run.numel
        return not self.flat or end * grad.itemsize <= grad.untyped_storage().nbytes()

    def gradient(self, grads: Sequence[Tensor]) -> Tensor:
        grad = grads[self.index]
        if self.flat:
            return grad.as_strided((self.run.numel,), (1,))
        if self.reordered:
            return torch.empty_like(self.run.stored.param, dtype=grad.dtype).copy_(grad)
        return grad


def _together(indices: list[int], members: Sequence[Run], grads: Sequence[Tensor]) -> _Sourced:
    first = members[indices[0]]
    if len(indices) == 1 and first.stored.param.dim() and first.stored.param.stride() == grads[indices[0]].stride():
        return _Sourced(first, indices[0])
    return _Sourced(first.extended(sum(members[index].numel for index in indices)), indices[0], flat=True)


def _step_tensors(members: Sequence[Run]) -> dict[torch.device, list[Tensor]]:
    """Each once."""
    counts: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    for member in members:
        counts[member.device][id(member.step)] = member.step
    return {device: list(steps.values()) for device, steps in counts.items()}


def _strides(grad: Tensor) -> tuple[int, ...]:
    return grad.stride() if grad.layout is torch.strided else ()
