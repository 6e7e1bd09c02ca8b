"""What a sharded optimizer's `param_groups` list: this rank's parts of parameters, with the parameters' flag.

Trainers read and set `requires_grad` there: whoever trains two models in turns freezes what the other's optimizer
lists, and many a loop clips what isn't frozen. A part is in no graph, so a flag of its own would say nothing.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only


class _Listed:
    """A tensor whose `requires_grad` is that of the model's parameter, to be read and to be set."""

    of: Parameter
    plain: Tensor
    """The same memory, without the flag."""
    before_writing: Callable[[], None] | None = None
    """Called in front of a write to it; may refuse."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from it is a tensor like others

    @property
    def requires_grad(self) -> bool:
        return self.of.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.of.requires_grad = value

    @property
    def data(self) -> Tensor:
        data = self.plain.detach()
        if isinstance(data, DTensor):
            shown: Any = data  # of which a write is noticed, too
            shown.__class__ = _DataOfListed
            shown.of, shown.plain, shown.before_writing = self.of, self.plain.detach(), self.before_writing
        return data

    @data.setter
    def data(self, other: Tensor) -> None:
        if self.before_writing is not None:
            self.before_writing()
        with torch.no_grad():  # it is the model's memory, and stays there
            self.plain.copy_(other)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.of.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _ListedTensor(_Listed, Tensor):  # type: ignore[misc]
    pass


class _ListedDTensor(_Listed, DTensor):  # type: ignore[misc]
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for listed in _written(func, args, kwargs or {}):
            if listed.before_writing is not None:
                listed.before_writing()
        # Without this, torch's own of a subclass of DTensor decides, which not all versions have.
        args, kwargs = tree_map_only(_ListedDTensor, lambda listed: listed.plain, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


class _DataOfListed(_ListedDTensor):
    requires_grad = False


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[_ListedDTensor]:
    """What a call of an operation of torch writes to, of what is listed."""
    for place, name in _places_written(func):
        given = args[place] if place < len(args) else kwargs.get(name)
        for tensor in given if isinstance(given, list | tuple) else (given,):
            if isinstance(tensor, _ListedDTensor):
                yield tensor


@cache
def _places_written(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(place, it.name) for place, it in arguments if it.alias_info is not None and it.alias_info.is_write]


def listed(part: Tensor, param: Parameter) -> Tensor:
    """`part`, a plain tensor or a DTensor, of which `requires_grad` is the parameter's from now on."""
    plain = part.detach()
    part.__class__ = _ListedDTensor if isinstance(part, DTensor) else _ListedTensor
    part.of, part.plain = param, plain  # type: ignore[attr-defined]
    return part
