"""Names of parameters: without those of wrappers, out of the keys of a checkpoint, and what differs between both."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing


def unwrapped(model: nn.Module) -> nn.Module:
    """What is inside of torch.compile and DistributedDataParallel."""
    while inner := (model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")):
        model = inner
    return model


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter, without those of wrappers."""
    return {param: without_wrappers(name) for name, param in unwrapped(model).named_parameters()}


def without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def owners(kind: str, keys: Iterable[str]) -> set[str]:
    """The parameters that keys such as `state.weight.step` are of."""
    return {split(kind, key)[0] for key in keys if key.startswith(f"{kind}.")}


def split(kind: str, key: str) -> tuple[str, str]:
    """`state.blocks.0.weight.step` is `step` of `blocks.0.weight`."""
    name, _, last = key.removeprefix(f"{kind}.").rpartition(".")
    return name, last


def compare_names(what: str, here: set[str], there: set[str], *, missing: bool = True) -> None:
    """ValueError where the checkpoint has something too many, or too few."""
    differences = []
    if missing and here - there:
        differences.append(f"the {what} has {_listed(here - there)}, which the checkpoint lacks")
    if there - here:
        differences.append(f"the checkpoint has {_listed(there - here)}, which the {what} lacks")
    if differences:
        raise ValueError("; ".join(differences))


def _listed(names: set[str], most: int = 5) -> str:
    listed = ", ".join(map(repr, sorted(names)[:most]))
    return listed + f" and {len(names) - most} more" * (len(names) > most)
