"""What a caller may hand to an optimizer, read and checked once."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stepstack_sharded_states._bucket import Member
from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._overlap import overlap

_NOT_OPTIONS = ("params", "param_names", "mesh", "grad_divisor")
_WRAPPERS = (
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)  # torch.compile's and activation checkpointing's part of names


@dataclass(eq=False)
class Group:
    """A parameter group: its options, its trainable parameters by name, and, once in buckets, its members."""

    options: dict[str, Any]
    mesh: DeviceMesh | None
    """Its own; None: the optimizer's."""
    grad_divisor: float | None
    params: list[tuple[str, Parameter]]
    frozen: list[tuple[str, Parameter]]
    named: bool
    """The names are the caller's, not ours."""
    order: list[str]
    """All names, as they were given."""
    members: list[Member] = field(default_factory=list)

    def of_pieces(self) -> dict[str, Any]:
        """This group as the inner optimizer has it."""
        return {**self.options, "params": [member.piece for member in self.members if member.piece is not None]}

    def of_shards(self) -> dict[str, Any]:
        """This group as callers see it."""
        names = {"param_names": [member.name for member in self.members]} if self.named else {}
        return {**self.options, **names, "params": [member.shard for member in self.members]}


def names_in(group: Group) -> list[str]:
    """Those of its parameters, frozen ones too, in the order in which they were given."""
    there = {name for name, _ in group.params + group.frozen}
    return [name for name in group.order if name in there]


def read_groups(params: Iterable[Any]) -> list[Group]:
    """Groups from what torch's optimizers take: parameters, (name, parameter) pairs, or dicts with either in "params".

    Raises TypeError for what is none of these, ValueError where there is nothing to train, or where some have names.
    """
    if isinstance(params, Tensor):
        raise TypeError(f"{this_rank()}: params must be an iterable of parameters or of dicts, got one tensor")
    if isinstance(params, set):
        raise TypeError(f"{this_rank()}: params is a set, whose order changes from run to run: give a list")
    items = list(params)
    if not items:
        raise ValueError(f"{this_rank()}: no parameters: params is empty (a generator that was used up before?)")
    dicts = items if isinstance(items[0], dict) else [{"params": items}]
    groups = [read_group(group, number) for number, group in enumerate(dicts)]
    if not any(group.params for group in groups):
        raise ValueError(
            f"{this_rank()}: no parameters: none of those given has requires_grad=True. A rank that trains nothing is "
            "in no optimizer's mesh; parameters that are to be unfrozen later come by add_param_group then"
        )
    name_alike(groups)
    return groups


def read_group(group: Any, number: int, known: Collection[int] = ()) -> Group:
    """One that is a dict. Those of the `known` parameters, by id, are trainable though they be frozen now."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"{this_rank()}: parameter group {number} must be a dict with 'params', got {type(group)}")
    given = group["params"]
    if isinstance(given, set):
        raise TypeError(f"{this_rank()}: parameter group {number} is a set, whose order changes from run to run")
    items = [given] if isinstance(given, Tensor) else list(given)
    named = [isinstance(item, tuple) for item in items]
    if not any(named) and len(group.get("param_names", ())) == len(items):  # as optimizers have it in `param_groups`
        items, named = list(zip(group.get("param_names", ()), items, strict=True)), [True] * len(items)
    if any(named) and not all(named):
        raise ValueError(f"{this_rank()}: some parameters of group {number} have names: give names to all or to none")
    pairs: list[tuple[str, Any]] = [
        (_without_wrappers(str(item[0])), item[1])
        if isinstance(item, tuple)
        else (f"{position} of group {number}", item)
        for position, item in enumerate(items)
    ]
    for name, param in pairs:
        if not isinstance(param, Tensor):
            raise TypeError(f"{this_rank()}: parameter {name!r} must be a tensor, got {type(param)}")
    return Group(
        options={key: value for key, value in group.items() if key not in _NOT_OPTIONS},
        mesh=group.get("mesh"),
        grad_divisor=group.get("grad_divisor"),
        params=[(name, param) for name, param in pairs if param.requires_grad or id(param) in known],
        frozen=[(name, param) for name, param in pairs if not param.requires_grad and id(param) not in known],
        named=any(named),
        order=[name for name, _ in pairs],
    )


def name_alike(groups: list[Group], before: Sequence[Group] = ()) -> None:
    """Let groups without parameters have names where others have them. ValueError where only some groups have them."""
    for group in (filled := [group for group in (*before, *groups) if group.order]):
        if group.named != filled[0].named:
            raise ValueError(
                f"{this_rank()}: some parameter groups have names and some, with parameter {group.order[0]!r} or "
                f"{filled[0].order[0]!r}, have none: give (name, parameter) pairs in all groups or in none"
            )
    for group in groups:
        group.named = any(other.named for other in (*before, *groups))


def check_mesh(mesh: Any) -> None:
    """Raise TypeError for something else than a DeviceMesh or None."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{this_rank()}: mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; "
            "DeviceMesh.from_group makes one of a process group"
        )


def refuse(groups: list[Group], device_type: str, taken: Collection[Parameter] = ()) -> None:
    """Raise for parameters that can't be sharded, by name: given twice, elsewhere, sharded already, not real, …"""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{this_rank()}: under torch.inference_mode parameters would move to buckets that nothing can train: make "
            "the optimizer, and add groups to it, outside"
        )
    for number, group in enumerate(groups):
        if group.grad_divisor is not None and not group.grad_divisor > 0:
            raise ValueError(f"{this_rank()}: grad_divisor of group {number} must be positive: {group.grad_divisor}")
        check_mesh(group.mesh)
    names: dict[Parameter, str] = dict.fromkeys(taken, "this optimizer")
    for group in groups:
        for name, param in group.params + group.frozen:
            where = f"{this_rank()}: parameter {name!r}"
            if is_lazy(param):
                raise ValueError(f"{where} has no shape yet, its module is lazy: run the model once before")
            if param in names:
                raise ValueError(f"{where} is given twice, it is in {names[param]} too: give each parameter once")
            names[param] = repr(name)
        for name, param in group.params:
            where = f"{this_rank()}: parameter {name!r}"
            if isinstance(param, DTensor):
                raise TypeError(
                    f"{where} is a DTensor, sharded already (by FSDP2, say): give it to the optimizer itself, "
                    "for example FusedAdamW(model.parameters()), whose states are then sharded alike"
                )
            if not param.is_leaf:
                raise ValueError(f"{where} is the result of an operation; only leaf tensors can be trained")
            if param.device.type == "meta":
                raise ValueError(f"{where} is on the meta device: give the model memory and values (to_empty) first")
            if param.device.type != device_type:
                raise ValueError(
                    f"{where} is on {str(param.device)!r}, but the states are to be spread over {device_type!r} "
                    f"devices: move the model there before the optimizer is made, or give another mesh"
                )
            if param.layout is not torch.strided or is_traceable_wrapper_subclass(param):
                kind = param.layout if param.layout is not torch.strided else type(param).__name__
                raise TypeError(
                    f"{where} is a {kind}, which has no flat memory of its own: only plain dense ones are cut"
                )
            if param.device.type == "cpu" and param.untyped_storage().is_shared():
                raise ValueError(
                    f"{where} is in shared memory, which it would leave for its bucket, so that other processes would "
                    "not see it trained: train a copy (copy.deepcopy(model)), and copy its weights to the shared one"
                )
            if param.is_inference():
                raise TypeError(
                    f"{where} was made under torch.inference_mode, so nothing can train it: clone it outside"
                )
            if not param.is_floating_point():
                raise TypeError(f"{where} is {param.dtype}: only real floating point numbers are sharded")
    given = [(name, param) for group in groups for name, param in group.params + group.frozen]
    shared = overlap(given + [("one of this optimizer's", param) for param in taken])
    if shared:
        raise ValueError(
            f"{this_rank()}: parameters {shared[0]!r} and {shared[1]!r} share memory, though they are two, and would "
            "lie apart in the buckets: tie them by using one Parameter twice, or clone one of them"
        )


def check_in_place(groups: list[Group]) -> None:
    """Raise for a parameter that would go on untrained: it has left its bucket, or was unfrozen."""
    for group in groups:
        for member in group.members:
            if member.param.data_ptr() != member.address:
                raise RuntimeError(
                    f"{this_rank()}: parameter {member.name!r} has left its bucket (.to(), a new memory format, "
                    "param.data = …, another ShardedOptimizer): make the optimizer after that, and only one"
                )
        for name, param in group.frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{this_rank()}: parameter {name!r} was frozen when the optimizer was made and so is not in it: "
                    "add it with add_param_group"
                )


def _without_wrappers(name: str) -> str:
    """The name that the parameter has without them, which is the one that torch's state dicts of a model have."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
