"""Files that hold a config: JSON, with what DeepSpeed's reader lets pass in it."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEXT = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(rf"({_TEXT})|(?:#|//)[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"({_TEXT})|,(?=\s*[}}\]])")


def loaded(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The dict itself, or the object in the JSON file of this path.

    Comments (`#`, `//`, `/* */`) and a comma after a last value are let pass, as DeepSpeed lets them, and where the
    package hjson is installed, by which DeepSpeed reads, so is the rest of what that knows. TypeError,
    FileNotFoundError or ValueError for what is no config, and for a key that is in one object twice.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a dict or the path of a JSON file, got {type(config).__name__}")
    path = Path(config)
    if not path.is_file():
        raise FileNotFoundError(f"config must be a dict or the path of a JSON file; there is no file {str(path)!r}")
    try:
        values = _parsed(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not JSON: {error} (comments are fine; keys and text need double quotes, unless the package "
            "hjson is installed)"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object with keys and values, not {values!r}")
    return values


def _parsed(text: str) -> Any:
    try:
        return json.loads(_bare(text), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        try:
            import hjson  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise error from None
        try:
            return hjson.loads(text, object_pairs_hook=_without_duplicates)
        except hjson.HjsonDecodeError:
            raise error from None


def _bare(text: str) -> str:
    """Without comments and last commas, each line where it was."""
    return _LAST_COMMA.sub(_kept, _COMMENT.sub(_kept, text))


def _kept(found: "re.Match[str]") -> str:
    return found[1] or re.sub(r"[^\n]", " ", found[0])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"the config has a key twice in one object: {', '.join(twice)}")
    return dict(pairs)
