"""Which runs a step consists of, and where each finds its memory. Made once, used until something moves."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor

from stepstack_fused_adam._backends import Step, steps_of
from stepstack_fused_adam._counts import Cohort
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, flat, is_dense, same_order, stretches


class Plan:
    """The runs of parameters that share their hyper-parameters. Adjacent ones with one step tensor are one run.

    `counts` are what a step moves; None means the step tensors of the members.

    It holds states, but neither parameters nor gradients: `step_` gets those, in the order of `members`. They may lie
    elsewhere each time, as long as `fits` says so.
    """

    def __init__(
        self,
        members: Sequence[Run],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        backend: str,
        counts: Cohort | None = None,
    ) -> None:
        self._neighbours: list[tuple[int, int]] = []
        placed = self._joined(members, params, grads)
        self._layouts = _layouts(params), _layouts(grads)
        self._distances = self._between(params), self._between(grads)
        self._flat = [one for one in placed if one.flat]
        self._counts = Cohort([member.step for member in members]) if counts is None else counts
        self._devices = list(dict.fromkeys(member.device for member in members))
        self._work: list[tuple[torch.device, Step, _AllPlaced]] = []
        for device in self._devices:
            here = [one for one in placed if one.run.device == device]
            dtypes = [grads[one.index].dtype for one in here]
            for step, places in steps_of(backend, [one.run for one in here], dtypes):
                self._work.append((device, step, _AllPlaced([here[place] for place in places])))

    def fits(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
        """Whether all is laid out as it was, neighbours lie to one another as they did, and counts are equal still."""
        try:
            layouts = _layouts(params), _layouts(grads)
        except RuntimeError:  # a sparse gradient has no strides
            return False
        return (
            self._counts.is_untouched()
            and layouts == self._layouts
            and (self._between(params), self._between(grads)) == self._distances
            and all(one.lies_within(params) and one.lies_within(grads) for one in self._flat)
        )

    def step_(self, params: Sequence[Tensor], grads: Sequence[Tensor], by: Hyperparameters) -> None:
        """One step of all members, their counts included."""
        on = {device: by.on(device) for device in self._devices}
        self._counts.add_({device: on[device].skip for device in self._devices})
        for device, step, placed in self._work:
            moved = placed.params(params)
            step(moved, placed.gradients(grads), on[device])
            placed.put_back(params, moved)

    def _joined(self, members: Sequence[Run], params: Sequence[Tensor], grads: Sequence[Tensor]) -> "list[_Placed]":
        found: list[_Placed] = []
        counted_alike: dict[int, list[int]] = defaultdict(list)
        for index, (member, param, grad) in enumerate(zip(members, params, grads, strict=True)):
            if not member.numel:
                continue
            if not is_dense(param):
                found.append(_Placed(member, index, holed=True, reordered=True))
            elif not is_dense(grad) or not same_order(param, grad):
                found.append(_Placed(member, index, reordered=True))
            else:
                counted_alike[id(member.step)].append(index)
        for indices in counted_alike.values():
            memory = [(params[index], *members[index].states) for index in indices]
            for stretch in stretches(memory):
                self._neighbours += pairwise(indices[place] for place in stretch)
            with_grads = [(*tensors, grads[index]) for tensors, index in zip(memory, indices, strict=True)]
            found += [
                _together([indices[place] for place in stretch], members, params, grads)
                for stretch in stretches(with_grads)
            ]
        return sorted(found, key=attrgetter("index"))  # addresses differ from run to run

    def _between(self, tensors: Sequence[Tensor]) -> list[int]:
        if not self._neighbours:
            return []
        addresses = list(map(Tensor.data_ptr, tensors))
        return [addresses[later] - addresses[earlier] for earlier, later in self._neighbours]


@dataclass(frozen=True)
class _Placed:
    """A run whose parameter and gradient are those at an index, or start with them if it is `flat`."""

    run: Run
    index: int
    flat: bool = False
    holed: bool = False
    reordered: bool = False

    def lies_within(self, tensors: Sequence[Tensor]) -> bool:
        tensor = tensors[self.index]
        end = int(tensor.storage_offset()) + self.run.numel
        return end * tensor.itemsize <= tensor.untyped_storage().nbytes()

    def param(self, params: Sequence[Tensor]) -> Tensor:
        param = params[self.index]
        if self.flat:
            return flat(param, self.run.numel)
        return torch.empty_like(param).copy_(param) if self.holed else param

    def gradient(self, grads: Sequence[Tensor]) -> Tensor:
        grad = grads[self.index]
        if self.flat:
            return flat(grad, self.run.numel)
        if self.reordered:
            ordered = torch.empty_strided(grad.shape, self.run.shape.stride(), dtype=grad.dtype, device=grad.device)
            return ordered.copy_(grad)
        return grad


class _AllPlaced:
    """Those of one call. Where each is a tensor as it is, as in most models, none is asked."""

    def __init__(self, placed: Sequence[_Placed]) -> None:
        self._placed = placed
        self._holed = [(place, one.index) for place, one in enumerate(placed) if one.holed]
        self._indices = None if any(one.flat or one.reordered for one in placed) else [one.index for one in placed]

    def params(self, params: Sequence[Tensor]) -> list[Tensor]:
        if self._indices is not None:
            return [params[index] for index in self._indices]
        return [one.param(params) for one in self._placed]

    def gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        if self._indices is not None:
            return [grads[index] for index in self._indices]
        return [one.gradient(grads) for one in self._placed]

    def put_back(self, params: Sequence[Tensor], moved: Sequence[Tensor]) -> None:
        """Into parameters with holes, what was stepped as a copy."""
        for place, index in self._holed:
            params[index].copy_(moved[place])


def _together(
    indices: Sequence[int], members: Sequence[Run], params: Sequence[Tensor], grads: Sequence[Tensor]
) -> _Placed:
    first = indices[0]
    if len(indices) == 1 and params[first].dim() and params[first].stride() == grads[first].stride():
        return _Placed(members[first], first)
    return _Placed(members[first].extended(sum(members[index].numel for index in indices)), first, flat=True)


def _layouts(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    return list(map(Tensor.stride, tensors)), list(map(attrgetter("dtype"), tensors))
