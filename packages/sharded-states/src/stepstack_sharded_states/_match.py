"""An optimizer and what a checkpoint has of it, compared by metadata before anything is read."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stepstack_sharded_states._checkpoint import Checkpoint
from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._named import MASTER, Named


class Match:
    """One optimizer and the part of a checkpoint that begins with `prefix`."""

    def __init__(self, prefix: str, checkpoint: Checkpoint, saved: Mapping[str, Any]) -> None:
        self._prefix, self._checkpoint, self._saved = prefix, checkpoint, saved
        self._states = self._by_name("state")
        self._options = self._by_name("param_groups")
        self._values: dict[str, tuple[dict[str, Any], str]] = {}

    def strangers(self) -> set[str]:
        """The parameters of the checkpoint that are not in the optimizer of this rank."""
        known = self._checkpoint.named.keys() | self._checkpoint.frozen
        return (self._states.keys() | self._options.keys()) - known

    def into(self, entries: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
        """Make of the flat `entries` what is to be read; where to put values that are not tensors, by key.

        Raises ValueError where the checkpoint lacks something, or has something else.
        """
        problems = self._missing_names()
        for name, named in self._checkpoint.named.items():
            problems += self._differences(name, named)
        refuse(problems)
        for key in [key for key in entries if key.startswith((self._key("state"), self._key("param_groups")))]:
            if key not in self._saved:
                del entries[key]
        for name, named in self._checkpoint.named.items():
            self._read_states(name, named, entries)
            self._read_options(name, named, entries)
        return self._values

    def _missing_names(self) -> list[str]:
        there = self._states.keys() | self._options.keys()
        wanted = [name for name, named in self._checkpoint.named.items() if named.member.param.numel()]
        return [f"it has no parameter {name!r}" for name in wanted if name not in there]

    def _differences(self, name: str, named: Named) -> list[str]:
        saved = self._states.get(name, {})
        named.absent = not saved.keys() - {MASTER}
        wanted, found = named.tensors.keys() | named.numbers.keys(), list[str]()
        if not named.member.param.numel():
            return found
        found += named.unsavable
        if not named.absent and name not in self._checkpoint.unforeseen:
            found += [f"it has no {state} of {name!r}" for state in sorted(wanted - saved.keys() - {MASTER})]
            found += [
                f"it has {state} of {name!r}, which this optimizer has not: another kind wrote it, or other options"
                for state in sorted(saved.keys() - wanted - {MASTER})
            ]
        for state, key in sorted(saved.items()):
            difference = self._difference(named, state, self._saved[key])
            if difference:
                found.append(f"its {state} of {name!r} {difference}")
        return found

    def _difference(self, named: Named, state: str, there: Any) -> str | None:
        """Why what is saved can't be the state of that name."""
        is_tensor, shape = isinstance(there, TensorStorageMetadata), named.member.param.shape
        if state in named.tensors:
            dtype = named.tensors[state].dtype
            if not is_tensor:
                return "is no tensor"
            if there.size != shape:
                return f"has shape {tuple(there.size)}, the parameter {tuple(shape)}"
            if there.properties.dtype.is_floating_point != dtype.is_floating_point:
                return f"is {there.properties.dtype}, here {dtype}"
        elif is_tensor and len(there.size) and state in named.numbers:
            return f"has shape {tuple(there.size)}, and is one number here"
        elif is_tensor and len(there.size) and there.size != shape and state != MASTER:
            return f"has shape {tuple(there.size)}, the parameter {tuple(shape)}"
        return None

    def _read_states(self, name: str, named: Named, entries: dict[str, Any]) -> None:
        for state, key in self._states.get(name, {}).items():
            there = self._saved[key]
            if name in self._checkpoint.unforeseen and state != MASTER:
                self._foresee(named, state, there, key, entries)
            if state not in named.numbers:
                continue
            if not isinstance(there, TensorStorageMetadata):
                entries[key], self._values[key] = None, (named.loaded, state)
            elif key in entries and not isinstance(entries[key], Tensor):
                entries[key] = named.loaded[state] = torch.zeros(there.size, dtype=there.properties.dtype)

    def _foresee(self, named: Named, state: str, there: Any, key: str, entries: dict[str, Any]) -> None:
        """The checkpoint knows which states there are, if the optimizer does not."""
        if not isinstance(there, TensorStorageMetadata):
            named.numbers[state] = 0.0
        elif len(there.size) or not (named.member.param.ndim or state == "step"):
            entries[key] = self._checkpoint.tensor(named, state)
        else:
            named.numbers[state] = torch.zeros((), dtype=there.properties.dtype)
            entries[key] = self._checkpoint.number(named, state, there.properties.dtype)

    def _read_options(self, name: str, named: Named, entries: dict[str, Any]) -> None:
        for option, key in self._options.get(name, {}).items():
            there = self._saved[key]
            if isinstance(there, TensorStorageMetadata):
                entries[key] = named.options[option] = torch.zeros(there.size, dtype=there.properties.dtype)
            else:
                entries[key], self._values[key] = None, (named.options, option)

    def _by_name(self, section: str) -> dict[str, dict[str, str]]:
        """Keys by parameter and last part of the key."""
        found: dict[str, dict[str, str]] = {}
        for key in self._saved:
            if key.startswith(self._key(section)):
                name, _, last = key.removeprefix(self._key(section)).rpartition(".")
                found.setdefault(name, {})[last] = key
        return found

    def _key(self, section: str) -> str:
        return f"{self._prefix}{section}."


def refuse(problems: Collection[str]) -> None:
    """Raise ValueError if there are any."""
    if problems:
        shown = "; ".join(list(problems)[:3])
        more = f"; and {len(problems) - 3} more like these" if len(problems) > 3 else ""
        raise ValueError(f"{this_rank()}: the checkpoint doesn't fit, nothing has been loaded: {shown}{more}")


def refuse_strangers(of_ranks: Iterable[set[str]]) -> None:
    """Raise ValueError for parameters of a checkpoint that no rank knows. Experts are known by some."""
    strangers = set.intersection(*of_ranks)
    refuse([f"its parameter {name!r} is not in this optimizer" for name in sorted(strangers)])
