"""A model's and an optimizer's states as flat dicts of what their names are, out of the objects and into them.

Keys are torch's: `blocks.0.weight` of a model, `state.blocks.0.weight.exp_avg` and `param_groups.blocks.0.weight.lr` of
an optimizer. Tensors and other values are apart.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.optim import Optimizer

from stepstack._foresight import first_states
from stepstack._names import compare_names, owners, split, unwrapped
from stepstack._storage import Entry
from stepstack._values import to_text
from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedOptimizer

MASTER = "master_weight"  # in place of which, where an optimizer had none, the weight of the model is offered
GROUPS = "groups"  # the names of the parameters of each
# How a step runs, and what kind of optimizer makes it: the reader's affair.
READERS_OWN = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


class Kept(NamedTuple):
    """What is kept of an object, by name: tensors, of which other ranks may have other parts, and other values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Part(Protocol):
    """One of the objects that a checkpoint is of."""

    numbers_are_read: bool
    """Where a state is a number of Python's, it is read as tensors are, and not only handed to `take`."""

    def kept(self) -> Kept:
        """What to write."""

    def wanted(self, entries: dict[str, Entry], values: dict[str, Any]) -> dict[str, Any]:
        """What to read into, by names in the checkpoint. ValueError where that doesn't fit."""

    def take(self, read: dict[str, Any], values: dict[str, Any]) -> None:
        """Be what has been read."""


class ModelPart:
    """Parameters, persistent buffers and extra states. DTensors are kept by shards."""

    numbers_are_read = False

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise TypeError("the model is of FullyShardedDataParallel, which flattens its parameters: use fully_shard")
        self._model = unwrapped(model)
        if not any(True for _ in chain(self._model.parameters(), self._model.buffers())):
            raise ValueError("the model has neither parameters nor buffers")
        state = get_model_state_dict(self._model)
        self._tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        for name, tensor in self._tensors.items():
            check_dense(f"{name!r} of the model", tensor)

    def kept(self) -> Kept:
        for name, tensor in self._tensors.items():
            check_plain(f"{name!r} of the model", tensor)
        return Kept(self._tensors, self._values)

    def wanted(self, entries: dict[str, Entry], values: dict[str, Any]) -> dict[str, Tensor]:
        compare_names("model", {*self._tensors, *self._values}, {*entries, *values})
        for name, tensor in self._tensors.items():
            if name not in entries:
                raise ValueError(f"{name!r} is a tensor of the model, and none in the checkpoint")
            check_fits(f"{name!r} of the model", tensor, entries[name])
        return self._tensors

    def take(self, read: dict[str, Any], values: dict[str, Any]) -> None:
        set_model_state_dict(self._model, {**read, **values})


class OptimizerPart:
    """Any of torch's optimizers, of parameters that are whole or DTensors."""

    numbers_are_read = False

    def __init__(self, optimizer: Optimizer, names: dict[Tensor, str]) -> None:
        # By its name: importing it, which few programs do, takes long and warns.
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise TypeError(
                "the optimizer is a ZeroRedundancyOptimizer, whose ranks have different states under the same names: "
                "use ShardedOptimizer"
            )
        self._optimizer = optimizer
        self._params: dict[str, Tensor] = {}
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param not in names:
                    raise ValueError(
                        f"parameter {place} of the optimizer's group {number}, of shape {tuple(param.shape)}, is not "
                        "in the model"
                    )
                self._params[names[param]] = param
        self._names = {param: name for name, param in self._params.items()}

    def kept(self) -> Kept:
        state_dict = self._optimizer.state_dict()
        if not {"state", "param_groups"} <= state_dict.keys():
            raise TypeError(
                f"the state dict of {type(self._optimizer).__name__} has {', '.join(map(repr, state_dict)):.200}, not "
                "torch's 'state' and 'param_groups': of several optimizers in one, save each apart, with its own model"
            )
        kept = Kept({}, {})
        for name, state in zip(self._params, self._in_order(state_dict), strict=True):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    check_dense(f"{key!r} of {name!r}", value)
                    check_plain(f"{key!r} of {name!r}", value)
                self._check_whole(name, key, value)
                (kept.tensors if isinstance(value, Tensor) else kept.values)[f"state.{name}.{key}"] = value
        for group, saved in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            for param in group["params"]:
                kept.values.update({f"param_groups.{self._names[param]}.{key}": options[key] for key in options})
        kept.values[GROUPS] = self._groups()
        return kept

    def wanted(self, entries: dict[str, Entry], values: dict[str, Any]) -> dict[str, Tensor]:
        compare_names("optimizer", {*self._params}, owners("param_groups", values))
        compare_names("optimizer's states", {*self._params}, owners("state", [*entries, *values]), missing=False)
        self._check_kind([*entries, *values], options_of(self._groups(), values))
        parts = {key: split("state", key) for key in entries}
        trained = {name for name, state in parts.values() if state != MASTER}
        return {
            key: self._like(name, state, entries[key])
            for key, (name, state) in parts.items()
            if state != MASTER or (name in trained and self._may_have_master(name))
        }

    def take(self, read: dict[str, Any], values: dict[str, Any]) -> None:
        number_of = {name: number for number, name in enumerate(self._params)}
        states: dict[int, dict[str, Any]] = {}
        for key, value in {**values, **read}.items():
            if key.startswith("state."):
                name, state = split("state", key)
                states.setdefault(number_of[name], {})[state] = value
        names = self._groups()
        groups = [
            {**group, **options, "params": [number_of[name] for name in in_group]}
            for group, options, in_group in zip(
                self._optimizer.param_groups, options_of(names, values), names, strict=True
            )
        ]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _check_kind(self, keys: list[str], options: list[dict[str, Any]]) -> None:
        """ValueError where a parameter has been stepped by an optimizer that keeps other states."""
        saved: dict[str, set[str]] = {}
        for name, state in (split("state", key) for key in keys if key.startswith("state.")):
            saved.setdefault(name, set()).add(state)
        for group, loaded in zip(self._optimizer.param_groups, options, strict=True):
            needed: dict[tuple[int, torch.dtype], set[str]] = {}
            for param in group["params"]:
                name, kind = self._names[param], (param.ndim, param.dtype)
                there = saved.get(name, set()) - {MASTER}
                if there and kind not in needed:
                    needed[kind] = self._needed(group, loaded, param)
                if there and (missing := sorted(needed[kind] - there)):
                    raise ValueError(
                        f"the checkpoint has {', '.join(sorted(there))} of {name!r}, but no {missing[0]}: "
                        "it was written by another kind of optimizer"
                    )

    def _needed(self, group: dict[str, Any], loaded: dict[str, Any], param: Tensor) -> set[str]:
        """The states without which the optimizer can't step a parameter, as far as that can be found out."""
        own = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        for options in (own | loaded, own):  # those of another kind of optimizer may be too strange for a step
            states = first_states(self._optimizer, options, param)
            if states is not None:
                return states - {MASTER}
        return {state for state, value in self._optimizer.state.get(param, {}).items() if value is not None}

    def _in_order(self, state_dict: dict[str, Any]) -> Iterable[dict[str, Any]]:
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        return [state_dict["state"].get(number, {}) for number in numbers]

    def _check_whole(self, name: str, key: str, value: Any) -> None:
        param = self._params[name]
        cut = isinstance(param, DTensor) and any(placement != Replicate() for placement in param.placements)
        if cut and isinstance(value, Tensor) and value.ndim and not isinstance(value, DTensor):
            raise TypeError(
                f"{key!r} of {name!r} is a plain tensor of shape {tuple(value.shape)}, though the parameter is spread "
                "over ranks: nothing says which part of what it is"
            )

    def _may_have_master(self, name: str) -> bool:
        return isinstance(self._optimizer, FusedAdamW) and self._params[name].itemsize < 4

    @property
    def _copies_states(self) -> bool:
        """Its load_state_dict copies into states that it has, which may be of another form."""
        return isinstance(self._optimizer, FusedAdamW)

    def _like(self, name: str, key: str, entry: Entry) -> Tensor:
        param = self._params[name]
        live = self._optimizer.state.get(param, {}).get(key)
        if type(live) is type(param.data) and (live.shape, live.dtype) == entry and not self._copies_states:
            return live
        if key != "step" and entry.shape == param.shape:
            return torch.empty_like(param, dtype=entry.dtype, requires_grad=False)
        return torch.empty(entry.shape, dtype=entry.dtype)  # load_state_dict brings it to its device

    def _groups(self) -> list[list[str]]:
        return [[self._names[param] for param in group["params"]] for group in self._optimizer.param_groups]


class ShardedOptimizerPart:
    """A `ShardedOptimizer`, which knows itself which parts of what its ranks have."""

    numbers_are_read = True

    def __init__(self, optimizer: ShardedOptimizer, names: dict[Tensor, str]) -> None:
        self._optimizer = optimizer
        self._groups: list[list[str]] = [group.get("param_names", []) for group in optimizer.param_groups]
        for name in chain.from_iterable(self._groups):
            if name not in names.values():
                raise ValueError(
                    f"parameter {name!r} of the optimizer has another name in the model, or is not in it: make the "
                    "optimizer with model.named_parameters(), before wrapping the model in anything"
                )

    def kept(self) -> Kept:
        state_dict = self._optimizer.sharded_state_dict()
        tensors = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in state_dict.items() if key not in tensors}
        return Kept(tensors, {**values, GROUPS: self._optimizer.parameter_names()})

    def wanted(self, entries: dict[str, Entry], values: dict[str, Any]) -> dict[str, Any]:
        names = {*chain.from_iterable(self._groups)}
        compare_names("optimizer", names, names & owners("param_groups", values))  # what others step is not ours to say
        options_of(self._groups, values)
        state_dict = self._optimizer.sharded_state_dict()
        return {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}

    def take(self, read: dict[str, Any], values: dict[str, Any]) -> None:
        for group, options in zip(self._optimizer.param_groups, options_of(self._groups, values), strict=True):
            for option, value in options.items():
                group.setdefault(option, value)  # a schedule's, say: only what a group has is loaded
        self._optimizer.load_sharded_state_dict({**values, **read})


def options_by_name(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a checkpoint says of the options of each parameter."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith("param_groups."):
            name, option = split("param_groups", key)
            options.setdefault(name, {})[option] = value
    return options


def options_of(groups: Iterable[list[str]], values: dict[str, Any]) -> list[dict[str, Any]]:
    """What a checkpoint says of groups of parameters. ValueError where parameters of one group differ in that."""
    options = {
        name: {option: value for option, value in options.items() if option not in READERS_OWN}
        for name, options in options_by_name(values).items()
    }
    found = []
    for number, names in enumerate(groups):
        of_group = [options.get(name, {}) for name in names]
        for name, other in zip(names, of_group, strict=True):
            if to_text(other) != to_text(of_group[0]):
                keys = [key for key in of_group[0] | other if _text_of(key, other) != _text_of(key, of_group[0])]
                one, two = (", ".join(f"{key} {options.get(key)}" for key in keys) for options in (of_group[0], other))
                raise ValueError(
                    f"{names[0]!r} and {name!r} are in group {number} of the optimizer, but have different options in "
                    f"the checkpoint, {one} and {two}: make groups as they were when it was saved"
                )
        found.append(of_group[0] if of_group else {})
    return found


def check_dense(what: str, tensor: Tensor) -> None:
    """TypeError or ValueError where there are not as many numbers in memory as the tensor has elements."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{what} is sparse or quantized: a checkpoint takes dense tensors")
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device: give the model memory first (to_empty)")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{what} is expanded, many elements in one place: make it a tensor of its own (clone)")


def check_plain(what: str, tensor: Tensor) -> None:
    """TypeError for a subclass of tensors, which readers that run nothing can't make again."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) not in (Tensor, Parameter):
        raise TypeError(
            f"{what} is a {type(local).__module__}.{type(local).__qualname__}: a checkpoint holds plain tensors and "
            "DTensors of these, since it is read without running what is in it. Keep the plain tensors of which it "
            "consists, or what dequantize() makes of it"
        )


def check_fits(what: str, tensor: Tensor, entry: Entry) -> None:
    if tensor.shape != entry.shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}, in the checkpoint {tuple(entry.shape)}")
    if tensor.dtype != entry.dtype and not (tensor.is_floating_point() and entry.dtype.is_floating_point):
        raise ValueError(f"{what} is of {tensor.dtype}, in the checkpoint of {entry.dtype}")


def _text_of(option: str, options: dict[str, Any]) -> str:
    return to_text({option: options.get(option)})
