"""Attributes of other people's objects, replaced for a while."""

from typing import Any

_ABSENT = object()


class Overrides:
    """Replaces attributes of instances, and puts everything back as it was.

    overrides.replace(optimizer, "step", ours)
    overrides.restore()  # an attribute that the instance did not have is gone again
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute of an instance; what was there before, wherever it came from."""
        before = getattr(owner, name, None)
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)
        return before

    def restore(self) -> None:
        """Put back all that was replaced, the last one first. Twice is once."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not _ABSENT:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
