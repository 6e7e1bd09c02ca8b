"""A checkpoint in words, for people."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stepstack import _folder
from stepstack._contents import within
from stepstack._ranks import Ranks
from stepstack._states import READERS_OWN, options_by_name
from stepstack._storage import Entry, Wanted, entries_of, read_metadata, read_tensors
from stepstack._values import from_text, to_text


class Summary:
    """What there is to say of a checkpoint whose marker, metadata and values are as they were written."""

    def __init__(self, checkpoint: Path) -> None:
        self._marker = _folder.read_marker(checkpoint)
        _folder.check_names(checkpoint, self._marker)
        metadata = read_metadata(checkpoint, self._marker)
        text = _folder.read(checkpoint / _folder.VALUES, self._marker.files[_folder.VALUES])
        self._checkpoint, self._values = checkpoint, from_text(text.decode())
        self._entries = entries_of(metadata)
        steps = {name: torch.zeros(entry.shape) for name, entry in self._entries.items() if _is_count(name, entry)}
        read_tensors(checkpoint, metadata, Wanted(dict(steps), {name: name for name in steps}, {}), Ranks(None))
        self._steps = {name: int(step) for name, step in steps.items()}

    @property
    def headline(self) -> str:
        """Where it comes from, and how large it is."""
        marker = self._marker
        parts = ", ".join(f"{kind} {size_in_words(sum(map(_size, self._of(kind))))}" for kind in ("model", "optimizer"))
        ranks = f"{marker.ranks} ranks" if marker.ranks > 1 else "one rank"
        return (
            f"{self._checkpoint}: step {marker.step}, written {marker.written} by {ranks}, torch {marker.torch}, "
            f"format {_folder.FORMAT!r} {_folder.VERSION}\n"
            f"{len(marker.files)} files, {size_in_words(sum(file.size for file in marker.files.values()))}; {parts}"
        )

    def rows(self) -> Iterator[tuple[str, str, str, str, str, str]]:
        """A table, with its head: each tensor of the model, with the states that the optimizer has of it."""
        yield "name", "shape", "dtype", "states", "step", "size"
        states = within("optimizer.state", self._entries)
        for name, entry in within("model", self._entries).items():
            own = {key: state for key, state in within(name, states).items() if key != "step"}
            step = self._steps.get(f"optimizer.state.{name}.step")
            yield (
                name,
                str(list(entry.shape)),
                _dtype(entry),
                ", ".join(f"{key} {_dtype(state)}" for key, state in own.items()) or "-",
                "-" if step is None else str(step),
                size_in_words(sum(map(_size, [entry, *own.values()]))),
            )

    def facts(self) -> dict[str, Any]:
        """The same for programs: plain values, sizes in bytes, options by parameter."""
        marker, states = self._marker, within("optimizer.state", self._entries)
        parameters = {}
        for name, entry in within("model", self._entries).items():
            own = {key: _dtype(state) for key, state in within(name, states).items() if key != "step"}
            step = self._steps.get(f"optimizer.state.{name}.step")
            parameters[name] = {"shape": list(entry.shape), "dtype": _dtype(entry), "states": own, "step": step}
        return {
            "path": str(self._checkpoint),
            "step": marker.step,
            "written": marker.written,
            "ranks": marker.ranks,
            "torch": marker.torch,
            "format": [_folder.FORMAT, _folder.VERSION],
            "bytes": {name: file.size for name, file in sorted(marker.files.items())},
            "tensors": parameters,
            "values": json.loads(to_text(self._values)),
        }

    @property
    def options(self) -> str:
        """The options of the parameters, those that many share once, and what else has been saved."""
        counted = Counter(
            ", ".join(f"{option} {_value(value)}" for option, value in options.items() if option not in READERS_OWN)
            for options in options_by_name(self._values["optimizer"]).values()
        )
        lines = [f"{count} parameters: {options}" for options, count in counted.items()]
        others = [name for name in self._values if name not in ("model", "optimizer")]
        return "\n".join([*lines, f"also saved: {', '.join(others)}"])

    def _of(self, kind: str) -> list[Entry]:
        return list(within(kind, self._entries).values())


def size_in_words(size: int) -> str:
    """Bytes as people write them."""
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} B"


def _size(entry: Entry) -> int:
    return entry.shape.numel() * entry.dtype.itemsize


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _is_count(name: str, entry: Entry) -> bool:
    return name.startswith("optimizer.state.") and name.endswith(".step") and entry.shape.numel() == 1


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, torch.Tensor | float) else str(value)
