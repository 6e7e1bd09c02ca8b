"""What a checkpoint is of: the objects whose tensors ranks share, and those with a few values of their own."""

from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from stepstack._ranks import CheckpointError, Ranks
from stepstack._states import MASTER, Kept, ModelPart, OptimizerPart, Part, names_of, owners
from stepstack._step import OptimizerStep
from stepstack._storage import Entry, entries_of


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
            self.parts["optimizer"] = OptimizerPart(optimizer, names_of(model))

    def kept(self) -> dict[str, Kept]:
        """What to write of the parts."""
        if len(self.parts) < 2:
            raise TypeError("a checkpoint is of a model and its optimizer: give both")
        return {name: part.kept() for name, part in self.parts.items()}

    def carried_states(self) -> dict[str, Any]:
        """What to write of what is carried along."""
        return {name: thing.state_dict() for name, thing in self._carried.items()}

    def wanted(self, metadata: Metadata, values: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors to read into, and what each is called in the checkpoint. ValueError where something doesn't fit.

        A weight and its master copy stand in for each other: a checkpoint without masters gives the weights for them,
        and the masters are read into weights that can hold more than those which were saved.
        """
        entries = entries_of(metadata)
        sources = {name: name for name in entries}
        for name in owners("param_groups", values["optimizer"]):
            weight, master = f"model.{name}", f"optimizer.state.{name}.{MASTER}"
            sources.setdefault(master, weight)
        tensors: dict[str, Tensor] = {}
        for kind, part in self.parts.items():
            offered = {
                name.removeprefix(f"{kind}."): entries[source]
                for name, source in sources.items()
                if name.startswith(f"{kind}.") and source in entries
            }
            tensors |= {f"{kind}.{name}": tensor for name, tensor in part.wanted(offered, values[kind]).items()}
        for name, tensor in tensors.items():
            master = f"optimizer.state.{name.removeprefix('model.')}.{MASTER}"
            if name.startswith("model.") and master in entries and _holds_more(tensor, entries[name]):
                sources[name] = master
        return tensors, sources

    def take(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """The parts become what has been read."""
        for kind, part in self.parts.items():
            own = {
                name.removeprefix(f"{kind}."): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}.")
            }
            part.take(own, values[kind])

    def take_carried(self, ranks: Ranks, values: dict[str, Any]) -> None:
        """What is carried becomes what was saved, or CheckpointError, and it stays as it is."""
        before = ranks.each(lambda: deepcopy(self.carried_states()))
        try:
            ranks.each(lambda: self._load_carried(values))
        except CheckpointError:
            self._load_carried(before)
            raise

    def _load_carried(self, values: dict[str, Any]) -> None:
        for name, thing in self._carried.items():
            if name not in values:
                raise ValueError(f"the checkpoint was saved without {name}")
            thing.load_state_dict(values[name])


def _holds_more(tensor: Tensor, entry: Entry) -> bool:
    return tensor.is_floating_point() and tensor.itemsize > entry.dtype.itemsize
