"""An optimizer and what a checkpoint has of it, compared by metadata before anything is read."""

from collections.abc import Mapping
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
        self._problems: list[str] = []

    def into(self, entries: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
        """Make of the flat `entries` what is to be read; where to put values that are not tensors, by key.

        Raises ValueError where the two don't fit.
        """
        self._compare_names()
        for name, named in self._checkpoint.named.items():
            self._compare_states(name, named)
        if self._problems:
            more = f"; and {len(self._problems) - 3} more like these" if len(self._problems) > 3 else ""
            raise ValueError(
                f"{this_rank()}: the checkpoint doesn't fit, nothing has been loaded: "
                f"{'; '.join(self._problems[:3])}{more}"
            )
        for key in [key for key in entries if key.startswith((self._key("state"), self._key("param_groups")))]:
            if key not in self._saved:
                del entries[key]
        for name, named in self._checkpoint.named.items():
            self._read_states(name, named, entries)
            self._read_options(name, named, entries)
        return self._values

    def _compare_names(self) -> None:
        known = self._checkpoint.named.keys() | self._checkpoint.frozen
        there = self._states.keys() | self._options.keys()
        wanted = {name for name, named in self._checkpoint.named.items() if named.member.param.numel()}
        self._problems += [f"it has no parameter {name!r}" for name in self._checkpoint.named if name in wanted - there]
        self._problems += [f"its parameter {name!r} is not in this optimizer" for name in sorted(there - known)]

    def _compare_states(self, name: str, named: Named) -> None:
        saved = self._states.get(name, {})
        named.absent = not saved.keys() - {MASTER}
        wanted = named.tensors.keys() | named.numbers.keys()
        if named.absent or not named.member.param.numel():
            return
        if name not in self._checkpoint.unforeseen:
            self._problems += [f"it has no {state} of {name!r}" for state in sorted(wanted - saved.keys() - {MASTER})]
            self._problems += [
                f"it has {state} of {name!r}, which this optimizer has not: another kind wrote it, or other options"
                for state in sorted(saved.keys() - wanted - {MASTER})
            ]
        for state in saved.keys() & named.tensors.keys():
            self._compare_tensors(saved[state], f"{state} of {name!r}", named, state)

    def _compare_tensors(self, key: str, what: str, named: Named, state: str) -> None:
        there, shape = self._saved[key], named.member.param.shape
        if not isinstance(there, TensorStorageMetadata):
            self._problems.append(f"its {what} is no tensor")
        elif tuple(there.size) != tuple(shape):
            self._problems.append(f"its {what} has shape {tuple(there.size)}, the parameter {tuple(shape)}")
        elif there.properties.dtype.is_floating_point != named.tensors[state].dtype.is_floating_point:
            self._problems.append(f"its {what} is {there.properties.dtype}, here {named.tensors[state].dtype}")

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
