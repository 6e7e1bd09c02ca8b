"""Objects of a JSON config that know what was read of them, so that nothing in a config goes unnoticed."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Section:
    """One object of a config. Who reads a key checks its value; `finish` then says what nobody has read.

    A key is read by its kind (`flag`, `number`, `whole`, `choice`, `section`), or it is known and has no effect here
    (`without_effect`), or it is known and can't be had here (`refuse`). Raises ValueError, with the key's full name.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{path or 'the config'} must be an object with keys and values, got {values!r}")
        names = [key for key in values if not isinstance(key, str)]
        if names:
            raise ValueError(f"keys of {path or 'the config'} must be text, got {', '.join(map(repr, names))}")
        self._values, self._path = dict(values), path
        self._known: set[str] = set()
        self._sections: list[Section] = []
        self._idle: list[str] = []

    def name(self, key: str) -> str:
        """The key as errors say it: with the keys of the objects that it is in."""
        return f"{self._path}.{key}" if self._path else key

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def section(self, key: str) -> "Section":
        """The object under a key; an empty one where there is none."""
        self._known.add(key)
        given = self._values.get(key)
        section = Section({} if given is None else given, self.name(key))
        self._sections.append(section)
        return section

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.name(key)} must be true or false, got {value!r}")
        return value

    def number(self, key: str, default: float, *, at_least: float = -math.inf, at_most: float = math.inf) -> float:
        """A finite number in a range."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.name(key)} must be a number, got {value!r}")
        if not at_least <= value <= at_most:
            raise ValueError(f"{self.name(key)} must be {_range(at_least, at_most)}, got {value!r}")
        return value

    def name_of_type(self) -> str | None:
        """What `type` says, of an object with a `type` and its `params`; None if nothing is asked for."""
        name = self.value("type", None)
        if name is None and self._values.get("params"):
            raise ValueError(f"{self.name('type')} is missing: the name that {self.name('params')} are for")
        if name is not None and not isinstance(name, str):
            raise ValueError(f"{self.name('type')} must be a name, got {name!r}")
        return name

    def whole(self, key: str, default: int | None, *, at_least: int = 1) -> int | None:
        """A whole number, which may be written as 5e8; None where there is none and no default."""
        value = self.value(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < at_least:
            raise ValueError(f"{self.name(key)} must be a whole number, {at_least} or more, got {value!r}")
        return int(value)

    def choice(self, key: str, default: str | None, choices: Sequence[Any]) -> Any:
        """One of a few values."""
        value = self.value(key, default)
        if value is not default and value not in choices:
            raise ValueError(f"{self.name(key)} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        return value

    def value(self, key: str, default: Any) -> Any:
        """Whatever is there; the default where there is nothing, or null."""
        self._known.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def rest(self) -> dict[str, Any]:
        """All that was not read, for a callee who checks it."""
        rest = {key: value for key, value in self._values.items() if key not in self._known}
        self._known |= rest.keys()
        return rest

    def without_effect(self, *keys: str, as_here: Sequence[Any] = ()) -> None:
        """Keys that change nothing here: noted for the one warning, unless they say what is so anyway."""
        self._known.update(keys)
        self._idle += [key for key in keys if not _one_of(self._values.get(key), (None, *as_here))]

    def comments(self) -> None:
        """Keys that begin with an underscore are for readers only."""
        self._known.update(key for key in self._values if key.startswith("_"))

    def refuse(self, key: str, because: str, *, unless: Sequence[Any] = (False,)) -> None:
        """A key that can't be had here, and the reason.

        The values in `unless` ask for nothing, and neither do null and an object with an "enabled" that is false.
        """
        self._known.add(key)
        value = self._values.get(key)
        disabled = isinstance(value, Mapping) and value.get("enabled") is False
        if not disabled and not _one_of(value, (None, *unless)):
            said = "there" if isinstance(value, Mapping) and value else repr(value)
            raise ValueError(f"{self.name(key)} is {said}: {because}")

    def finish(self) -> list[str]:
        """The keys that are known and have no effect. ValueError with all keys that nobody knows."""
        unknown = list(self._unknown())
        if unknown:
            one = len(unknown) == 1
            raise ValueError(
                f"the config has {'a key' if one else 'keys'} that this engine does not know: {', '.join(unknown)}. "
                "Correct the name, or remove what you don't need"
            )
        return list(self._without_effect())

    def _unknown(self) -> Iterator[str]:
        for key in [key for key in self._values if key not in self._known]:
            near = difflib.get_close_matches(key, sorted(self._known), n=1, cutoff=0.7)
            yield f"{self.name(key)!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
        for section in self._sections:
            yield from section._unknown()

    def _without_effect(self) -> Iterator[str]:
        yield from map(self.name, self._idle)
        for section in self._sections:
            yield from section._without_effect()


def check_arguments(callee: Callable[..., Any], options: Mapping[str, Any], params: Section, *, module: str) -> None:
    """ValueError, by the keys of `params`, where a class can't be made of something and these options."""
    _, *known = inspect.signature(callee).parameters.values()
    names = [parameter.name for parameter in known]
    for key in options:
        if key not in names:
            raise ValueError(
                f"{params.name(key)}: {module}.{callee.__name__} has no such argument; it has {', '.join(names)}"
            )
    for parameter in known:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ValueError(f"{params.name(parameter.name)} is missing: {module}.{callee.__name__} needs it")


def _one_of(value: Any, values: Sequence[Any]) -> bool:
    """Whether it is among them; 1 is not true, and 0 is not false."""
    return any(type(value) is type(one) and value == one for one in values)


def _range(at_least: float, at_most: float) -> str:
    if at_most == math.inf:
        return f"{at_least:g} or more"
    return f"in [{at_least:g}, {at_most:g}]"
