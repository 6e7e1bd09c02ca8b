"""Parameters whose gather is under way: whoever reads one waits for its bucket first.

While a gather is pending, the parameters of its bucket are of a class of their own, and torch asks a class with
`__torch_function__` before each operation. So it does not matter who reads a weight, nor from where. The moment that a
gather is over they are plain parameters again, and cost what they cost.

What reads a tensor without asking its class is not seen here: C++ that is called past torch's operations, transforms
of `torch.func`, constructors such as `torch.tensor`. Modules' forward hooks wait for the first two, where they can.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PROPERTIES = (
    "_backward_hooks _post_accumulate_grad_hooks _version device dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf "
    "is_meta is_sparse itemsize layout nbytes ndim output_nr requires_grad retains_grad shape"
)
_METHODS = (
    "element_size nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad stride"
)
# Without `dim` and `size`, by which torch.func.vmap betrays itself.
_ACCESSES = ("__get__", "__set__", "__delete__")
_READ_NO_VALUES = frozenset(
    [getattr(getattr(Tensor, name), access) for name in _PROPERTIES.split() for access in _ACCESSES]
    + [getattr(Tensor, name) for name in _METHODS.split()]
)


class Awaited(Parameter):
    """A parameter that has not arrived."""

    arrive: Callable[[], None]
    """Wait for all parameters of this very class, and make them plain ones."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return Parameter(data, requires_grad)  # for whoever calls type(param)(…)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READ_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, Awaited):
                kind.arrive()
        return func(*args, **(kwargs or {}))

    def detach(self) -> Any:
        type(self).arrive()
        # `Parameter(param)` has taken this for a tensor of another class, and wants one of the same class back, which
        # is the plain parameter's by now.
        made = sys._getframe(1).f_code is Parameter.__new__.__code__
        return Parameter(self, self.requires_grad) if made else self.detach()

    def as_subclass(self, cls: Any) -> Any:
        type(self).arrive()
        return self.as_subclass(cls)  # which asks no class

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self).arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).arrive()
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        type(self).arrive()
        return repr(self)


def kind_of(arrive: Callable[[], None]) -> type[Awaited]:
    """A class for the parameters of one bucket."""
    return type("AwaitedParameter", (Awaited,), {"arrive": staticmethod(arrive)})


def read_elsewhere(param: Parameter) -> str | None:
    """In words, who may read this parameter without asking its class; None if nobody can be seen who does."""
    if type(param) is not Parameter:
        return f"is of the class {type(param).__name__}"
    # Its own and that of the object made here.
    if torch._C._storage_Use_Count(param.untyped_storage()._cdata) > 2:
        return "has views that something holds (detach(), .data, a state dict, a graph)"
    # Its own and that of its node in the graph of autograd.
    if param._use_count() > 2:  # type: ignore[attr-defined]
        return "is held by something in C++ (a scripted module, a graph)"
    return None
