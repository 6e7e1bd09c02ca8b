"""How parameters are spread: over which ranks, in which buckets, and how those hold what they hold."""

import os
import warnings
from collections.abc import Callable, Collection, Hashable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from stepstack_sharded_states._bucket import Bucket, Member, Storage, build
from stepstack_sharded_states._gradients import Gradients, Reduction, ViewedGradients
from stepstack_sharded_states._layout import Entry, choose, dense_stride, plan
from stepstack_sharded_states._mesh import Ranks, this_rank
from stepstack_sharded_states._params import Group
from stepstack_sharded_states._slices import Pool, ShardedGradients


@dataclass(eq=False)
class Distribution:
    """The options that say how, and the meshes and pools of buffers that come of them."""

    mesh: DeviceMesh | None
    device_type: str
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
        self._ranks = {self.mesh: Ranks(self.mesh, self.device_type)}
        launched = os.environ.get("WORLD_SIZE", "1")  # by torchrun, and what is like it
        if self._ranks[self.mesh].mesh is None and launched != "1":
            warnings.warn(
                f"this process is one of {launched}, says WORLD_SIZE, but there is no process group: it will train by "
                "itself, apart from the others. To train together, call torch.distributed.init_process_group before "
                "the optimizer is made; to train apart, unset WORLD_SIZE",
                stacklevel=4,
            )

    @property
    def ranks(self) -> Collection[Ranks]:
        """One for each mesh, in the order of the groups that named them."""
        return self._ranks.values()

    def check_ranks(self) -> None:
        """Raise RuntimeError if this process is not alone any more, as it was when the optimizer was made."""
        if self._ranks[self.mesh].mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{this_rank()}: the optimizer was made before torch.distributed.init_process_group, so this process "
                "trains by itself, apart from the others: make the optimizer afterwards"
            )

    @torch.no_grad()
    def buckets_of(self, groups: list[Group]) -> list[Bucket]:
        """Move the groups' parameters into buckets, and note in each group its members."""
        reductions = [self._reduction(group) for group in groups]
        params = [(number, name, param) for number, group in enumerate(groups) for name, param in group.params]
        self._compare(groups, reductions)
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
        layouts = plan(entries, self.bucket_cap_mb * 2**20)
        offloaded = choose(layouts, self.offload_ratio if self.state_device else 0.0)
        buckets, members = [], dict[int, Member]()
        for layout in layouts:
            reduction = reductions[entries[layout.members[0]].group]
            named = [params[index][1:] for index in layout.members]
            bucket = build(layout, named, reduction, self._storage(named[0][1], layout in offloaded))
            buckets.append(bucket)
            members |= zip(layout.members, bucket.members, strict=True)
        for index, (number, _, _) in enumerate(params):
            members[index].owner = entries[index].owner
            groups[number].members.append(members[index])
        return buckets

    def _compare(self, groups: list[Group], reductions: list[Reduction]) -> None:
        """Raise ValueError on all ranks of a mesh if they were given different things, which they would mix up."""
        options = (self.grad_dtype, self.inner_dtype, self.shard_gradients, self.capturable, self.bucket_cap_mb)
        lines: dict[Ranks, list[str]] = {}
        for number, (group, reduction) in enumerate(zip(groups, reductions, strict=True)):
            of_mesh = lines.setdefault(reduction.ranks, [f"options {options}"])
            of_mesh += [f"group {number}, divided by {reduction.divisor} and before by {reduction.predivisor}"]
            for name, param in group.params:
                stride = dense_stride(param.shape, param.stride())
                of_mesh += [f"parameter {name!r}, {param.dtype}, shape {tuple(param.shape)}, stride {stride}"]
        for ranks, of_mesh in lines.items():
            ranks.compare(of_mesh, groups[0].params[0][1].device)

    def _reduction(self, group: Group) -> Reduction:
        mesh = group.mesh or self.mesh
        if mesh not in self._ranks:
            self._ranks[mesh] = Ranks(mesh, self.device_type)
        divisor = group.grad_divisor or self.grad_divisor or self._ranks[self.mesh].size
        return Reduction(self._ranks[mesh], divisor, self.grad_predivisor)

    def _ownership(self, name: str, param: Parameter) -> Hashable:
        return None if self.norm_owner is None else self.norm_owner(name, param)

    def _storage(self, like: Tensor, offloaded: bool) -> Storage:
        hold: Callable[..., Gradients] = ViewedGradients if self.capturable else Gradients
        if self.shard_gradients:
            pool = self.pools.setdefault((like.device, self._grad_dtype(like)), Pool())
            hold = partial(ShardedGradients, pool=pool)
        return Storage(hold, self.grad_dtype, self.inner_dtype, self.state_device if offloaded else None)

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return self.grad_dtype or param.dtype
