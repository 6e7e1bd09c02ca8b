"""Whether an optimizer is elementwise: the update of an element depends on that element's history only.

A rank steps a slice of the parameters, which may end inside one. A class that looks at whole parameters (their shape,
their norm, all of them together) would give other numbers there, without an error. So it is tried before it is taken.
"""

import functools
import re
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._trial import Candidate, Untried, difference, with_visible_lr

_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""torch's own, with every option. What is derived from them is tried."""
_WHOLE = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam"))
_NAMED = {
    r"Prodigy|DAdapt": "it estimates one step size from all parameters together, which shows only after many steps",
    r"GaLore|APOLLO|Fira|SubTrack": "it projects whole matrices, in the groups that say so",
    r"Shampoo": "it preconditions whole matrices, some variants only after many steps",
    r"SWATS": "it goes over to SGD at a moment that it reads off whole parameters, after many steps",
    r"SaRA": "it chooses large matrices by rank, which no small one shows",
    r"8bit|4bit|Fp8": "it stores states by blocks that begin where a parameter does, and small ones in full precision",
    r"EmoNavi|EmoLynx|EmoFact|AliG": "it wants the loss, which is another one on each rank",
}
"""Those that a short trial can't tell, by what their names contain, and why."""
_WAY_OUT = (
    "Take an optimizer whose update of an element depends on that element's history only; or say elementwise=True, "
    "if you know that it is one"
)
_passed: "weakref.WeakKeyDictionary[type, set[Hashable]]" = weakref.WeakKeyDictionary()


def check_class(optimizer_class: Any) -> None:
    """Raise TypeError for something else than a class of optimizers, or one of torch's that can't step slices."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"{this_rank()}: optimizer_class must be a torch.optim.Optimizer, got {optimizer_class!r}")
    if issubclass(optimizer_class, _WHOLE):
        raise TypeError(
            f"{this_rank()}: {optimizer_class.__name__} is not elementwise: it needs whole parameters, and a rank "
            "has a slice of them, which may end inside one"
        )


def check_elementwise(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise TypeError for an optimizer that ends elsewhere on slices than on whole parameters, or can't be stepped.

    `options` are its keyword arguments, `groups` those of each parameter group; its parameters will be of `dtype` on
    `device`. One class with the same of these is tried once. Torch's own elementwise classes are not, nor is one with
    `elementwise = True` in its body, which a subclass does not inherit.
    """
    if optimizer_class in _ELEMENTWISE or vars(optimizer_class).get("elementwise") is True:
        return
    name = optimizer_class.__name__
    _refuse_named(optimizer_class, options)
    candidate = Candidate(optimizer_class, with_visible_lr(options), _kinds(groups), dtype, device)
    key, passed = _key(candidate), _passed.setdefault(optimizer_class, set())
    if key is not None and key in passed:
        return
    try:
        found = difference(candidate)
    except Untried as reason:
        if reason.refused is not None:
            raise reason.refused from None  # as without a trial
        raise TypeError(
            f"{this_rank()}: {name} can't step slices of parameters, as far as a trial with small tensors shows: "
            f"{reason}. {_WAY_OUT}"
        ) from reason.__cause__
    if found is not None:
        raise TypeError(
            f"{this_rank()}: {name} is not elementwise with these arguments: it needs whole parameters, and a rank has "
            f"a slice of them. In a trial, a tensor of shape {found[1]} ended {found[0]:.2g} of its way apart when it "
            f"was trained in slices. {_WAY_OUT}"
        )
    if key is not None:
        passed.add(key)


def _refuse_named(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> None:
    """What a trial can't tell."""
    name = optimizer_class.__name__
    for pattern, reason in _NAMED.items():
        if any(re.search(pattern, base.__name__) for base in optimizer_class.__mro__):
            raise TypeError(f"{this_rank()}: {name} is not elementwise: {reason}. {_WAY_OUT}")
    held = [type(leaf).__name__ for leaf in pytree.tree_leaves(dict(options)) if isinstance(leaf, _HOLDS_PARAMETERS)]
    if held:
        raise TypeError(
            f"{this_rank()}: {name} is given a {held[0]}, and with it whole parameters, of which a rank steps a slice. "
            + _WAY_OUT
        )


_HOLDS_PARAMETERS = (nn.Module, nn.Parameter, Optimizer)


def _kinds(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of groups, each kind once: learning rates and names make none."""
    kinds: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        options = with_visible_lr({key: value for key, value in group.items() if key not in _NO_KIND})
        key = _hashed(options)
        kinds.setdefault(number if key is None else (key,), options)
    return list(kinds.values())


_NO_KIND = ("params", "param_names", "initial_lr", "name")


def _key(candidate: Candidate) -> Hashable:
    """What decides how a trial ends, hashable; None where something in it is not."""
    return _hashed((candidate.options, candidate.groups, candidate.dtype, candidate.device))


def _hashed(value: Any) -> Hashable:
    try:
        key = _hashable(value)
        hash(key)
    except TypeError:
        return None
    return key


@functools.singledispatch
def _hashable(value: Any) -> Hashable:
    return type(value), value  # 1, 1.0 and True are equal


@_hashable.register(dict)
def _(value: dict[Any, Any]) -> Hashable:
    return dict, tuple((key, _hashable(part)) for key, part in sorted(value.items(), key=lambda item: str(item[0])))


@_hashable.register(list)
@_hashable.register(tuple)
def _(value: Sequence[Any]) -> Hashable:
    return type(value), tuple(map(_hashable, value))


@_hashable.register(Tensor)
def _(value: Tensor) -> Hashable:
    return Tensor, value.dtype, tuple(value.shape), str(value.tolist())
