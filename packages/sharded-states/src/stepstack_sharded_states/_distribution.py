"""How parameters are spread: over which ranks, in which buckets, and how those hold what they hold."""

import os
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from stepstack_sharded_states._alike import announced, lines
from stepstack_sharded_states._bucket import Bucket, Member, Storage, build
from stepstack_sharded_states._gradients import Gradients, Reduction, ViewedGradients, WholeGradients
from stepstack_sharded_states._layout import Entry, choose, dense_stride, plan
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._params import Group
from stepstack_sharded_states._slices import Pool, ShardedGradients


@dataclass(frozen=True)
class Plan:
    """Of groups whose parameters are not in buckets yet: what this rank has found out by itself."""

    groups: list[Group]
    reductions: list[Reduction]
    entries: list[Entry]
    """Of their parameters, in order."""
    lines: dict[Ranks, list[str]]
    """What is to be the same on all ranks of each mesh."""

    def options(self, param_groups: Sequence[Mapping[str, Any]]) -> dict[Ranks, list[str]]:
        """Lines again: the options of these groups, the last ones of `param_groups`, as an optimizer completed them."""
        of_meshes: dict[Ranks, list[str]] = {ranks: [] for ranks in self.lines}
        for number, reduction in enumerate(self.reductions):
            group = param_groups[len(param_groups) - len(self.reductions) + number]
            values = {key: value for key, value in group.items() if key != "params"}
            of_meshes[reduction.ranks] += lines(f"group {number}: option", values)
        return of_meshes


@dataclass(eq=False)
class Distribution:
    """The options that say how, and the meshes and pools of buffers that come of them."""

    mesh: DeviceMesh | None
    device: torch.device
    """Of the parameters, or one of them."""
    _: KW_ONLY
    grad_divisor: float | None
    grad_predivisor: float
    grad_dtype: torch.dtype | None
    inner_dtype: torch.dtype | None
    state_device: torch.device | None
    offload_ratio: float
    shard_gradients: bool
    capturable: bool
    bucket_cap_mb: float
    norm_owner: Callable[[str, Parameter], Hashable] | None
    pools: dict[tuple[torch.device, torch.dtype], Pool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "grad_divisor", "grad_predivisor"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ValueError(f"{this_rank()}: {name} must be positive, got {number}")
        if self.shard_gradients and self.capturable:
            raise ValueError(f"{this_rank()}: shard_gradients borrows buffers, capturable wants its own: choose one")
        if not 0 <= self.offload_ratio <= 1:
            raise ValueError(f"{this_rank()}: offload_ratio must be in [0, 1], got {self.offload_ratio}")
        self._ranks = {self.mesh: Ranks(self.mesh, self.device.type)}
        launched = os.environ.get("WORLD_SIZE", "1")  # by torchrun, and what is like it
        if self._ranks[self.mesh].mesh is None and launched != "1":
            warnings.warn(
                f"this process is one of {launched}, says WORLD_SIZE, but there is no process group: it will train by "
                "itself, apart from the others. To train together, call torch.distributed.init_process_group before "
                "the optimizer is made; to train apart, unset WORLD_SIZE",
                stacklevel=4,
            )

    @property
    def main(self) -> Ranks:
        """Those of the optimizer's own mesh."""
        return self._ranks[self.mesh]

    def announced(self) -> AbstractContextManager[None]:
        """What is raised in it is raised on the other ranks of the main mesh too, which `compare` meanwhile."""
        return announced(lambda: (self.main, self.device))

    @property
    def ranks(self) -> Collection[Ranks]:
        """One for each mesh, the optimizer's first, then in the order of the groups that named them."""
        return self._ranks.values()

    def check_ranks(self) -> None:
        """Raise RuntimeError if this process is not alone any more, as it was when the optimizer was made."""
        if self._ranks[self.mesh].mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{this_rank()}: the optimizer was made before torch.distributed.init_process_group, so this process "
                "trains by itself, apart from the others: make the optimizer afterwards"
            )

    def plan(self, groups: list[Group], given: Sequence[str] = ()) -> Plan:
        """How the groups' parameters will be spread, and what ranks compare before: `given`, and what matters here."""
        reductions = [self._reduction(group) for group in groups]
        params = [(number, name, param) for number, group in enumerate(groups) for name, param in group.params]
        entries = [
            Entry(
                param.numel(),
                number,
                self._ownership(name, param),
                kind=(reductions[number], param.device, param.dtype),
                shards=reductions[number].ranks.shards,
                itemsize=self._grad_dtype(param).itemsize,
            )
            for number, name, param in params
        ]
        of_meshes = {ranks: [*lines("option", self._options), *given] for ranks in self.ranks}
        for number, (group, reduction) in enumerate(zip(groups, reductions, strict=True)):
            of_mesh = of_meshes[reduction.ranks]
            of_mesh += [f"group {number}, divided by {reduction.divisor} and before by {reduction.predivisor}"]
            of_mesh += lines(f"group {number}: option", group.options)
        owners = list(dict.fromkeys(entry.owner for entry in entries))
        for entry, (number, name, param) in zip(entries, params, strict=True):
            stride = dense_stride(param.shape, param.stride())
            of_meshes[reductions[number].ranks].append(
                f"parameter {name!r}, {param.dtype}, shape {tuple(param.shape)}, stride {stride}, in group {number}"
                + (f", of owner {owners.index(entry.owner)}" if len(owners) > 1 else "")
            )
        return Plan(groups, reductions, entries, of_meshes)

    @torch.no_grad()
    def buckets_of(self, planned: Plan) -> list[Bucket]:
        """Move the groups' parameters into buckets, and note in each group its members.

        Raises ValueError on all ranks of a mesh if they were given different things, which they would mix up.
        """
        self.compare(planned.lines)
        groups, entries = planned.groups, planned.entries
        params = [(number, name, param) for number, group in enumerate(groups) for name, param in group.params]
        layouts = plan(entries, self.bucket_cap_mb * 2**20)
        offloaded = choose(layouts, self.offload_ratio if self.state_device else 0.0)
        buckets, members = [], dict[int, Member]()
        for layout in layouts:
            reduction = planned.reductions[entries[layout.members[0]].group]
            named = [params[index][1:] for index in layout.members]
            bucket = build(layout, named, reduction, self._storage(named[0][1], reduction, layout in offloaded))
            buckets.append(bucket)
            members |= zip(layout.members, bucket.members, strict=True)
        for index, (number, _, _) in enumerate(params):
            members[index].owner = entries[index].owner
            groups[number].members.append(members[index])
        return buckets

    def compare(self, of_meshes: Mapping[Ranks, list[str]]) -> None:
        """Raise ValueError on all ranks of a mesh if they don't pass the same lines of text."""
        for ranks, of_mesh in of_meshes.items():
            ranks.compare(of_mesh, self.device)

    @property
    def _options(self) -> dict[str, Any]:
        own = ("device", "mesh", "norm_owner", "pools")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own}

    def _reduction(self, group: Group) -> Reduction:
        mesh = group.mesh or self.mesh
        if mesh not in self._ranks:
            self._ranks[mesh] = Ranks(mesh, self.device.type)
        divisor = group.grad_divisor or self.grad_divisor or self._ranks[self.mesh].size
        return Reduction(self._ranks[mesh], divisor, self.grad_predivisor)

    def _ownership(self, name: str, param: Parameter) -> Hashable:
        return None if self.norm_owner is None else self.norm_owner(name, param)

    def _storage(self, like: Tensor, reduction: Reduction, offloaded: bool) -> Storage:
        hold: Callable[..., Gradients] = Gradients
        if self.capturable:
            hold = ViewedGradients
        elif reduction.changes_nothing:
            hold = WholeGradients
        elif self.shard_gradients:
            pool = self.pools.setdefault((like.device, self._grad_dtype(like)), Pool())
            hold = partial(ShardedGradients, pool=pool)
        return Storage(hold, self.grad_dtype, self.inner_dtype, self.state_device if offloaded else None)

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return self.grad_dtype or param.dtype
