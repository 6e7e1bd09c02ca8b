"""Which of a checkpoint is read into which states: decided from its metadata, before anything is read."""

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from stepstack_sharded_states._checkpoint import Checkpoint
from stepstack_sharded_states._chunks import Chunks
from stepstack_sharded_states._match import Match, refuse_strangers
from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._named import TensorOfPiece


class ShardedLoadPlanner(DefaultLoadPlanner):
    """The planner with which `torch.distributed.checkpoint.load` fills a `sharded_state_dict()` from what is there.

        state_dict = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
        dcp.load(state_dict, checkpoint_id=folder, planner=ShardedLoadPlanner())
        optimizer.load_sharded_state_dict(state_dict["optimizer"])

    torch's own planner wants every key of the state dict in the checkpoint and takes no notice of others. This one
    compares parameters first: one that is missing or unknown, of another shape, with other states or numbers of another
    kind is an error on all ranks, which names it, and nothing has been read then. It does without master weights
    (they are set to the parameters), without options that another optimizer has not saved, and without the states
    of parameters that had made no step. For the rest of a state dict it is torch's; but it unpickles plain data only.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        self.state_dict = dict(self.state_dict)
        self._values: dict[str, tuple[dict[str, Any], str]] = {}
        self._strangers: dict[str, set[str]] = {}
        for prefix, checkpoint in _checkpoints_in(self.state_dict).items():
            match = Match(prefix, checkpoint, metadata.state_dict_metadata)
            self._values |= match.into(self.state_dict)
            self._strangers[prefix] = match.strangers()

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan = create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)
        numel: Counter[str] = Counter()
        self._left = Counter(item.dest_index.fqn for item in plan.items)
        for item in plan.items:
            numel[item.dest_index.fqn] += prod(item.lengths)
        for key, value in self.state_dict.items():
            if isinstance(value, Chunks) and numel[key] != sum(box.stop - box.start for box in value.holding.boxes):
                raise ValueError(f"{this_rank()}: the checkpoint has gaps in {key!r}: it was not saved as a whole")
        return replace(plan, planner_data=self._strangers)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator alone, whose exceptions are everybody's."""
        for prefix in {prefix for plan in global_plan for prefix in plan.planner_data}:
            refuse_strangers(plan.planner_data[prefix] for plan in global_plan if prefix in plan.planner_data)
        return super().create_global_plan([replace(plan, planner_data=None) for plan in global_plan])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = read_item.dest_index.fqn
        self._left[key] -= 1
        value = self.state_dict[key]
        if not self._left[key] and isinstance(value, Chunks) and isinstance(value.holding.place, TensorOfPiece):
            value.holding.place.complete()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key, plain = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        if key in self._values:
            values, name = self._values[key]
            values[name] = plain
        if key in self.mappings:
            set_element(self.original_state_dict, self.mappings[key], plain)
        elif not self.flatten_state_dict:
            self.original_state_dict[key] = plain


def _checkpoints_in(entries: Mapping[str, Any]) -> dict[str, Checkpoint]:
    """The optimizers whose states are in a flat state dict, by what their keys begin with."""
    found: dict[str, Checkpoint] = {}
    for key, value in entries.items():
        if isinstance(value, Chunks) and value.holding.origin is not None:
            checkpoint, named, state = value.holding.origin
            found[key.removesuffix(f"state.{named.member.name}.{state}")] = checkpoint
    return found
