"""The plans of an optimizer, one for each parameter group, as long as they are good."""

import weakref
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from stepstack_fused_adam._plan import Plan
from stepstack_fused_adam._run import local


class Plans:
    """A plan is good as long as the states of its parameters are the same tensors in the same memory.

    It is dropped at once when one of them dies, so states that somebody moves elsewhere leave no memory behind.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[Hashable, object, Plan]] = {}
        self._watched: dict[int, list[weakref.ref[Tensor]]] = {}

    def get(
        self,
        group: int,
        how: Hashable,
        params: Sequence[Tensor],
        here: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
    ) -> Plan | None:
        """The plan of a group, made for `how` and for these parameters, of which this rank holds what is `here`."""
        if group in self._plans:
            made_for, memory, plan = self._plans[group]
            if made_for == how and memory == _memory(params, _tensors(states)) and plan.fits(here, grads):
                return plan
        return None

    def put(
        self, group: int, how: Hashable, params: Sequence[Tensor], states: Sequence[dict[str, Any]], plan: Plan
    ) -> None:
        """Keep a plan, instead of the last one of the group: of counts that two move, neither knows which are equal."""
        tensors = _tensors(states)
        plans = self._plans
        plans[group] = how, _memory(params, tensors), plan
        self._watched[group] = [weakref.ref(tensor, lambda _: plans.pop(group, None)) for tensor in tensors]


def _tensors(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    values: list[Any] = list(chain.from_iterable(map(dict.values, states)))
    return values if _are_plain(values) else [value for value in values if isinstance(value, Tensor)]


def _memory(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> object:
    """Which parameters and states, and where these are."""
    # An id may be that of a tensor that died and lent it, but then there is no plan any more.
    here = tensors if _are_plain(tensors) else list(map(local, tensors))
    return list(map(id, params)), list(map(id, tensors)), list(map(Tensor.data_ptr, here))


def _are_plain(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {Tensor}
