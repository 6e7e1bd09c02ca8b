"""What a checkpoint is of: the objects whose tensors ranks share, and those with a few values of their own."""

from typing import Any, TypeVar

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepstack._names import names_of, owners
from stepstack._schedule import check_kind
from stepstack._states import MASTER, Kept, ModelPart, OptimizerPart, Part, ShardedOptimizerPart
from stepstack._step import OptimizerStep
from stepstack._storage import Wanted, entries_of
from stepstack_sharded_states import ShardedOptimizer

T = TypeVar("T")


class Contents:
    """The objects that are saved or loaded together; TypeError or ValueError for those that can't be.

    `parts` are the model and the optimizer, whose tensors are spread over ranks. What else there is, is carried along:
    objects with a `state_dict()` of values that fit into JSON.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | OptimizerStep | None,
        scaler: Any,
        scheduler: Any,
    ) -> None:
        self._carried = {"scaler": scaler, "scheduler": scheduler}
        if isinstance(optimizer, OptimizerStep):
            self._carried = {
                "optimizer_step": optimizer,
                "scaler": optimizer.scaler if scaler is None else scaler,
                "scheduler": scheduler,
            }
            optimizer = optimizer.optimizer
        self._carried = {name: thing for name, thing in self._carried.items() if thing is not None}
        for name, thing in self._carried.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"{name} has no state_dict and load_state_dict: it is a {type(thing).__name__}")
        self.parts: dict[str, Part] = {}
        if model is not None:
            if not isinstance(model, nn.Module):
                raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
            self.parts["model"] = ModelPart(model)
        if optimizer is not None:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"optimizer must be a torch optimizer or OptimizerStep, got {type(optimizer).__name__}")
            if model is None:
                raise ValueError("with the optimizer, its model is needed too: a checkpoint goes by the model's names")
            if isinstance(optimizer, ShardedOptimizer):
                self.parts["optimizer"] = ShardedOptimizerPart(optimizer, names_of(model))
            else:
                self.parts["optimizer"] = OptimizerPart(optimizer, names_of(model))

    @property
    def names(self) -> list[str]:
        """What there is."""
        return [*self.parts, *self._carried]

    def kept(self) -> dict[str, Kept]:
        """What to write of the parts."""
        if len(self.parts) < 2:
            raise TypeError("a checkpoint is of a model and its optimizer: give both")
        return {name: part.kept() for name, part in self.parts.items()}

    def carried_states(self) -> dict[str, Any]:
        """What to write of what is carried along."""
        return {name: thing.state_dict() for name, thing in self._carried.items()}

    def wanted(self, metadata: Metadata, values: dict[str, Any]) -> Wanted:
        """What to read. ValueError where the checkpoint doesn't fit.

        A weight and its master copy stand in for each other: a checkpoint without masters gives the weights for them,
        and the masters are read into weights that can hold more than those which were saved.
        """
        entries = entries_of(metadata)
        sources = {name: name for name in entries}
        for name in owners("param_groups", values["optimizer"]):
            if f"model.{name}" in entries:
                sources.setdefault(_master_of(name), f"model.{name}")
        wanted = Wanted({}, sources, {})
        for kind, part in self.parts.items():
            offered = within(kind, {name: entries[source] for name, source in sources.items()})
            read = part.wanted(offered, values[kind])
            wanted.into.update({f"{kind}.{name}": into for name, into in read.items()})
            if part.numbers_are_read:
                numbers = {name: value for name, value in values[kind].items() if name.startswith("state.")}
                wanted.values.update({f"{kind}.{name}": value for name, value in numbers.items()})
        for name, weight in within("model", wanted.into).items():
            if _master_of(name) in entries and weight.itemsize > entries[f"model.{name}"].dtype.itemsize:
                sources[f"model.{name}"] = _master_of(name)
        return wanted

    def take(self, read: dict[str, Any], values: dict[str, Any]) -> None:
        """The parts become what has been read."""
        for kind, part in self.parts.items():
            part.take(within(kind, read), values[kind])

    def carried_over(self, values: dict[str, Any]) -> None:
        """What is carried along becomes what was saved."""
        for name, thing in self._carried.items():
            if name not in values:
                instead = ": give the optimizer that is in it instead" * (name == "optimizer_step")
                raise ValueError(f"the checkpoint was saved without {name}{instead}")
            if isinstance(thing, LRScheduler):
                check_kind(thing, values[name])
            thing.load_state_dict(values[name])


def within(kind: str, names: dict[str, T]) -> dict[str, T]:
    """Those that begin with `kind.`, without that."""
    return {name.removeprefix(f"{kind}."): value for name, value in names.items() if name.startswith(f"{kind}.")}


def _master_of(name: str) -> str:
    return f"optimizer.state.{name}.{MASTER}"
