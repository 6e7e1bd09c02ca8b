"""The states of a sharded optimizer by parameter, in logical shape: for torch.distributed.checkpoint.

Keys are torch's, of a flattened optimizer state: `state.<parameter>.<state>` and `param_groups.<parameter>.<option>`.
A master weight is one more state, `master_weight`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from stepstack_sharded_states._boxes import Box, boxes
from stepstack_sharded_states._bucket import Bucket
from stepstack_sharded_states._chunks import Chunks, Holding
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._named import MASTER, Named, NumberOfPiece, PieceItself, PlaceOfNothing, TensorOfPiece
from stepstack_sharded_states._options import check_alike, check_kinds, shown, take_over, without_own
from stepstack_sharded_states._params import Group, names_in
from stepstack_sharded_states._states import foreseen, scalars_of, set_numbers, tensors_of, unsavable
from stepstack_sharded_states._together import agree

Result = TypeVar("Result")

_LEAST_BOX = 2**16  # elements
_ADVICE = "(not known before its first step: load with planner=stepstack_sharded_states.ShardedLoadPlanner())"


class Checkpoint:
    """One look at an optimizer, for one save or one load: `state_dict()` to be saved, or to be filled and taken.

    `check` raises RuntimeError where nothing may be saved now.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        buckets: Sequence[Bucket],
        inner: Optimizer,
        options: Sequence[dict[str, Any]],
        meshes: Collection[Ranks],
        check: Callable[[], None],
    ) -> None:
        self.inner, self.groups, self.options, self._check = inner, groups, options, check
        self.meshes, self.device = list(meshes), buckets[0].params.device
        _check_names(groups)
        self.frozen = {name for group in groups for name, _ in group.frozen}
        self.named: dict[str, Named] = {}
        self.unforeseen: list[str] = []
        """Parameters of which nobody knows what states they will have."""
        self._most = _box_sizes(buckets)
        self._foresight: dict[Any, Any] = {}
        home = {member: bucket for bucket in buckets for member in bucket.members}
        for number, group in enumerate(groups):
            for member in group.members:
                named = self.named[member.name] = Named(member, home[member], inner)
                if member.param.numel():
                    self._find_states(named, number)

    def check(self) -> None:
        """Raise RuntimeError where nothing may be saved now, TypeError for a state that can't be."""
        self._check()
        self.check_states()

    def check_states(self) -> None:
        """Raise TypeError for a state that can't be saved."""
        for named in self.named.values():
            if named.unsavable:
                raise TypeError(f"{this_rank()}: {named.unsavable[0]}")

    def state_dict(self) -> dict[str, Any]:
        """Flat: tensors as `Chunks`, Python's numbers and options as they are."""
        entries: dict[str, Any] = {}
        for name, named in self.named.items():
            entries |= {f"state.{name}.{state}": self.tensor(named, state) for state in named.tensors}
            for state, like in named.numbers.items():
                if isinstance(like, Tensor):
                    entries[f"state.{name}.{state}"] = self.number(named, state, like.dtype)
                elif named.piece is not None:
                    entries[f"state.{name}.{state}"] = scalars_of(self.inner, named.piece).get(state, like)
        for group, options in zip(self.groups, self.options, strict=True):
            entries |= self._of_empty(group)
            values = shown(options)
            for name in names_in(group):
                entries |= {f"param_groups.{name}.{key}": value for key, value in values.items()}
        if self.unforeseen:  # nothing is saved under this name, and nobody finds it in a checkpoint
            named = self.named[self.unforeseen[0]]
            nothing = TensorOfPiece(named, _ADVICE, named.member.shard.dtype, self._create)
            entries[f"state.{self.unforeseen[0]}.{_ADVICE}"] = self._chunks(named, _ADVICE, nothing)
        return entries

    def _of_empty(self, group: Group) -> dict[str, Any]:
        """The states of parameters without elements, which other optimizers have and ask for."""
        others = (self.named[member.name] for member in group.members if member.param.numel())
        other = next((named for named in others if named.tensors or named.numbers), None)
        entries: dict[str, Any] = {}
        for member in group.members if other is not None else ():
            if member.param.numel():
                continue
            assert other is not None
            shape, here = tuple(member.param.shape), other.piece is not None
            for state, place in other.tensors.items():
                found = [Box((0,) * len(shape), shape, 0, 0)] if here and state != MASTER else []
                holding = Holding(shape, member.stride, found, PlaceOfNothing(place), self.check)
                entries[f"state.{member.name}.{state}"] = Chunks(holding, place.dtype)
            for state, like in other.numbers.items():
                if isinstance(like, Tensor):
                    number = PlaceOfNothing(NumberOfPiece(other, state, like.dtype))
                    holding = Holding((), (), [Box((), (), 0, 1)] if here else [], number, self.check)
                    entries[f"state.{member.name}.{state}"] = Chunks(holding, like.dtype)
        return entries

    def tensor(self, named: Named, state: str) -> Chunks:
        """A state with as many elements as its parameter, of which this rank has its piece.

        One that is not known yet has a place as soon as something is loaded, in the dtype of the piece.
        """
        if state not in named.tensors:
            named.tensors[state] = TensorOfPiece(named, state, named.member.shard.dtype, self._create)
        return self._chunks(named, state, named.tensors[state])

    def number(self, named: Named, state: str, dtype: torch.dtype) -> Chunks:
        """A state that is one number, which every rank with a piece has."""
        found = [] if named.piece is None else [Box((), (), 0, 1)]
        place, origin = NumberOfPiece(named, state, dtype), (self, named, state)
        return Chunks(Holding((), (), found, place, self.check, origin), dtype)

    def take(self, entries: Mapping[str, Any]) -> None:
        """What `state_dict()` has been filled with takes effect. ValueError on all ranks if one lacks something."""
        self.agree(lambda: self._check_loaded(entries))
        numbers: dict[str, list[tuple[Parameter, Any, Any]]] = {}
        for named in self.named.values():
            named.install()
            if named.piece is not None and not named.absent:
                for state, value in named.loaded.items():
                    numbers.setdefault(state, []).append((named.piece, value, named.numbers.get(state, value)))
        for state, values in numbers.items():
            set_numbers(self.inner, state, values)
        for group, options in zip(self.groups, self.options, strict=True):
            for member in group.members[:1]:
                take_over(options, self._loaded_options(member.name, options, entries))

    def agree(self, function: Callable[[], Result]) -> Result:
        """What the function returns; ValueError or TypeError on every rank of the meshes if it raises on one.

        All of them call this.
        """
        return agree(self.meshes, self.device, function)

    def expect(self, loaded: Mapping[str, Any]) -> None:
        """Have the places of the states that the optimizer keeps with options that are to be loaded, by flat keys."""
        for number, (group, own) in enumerate(zip(self.groups, self.options, strict=True)):
            for member in group.members:
                keys = {option: f"param_groups.{member.name}.{option}" for option in own}
                options = without_own({option: loaded[key] for option, key in keys.items() if key in loaded})
                check_kinds(member.name, own, options)
                if member.param.numel():
                    self._expect(self.named[member.name], number, options)

    def check_named(self) -> None:
        """Raise ValueError unless every parameter has a name that its caller gave."""
        for group in self.groups:
            for name in names_in(group):
                if not group.named:
                    raise ValueError(
                        f"{this_rank()}: a checkpoint knows parameters by name, and parameter {name} has none: make "
                        "the optimizer with ShardedOptimizer(model.named_parameters(), …), or with (name, parameter) "
                        "in groups"
                    )

    def mesh_of(self, key: str) -> Ranks:
        """The ranks that share what is under a key: those of its parameter, or of the optimizer."""
        name = key.removeprefix("state.").removeprefix("param_groups.").rpartition(".")[0]
        return self.named[name].bucket.ranks if name in self.named else self.meshes[0]

    def _check_loaded(self, entries: Mapping[str, Any]) -> None:
        if not any(key.startswith(("state.", "param_groups.")) for key in entries):
            raise ValueError(f"{this_rank()}: this is no sharded_state_dict(): it has neither states nor param_groups")
        missing = []
        for name, named in self.named.items():
            there = [state for state in (*named.tensors, *named.numbers) if f"state.{name}.{state}" in entries]
            named.absent |= not (set(there) - {MASTER} or named.has_loaded())
            for state in there:
                if not isinstance(entries[f"state.{name}.{state}"], Tensor):
                    named.loaded.setdefault(state, entries[f"state.{name}.{state}"])
            missing += [f"{state} of {name!r}" for state in named.missing()]
            _check_numbers(named)
        if missing:
            raise ValueError(
                f"{this_rank()}: {len(missing)} states have not been loaded, {missing[0]} for one: fill the whole of "
                "what sharded_state_dict() gives with torch.distributed.checkpoint.load, then hand it over"
            )
        for group, options in zip(self.groups, self.options, strict=True):
            loaded = [(member.name, self._loaded_options(member.name, options, entries)) for member in group.members]
            for name, of_name in loaded:
                check_kinds(name, options, of_name)
            check_alike(loaded)

    def _chunks(self, named: Named, state: str, place: TensorOfPiece) -> Chunks:
        member = named.member
        first, last = (min(end, member.param.numel()) for end in member.interval)
        found = boxes((first, last), member.param.shape, member.stride, self._most[named.bucket.ranks])
        origin = self, named, state
        return Chunks(Holding(member.param.shape, member.stride, found, place, self.check, origin), place.dtype)

    def _loaded_options(self, name: str, ours: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
        keys = {option: f"param_groups.{name}.{option}" for option in ours}
        given = {option: entries[key] for option, key in keys.items() if key in entries}
        return given | self.named[name].options

    def _find_states(self, named: Named, group: int) -> None:
        member = named.member
        if member.shard.dtype != member.param.dtype:
            named.tensors[MASTER] = PieceItself(named, MASTER, member.shard.dtype, self._create)
        tensors: dict[str, Any] = {}
        if named.piece is not None:
            tensors, named.numbers = tensors_of(self.inner, named.piece), scalars_of(self.inner, named.piece)
            for state, kind in unsavable(self.inner, named.piece).items():
                named.unsavable.append(
                    f"{state} of {member.name!r} is {kind}: of an optimizer's states, only plain tensors of as many "
                    "elements as the parameter and single numbers can be saved and loaded on any number of ranks; "
                    "local_state_dict() has them all, for the same ranks"
                )
                tensors.setdefault(state, member.shard)
        if not tensors and not named.numbers:
            foresight = self._foreseen(named, group, self.options[group])
            if foresight is None:
                self.unforeseen.append(member.name)
                return
            tensors, named.numbers = foresight[0], dict(foresight[1])
        for state, there in tensors.items():
            named.tensors[state] = TensorOfPiece(named, state, there.dtype, self._create)

    def _foreseen(self, named: Named, group: int, options: dict[str, Any]) -> Any:
        like = named.member.shard
        kind = group, like.dtype, like.device, *(repr(option) for option in sorted(shown(options).items()))
        if kind not in self._foresight:
            self._foresight[kind] = foreseen(self.inner, options, like)
        return self._foresight[kind]

    def _expect(self, named: Named, group: int, loaded: dict[str, Any]) -> None:
        """Other places, where the optimizer has other states with the options that are to be loaded."""
        before, after = (
            self._foreseen(named, group, options) for options in (self.options[group], self.options[group] | loaded)
        )
        if before is None or after is None or before is after:
            return
        (tensors_before, numbers_before), (tensors, numbers) = before, after
        gone = (tensors_before.keys() | numbers_before.keys()) - (tensors.keys() | numbers.keys())
        for state in gone & (named.tensors.keys() | named.numbers.keys()):
            named.dropped.add(state)
            named.tensors.pop(state, None)
            named.numbers.pop(state, None)
        for state in tensors.keys() - tensors_before.keys() - named.tensors.keys():
            named.tensors[state] = TensorOfPiece(named, state, tensors[state].dtype, self._create)
        named.numbers |= {state: like for state, like in numbers.items() if state not in numbers_before}

    def _create(self) -> None:
        """Make states that are about to be loaded, all at once, where the optimizer can."""
        if hasattr(self.inner, "create_states"):
            coming = [named.piece for named in self.named.values() if named.piece is not None and not named.absent]
            self.inner.create_states(coming)


def checkpoint_of(entries: Mapping[str, Any], otherwise: Checkpoint) -> Checkpoint:
    """The one whose `state_dict()` this is, for the same optimizer."""
    for value in entries.values():
        if isinstance(value, Chunks) and value.holding.origin is not None:
            checkpoint: Checkpoint = value.holding.origin[0]
            return checkpoint if checkpoint.inner is otherwise.inner else otherwise
    return otherwise


def _check_names(groups: Sequence[Group]) -> None:
    """Raise ValueError where two parameters have one name."""
    seen: set[str] = set()
    for group in groups:
        for name in names_in(group):
            if name in seen:
                raise ValueError(
                    f"{this_rank()}: two parameters are named {name!r}, a checkpoint can't tell them apart"
                )
            seen.add(name)


def _check_numbers(named: Named) -> None:
    """Raise ValueError for loaded single numbers that can't be what the optimizer has there."""
    for state, value in named.loaded.items():
        like = named.numbers.get(state)
        try:
            _ = type(like)(float(value)) if isinstance(like, int | float) else float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{this_rank()}: the loaded {state} of {named.member.name!r} is {value!r:.200}, and must be a number"
            ) from error


def _box_sizes(buckets: Sequence[Bucket]) -> dict[Ranks, int]:
    """How large a box may be, in elements: a 32nd of a rank's part, since writing one takes a copy of it."""
    numel: Counter[Ranks] = Counter()
    for bucket in buckets:
        numel[bucket.ranks] += bucket.param_slice.numel()
    return {ranks: max(_LEAST_BOX, total // 32) for ranks, total in numel.items()}
