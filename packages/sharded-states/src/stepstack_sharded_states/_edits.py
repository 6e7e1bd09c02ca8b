"""What a caller edits in `param_groups` and `state` between steps, followed as torch's own optimizers follow it.

Callers see shards; the inner optimizer has pieces of the same memory, in groups of its own, which are made again when
others are listed than before. The two share the dict that a parameter's states are in, so that only another dict, or
none, has to be noticed.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from stepstack_sharded_states._bucket import Member
from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._params import Group, read_group


class Listing:
    """Which shards `param_groups` lists; the inner optimizer's groups and states, as they follow from it."""

    def __init__(self, inner: Optimizer) -> None:
        self.groups: list[Group] = []
        self._inner = inner
        self._seen: list[tuple[dict[str, Any], list[Tensor]]] = []
        """The groups of callers, and what each listed when it was last looked at."""
        self._known: dict[int, Member] = {}
        """All that were ever listed, by the ids of their shard and of their parameter."""
        self._shards: list[Tensor] = []
        self._pieces: list[Parameter] = []
        self._states: list[dict[str, Any] | None] = []
        """Of each listed parameter of which this rank has a piece: the dict that both sides have its states in."""

    def members(self) -> Iterator[Member]:
        """Those that are listed, in order."""
        return (member for group in self.groups for member in group.members)

    def member_of(self, tensor: Any) -> Member | None:
        """The one that has this shard, or this parameter of the model, listed or not."""
        return self._known.get(id(tensor))

    def add(self, groups: Sequence[Group], param_groups: Sequence[dict[str, Any]]) -> None:
        """Note groups that callers and the inner optimizer have got: the last ones of `param_groups`."""
        for member in (member for group in groups for member in group.members):
            self._known |= {id(member.shard): member, id(member.param): member}
        added = {id(param) for group in groups for _, param in group.params}
        for group in self.groups:
            group.frozen = [(name, param) for name, param in group.frozen if id(param) not in added]
        self.groups = [*self.groups, *groups]
        self._note(param_groups)

    def read(self, param_group: dict[str, Any]) -> Group:
        """A group to be added, with the model's parameters where it has shards of them."""
        if not isinstance(param_group, dict):
            raise TypeError(f"{this_rank()}: a parameter group must be a dict, got {type(param_group)}")
        given = param_group.get("params", ())
        items = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor | set) else given
        of_model = [self._param_of(item) for item in items] if isinstance(items, list) else self._param_of(items)
        if "params" in param_group:
            param_group = {**param_group, "params": of_model}
        return read_group(param_group, len(self.groups), known=self._known.keys())

    def set_apart(self, group: Group) -> dict[int, tuple[str, Member]]:
        """Take out of a new group, by place, the parameters that are in buckets already: a group listed them before."""
        back = {
            place: (name, member)
            for place, (name, param) in enumerate(group.params)
            if (member := self.member_of(param)) is not None
        }
        if back and (group.mesh is not None or group.grad_divisor is not None):
            name = next(iter(back.values()))[0]
            raise ValueError(
                f"{this_rank()}: parameter {name!r} was in this optimizer before, and its bucket keeps its mesh and "
                "grad_divisor: give none for it"
            )
        group.params = [pair for place, pair in enumerate(group.params) if place not in back]
        return back

    def put_back(self, group: Group, back: Mapping[int, tuple[str, Member]]) -> None:
        """Put what was set apart where it was, beside the members that the others have become."""
        for place, (name, member) in back.items():
            member.name = name
            group.params.insert(place, (name, member.param))
            group.members.insert(place, member)

    def _param_of(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return (item[0], *map(self._param_of, item[1:]))
        member = self.member_of(item)
        return item if member is None else member.param

    def follow(self, param_groups: list[dict[str, Any]]) -> None:
        """Make the groups, and those of the inner optimizer, what the callers' have become, if they are not.

        Raises TypeError or ValueError, with nothing changed, for something else than this optimizer's parameters in
        them, or for one that is there twice.
        """
        if self._is_as_noted(param_groups):
            return
        listed = self._listed(param_groups)
        theirs = {id(seen): group for (seen, _), group in zip(self._seen, self._inner.param_groups, strict=True)}
        self.groups = list(self._grouped(param_groups, listed))
        self._inner.param_groups[:] = [theirs.pop(id(group), {"params": []}) for group in param_groups]
        for group, inner_group in zip(self.groups, self._inner.param_groups, strict=True):
            inner_group["params"][:] = group.of_pieces()["params"]
        here = {member for members in listed for member in members}
        for member in {*self._known.values()} - here:
            if member.group is not None:
                if member.piece is not None:
                    self._inner.state.pop(member.piece, None)  # `state` of callers keeps it, as torch's does
                member.leave()
        for caller, members in zip(param_groups, listed, strict=True):
            shards = [member.shard for member in members]
            if not _same(caller["params"], shards):  # parameters of the model stood for them
                caller["params"] = shards
        self._note(param_groups)

    def watching(self, optimizer: Optimizer) -> Callable[[], None]:
        """A function that follows what this optimizer, which may be gone by then, has in `param_groups`."""
        caller = weakref.ref(optimizer)

        def look() -> None:
            alive = caller()
            if alive is not None:
                with suppress(TypeError, ValueError):  # nothing has changed, and the next step says so
                    self.follow(alive.param_groups)

        return look

    def take_states(self, state: MutableMapping[Any, Any]) -> None:
        """Give the inner optimizer the states that callers see, where they are others or gone."""
        self._copy(state, self._shards, self._inner.state, self._pieces)

    def show_states(self, state: MutableMapping[Any, Any]) -> None:
        """Let callers see the states that the inner optimizer has: this rank's pieces, by what `param_groups` lists."""
        self._copy(self._inner.state, self._pieces, state, self._shards)

    def show_only_these(self, state: MutableMapping[Any, Any]) -> None:
        """`show_states()` after a load, of which nothing else is left in `state`, as torch has it."""
        state.clear()
        self._states = [None] * len(self._pieces)
        self.show_states(state)

    def make_local(self) -> None:
        """States that a caller has made like a shard are DTensors: their local parts do, and are what can be saved."""
        for state in filter(None, self._states):
            state |= {name: value.to_local() for name, value in state.items() if isinstance(value, DTensor)}

    def _copy(
        self,
        source: MutableMapping[Any, Any],
        their_keys: Sequence[Tensor],
        target: MutableMapping[Any, Any],
        keys: Sequence[Tensor],
    ) -> None:
        get = partial(dict.get, source) if isinstance(source, dict) else source.get  # they are the keys themselves
        states = list(map(get, their_keys))
        if _same(states, self._states):
            return
        for key, now, before in zip(keys, states, self._states, strict=True):
            if now is None:
                target.pop(key, None)
            elif now is not before:
                target[key] = now
        self._states = states

    def _is_as_noted(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        return len(param_groups) == len(self._seen) and all(
            group is seen and _same(group.get("params", ()), listed)
            for group, (seen, listed) in zip(param_groups, self._seen, strict=True)
        )

    def _note(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._seen = [(group, list(group["params"])) for group in param_groups]
        self._shards, self._pieces = [], []
        for number, group in enumerate(self.groups):
            for member in group.members:
                member.group = number
                if member.piece is not None:
                    self._shards.append(member.shard)
                    self._pieces.append(member.piece)
        self._states = list(map(self._inner.state.get, self._pieces))

    def _listed(self, param_groups: Sequence[dict[str, Any]]) -> list[list[Member]]:
        """The members that the groups list now."""
        found: dict[Member, int] = {}
        listed: list[list[Member]] = []
        for number, group in enumerate(param_groups):
            where = f"{this_rank()}: param_groups[{number}]"
            if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
                raise TypeError(f"{where} must be a dict with a list in 'params'; it was edited and is {group!r:.200}")
            listed.append([])
            for place, tensor in enumerate(group["params"]):
                member = self.member_of(tensor)
                if member is None:
                    raise ValueError(
                        f"{where}['params'][{place}] is no parameter of this optimizer, it was put there after the "
                        "optimizer was made: add it with add_param_group, which moves it to a bucket"
                    )
                if member in found:
                    raise ValueError(
                        f"{where}['params'][{place}], parameter {member.name!r}, is in group {found[member]} too and "
                        "would be stepped twice in each step: list each parameter once"
                    )
                found[member] = number
                listed[-1].append(member)
        return listed

    def _grouped(self, param_groups: Sequence[dict[str, Any]], listed: list[list[Member]]) -> Iterator[Group]:
        """Our groups of the members listed: those before, as far as they are the same ones."""
        before = {id(seen): group for (seen, _), group in zip(self._seen, self.groups, strict=True)}
        same = [before.pop(id(group), None) for group in param_groups]
        left = {member: group for group in before.values() for member in group.members}
        named = any(group.named for group in self.groups)
        for group, members in zip(same, listed, strict=True):
            if group is None:  # a copy of one, perhaps
                group = next((left[member] for member in members if member in left), None)
                left = {member: other for member, other in left.items() if other is not group}
            yield Group(
                options={},
                mesh=None,
                grad_divisor=None,
                params=[(member.name, member.param) for member in members],
                frozen=[] if group is None else group.frozen,
                named=named,
                order=_order(members, [] if group is None else group.order),
                members=members,
            )


def _order(members: list[Member], before: list[str]) -> list[str]:
    """The names of these members in their order; every other name of a group stays behind the one it was behind."""
    names = {member.name for member in members}
    behind: dict[str | None, list[str]] = {}
    latest = None
    for name in before:
        if name in names:
            latest = name
        else:
            behind.setdefault(latest, []).append(name)
    return [*behind.get(None, []), *(it for member in members for it in (member.name, *behind.get(member.name, [])))]


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))
