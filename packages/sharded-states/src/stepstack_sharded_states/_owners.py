"""Who trains a parameter: of two optimizers the later one, which closes the earlier one."""

import weakref
from collections.abc import Callable, Iterable

from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

_release: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def own(params: Iterable[Parameter], release: Callable[[str], None]) -> None:
    """Have `release`, a method, called with a parameter's name when somebody else comes to train it."""
    for param in params:
        _release[param] = weakref.WeakMethod(release)


def release(name: str, param: Parameter) -> None:
    """Have whoever trains this parameter give it back."""
    owner = _release.pop(param, lambda: None)()  # type: ignore[no-untyped-call]
    if owner is not None:
        owner(name)
