"""The plans of an optimizer, one for each parameter group, as long as they are good."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from stepstack_fused_adam._plan import Plan
from stepstack_fused_adam._run import local


class Plans:
    """Dropped when a state is replaced or moves, and at once when a tensor of a state dies.

    So a state that somebody moves to another device leaves no memory behind.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[list[int], Plan]] = {}
        self._memory: object = None
        self._watched: list[weakref.ref[Tensor]] = []

    def get(self, index: int, params: Sequence[Tensor], here: Sequence[Tensor], grads: Sequence[Tensor]) -> Plan | None:
        """The plan of a group for these parameters, if everything is where it was. `here` is what this rank holds."""
        ids, plan = self._plans.get(index, (None, None))
        return plan if plan is not None and ids == list(map(id, params)) and plan.fits(here, grads) else None

    def put(self, index: int, params: Sequence[Tensor], plan: Plan) -> None:
        self._plans[index] = list(map(id, params)), plan

    def check(self, states: Iterable[dict[str, Any]]) -> None:
        """Before a step: drop everything if the states are not those that were remembered."""
        if _memory(_tensors(states)) != self._memory:
            self._plans.clear()

    def remember(self, states: Iterable[dict[str, Any]]) -> None:
        """After a step that made plans."""
        tensors = _tensors(states)
        plans = self._plans
        self._memory = _memory(tensors)
        self._watched = [weakref.ref(tensor, lambda _: plans.clear()) for tensor in tensors]


def _tensors(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    values: list[Any] = list(chain.from_iterable(map(dict.values, states)))
    return values if _are_plain(values) else [value for value in values if isinstance(value, Tensor)]


def _memory(tensors: Sequence[Tensor]) -> object:
    """Where they are; a tensor that died could have lent its id to another, but then there is no plan any more."""
    here = tensors if _are_plain(tensors) else list(map(local, tensors))
    return list(map(id, tensors)), list(map(Tensor.data_ptr, here))


def _are_plain(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {Tensor}
