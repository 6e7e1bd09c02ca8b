"""One parameter's master weight, gradient or state, whole, to be read or to be set.

For a look now and then: each call is a few small collectives, which wait. Every rank calls them alike.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from stepstack_sharded_states import ShardedOptimizer

_MASTER = "master_weight"
_optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember_(module: nn.Module, optimizer: Optimizer) -> None:
    """Whose the module's parameters are."""
    ours = weakref.ref(optimizer)
    for name, param in module.named_parameters():
        _optimizers[param] = name, ours


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The weight that the optimizer steps, whole and in fp32; None for one that is not trained."""
    place = _place_of(param)
    found = None if place is None else place.whole(place.master())
    return None if found is None else found.float()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Make the weight that the optimizer steps `value`, of the parameter's shape, and the parameter that, rounded.

    RuntimeError before the first step of a model in 16 bits, when its masters are not made yet.
    """
    place = _place_to_set(param, value)
    master = place.master()
    if any(count and dtype != torch.float32 for count, _, dtype in place.pieces(master)[1]):  # on all ranks, or none
        raise RuntimeError(
            "the fp32 weights are made in the first step: call engine.module.load_state_dict(), or set it after that"
        )
    place.set(master, value)
    with torch.no_grad():
        if not isinstance(param, DTensor):
            param.copy_(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient, averaged over the ranks, whole; with the loss scale in it. None where there is none.

    In stages 0 and 1 the ranks reduce what they have accumulated now.
    """
    place = _place_of(param)
    return None if place is None else place.whole(place.grad())


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Make the gradient of the next step `value`, which has the loss scale in it. RuntimeError where there is none."""
    place = _place_to_set(param, value)
    place.set(place.grad(), value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A state such as `exp_avg`, whole; None before the first step, and for one that is not trained."""
    place = _place_of(param)
    return None if place is None else place.whole(place.states().get(optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Make a state such as `exp_avg` `value`. RuntimeError before the first step."""
    place = _place_to_set(param, value)
    place.set(place.states().get(optim_state_key), value)


@dataclass
class _Place:
    """Where a parameter's numbers are: `shard` is what the optimizer's groups list for it."""

    name: str
    param: nn.Parameter
    shard: Tensor
    optimizer: Optimizer

    def states(self) -> dict[str, Any]:
        states: dict[str, Any] = self.optimizer.state.get(self.shard, {})
        return states

    def master(self) -> Tensor | None:
        master: Tensor | None = self.states().get(_MASTER)
        return self.shard if master is None else master

    def grad(self) -> Tensor | None:
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.grad_shards()
        return self.shard.grad

    @torch.no_grad()
    def whole(self, found: Tensor | None) -> Tensor | None:
        """All of it, of which this rank may have a piece: 1-D, in the order of memory."""
        if isinstance(self.param, DTensor):
            if not isinstance(found, DTensor):
                return found
            whole: Tensor = found.to(found.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
            return whole.clone()
        mine, counts = self.pieces(found)
        if all(count is None for count, _, _ in counts):
            return None
        if (number := next((number for _, number, _ in counts if number is not None), None)) is not None:
            return torch.tensor(number)
        dtype = next(dtype for _, _, dtype in counts if dtype is not None)
        flat = torch.zeros(sum(count or 0 for count, _, _ in counts), dtype=dtype, device=self.shard.device)
        start = self._start(counts)
        if mine is not None:
            flat[start : start + mine.numel()] = mine
        group = self._group()
        if group is not None:
            dist.all_reduce(flat, group=group)
        return flat.as_strided(self.param.shape, self.param.stride()).clone()

    @torch.no_grad()
    def set(self, found: Tensor | None, value: Tensor) -> None:
        if isinstance(found, DTensor) and isinstance(self.param, DTensor):
            there = distribute_tensor(
                value.to(found.device, found.dtype), found.device_mesh, found.placements, src_data_rank=None
            )
            found.copy_(there)
            return
        mine, counts = self.pieces(found)
        if all(count is None for count, _, _ in counts):
            raise RuntimeError(f"{self.name!r} has none yet to be set: a gradient is there after backward, "
                               "a state after the first step")  # fmt: skip
        if mine is None:
            return
        flat = mine.new_zeros(sum(count or 0 for count, _, _ in counts))
        flat.as_strided(self.param.shape, self.param.stride()).copy_(value)
        start = self._start(counts)
        mine.copy_(flat[start : start + mine.numel()])

    def pieces(self, found: Tensor | None) -> tuple[Tensor | None, list[tuple[Any, Any, Any]]]:
        """This rank's, and of each rank how many elements, or which number, of which dtype."""
        mine = found.to_local() if isinstance(found, DTensor) else found
        said: tuple[Any, Any, Any] = (None, None, None)
        if mine is not None and mine.dim() == 0:
            said = (0, mine.item(), None)
        elif mine is not None:
            said = (mine.numel(), None, mine.dtype)
        group = self._group()
        if group is None:
            return mine, [said]
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, said, group=group)
        return mine, counts

    def _start(self, counts: list[tuple[Any, Any, Any]]) -> int:
        group = self._group()
        before = 0 if group is None else dist.get_rank(group)
        return sum(count or 0 for count, _, _ in counts[:before])

    def _group(self) -> ProcessGroup | None:
        """The ranks that have the pieces."""
        if not isinstance(self.shard, DTensor):
            return None
        return self.shard.device_mesh.get_group(self.shard.device_mesh.ndim - 1)


def _place_of(param: nn.Parameter) -> _Place | None:
    name, of_optimizer = _optimizers.get(param, (None, None))  # type: ignore[no-untyped-call]
    optimizer = None if of_optimizer is None else of_optimizer()
    if optimizer is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is of no engine: give one of engine.module")
    if not isinstance(optimizer, ShardedOptimizer):
        trained = any(param is one for group in optimizer.param_groups for one in group["params"])
        return _Place(name, param, param, optimizer) if trained else None
    for group in optimizer.param_groups:
        names = group.get("param_names", ())
        if name in names:
            return _Place(name, param, group["params"][list(names).index(name)], optimizer)
    return None


def _place_to_set(param: nn.Parameter, value: Tensor) -> _Place:
    place = _place_of(param)
    if place is None:
        raise ValueError("the parameter is not trained: set it itself")
    if value.shape != param.shape:
        raise ValueError(
            f"value must be of the shape of {place.name!r}, {tuple(param.shape)}, got {tuple(value.shape)}"
        )
    return place
