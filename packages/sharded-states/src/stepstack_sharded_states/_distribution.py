"""How parameters are spread: over which ranks, in which buckets, and how those hold what they hold."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stepstack_sharded_states._bucket import Bucket, Member, Storage, build
from stepstack_sharded_states._gradients import Gradients, Pool, ShardedGradients, ViewedGradients
from stepstack_sharded_states._layout import Entry, choose, plan
from stepstack_sharded_states._mesh import Ranks
from stepstack_sharded_states._params import Group


@dataclass(eq=False)
class Distribution:
    """The options that say how, and the meshes and pools of buffers that come of them."""

    mesh: DeviceMesh | None
    device_type: str
    _: KW_ONLY
    grad_divisor: float | None
    grad_dtype: torch.dtype | None
    inner_dtype: torch.dtype | None
    state_device: torch.device | None
    offload_ratio: float
    shard_gradients: bool
    capturable: bool
    bucket_capacity: float
    pools: dict[tuple[torch.device, torch.dtype], Pool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ranks = {self.mesh: Ranks(self.mesh, self.device_type)}

    @property
    def ranks(self) -> Collection[Ranks]:
        """One for each mesh, in the order of the groups that named them."""
        return self._ranks.values()

    @torch.no_grad()
    def buckets_of(self, groups: list[Group]) -> list[Bucket]:
        """Move the groups' parameters into buckets, and note in each group its members."""
        reductions = [self._reduction(group) for group in groups]
        params = [(number, name, param) for number, group in enumerate(groups) for name, param in group.params]
        entries = [
            Entry(
                param.numel(),
                number,
                kind=(*reductions[number], param.device, param.dtype),
                shards=reductions[number][0].shards,
                itemsize=self._grad_dtype(param).itemsize,
            )
            for number, _, param in params
        ]
        layouts = plan(entries, self.bucket_capacity)
        offloaded = choose(layouts, self.offload_ratio if self.state_device else 0.0)
        buckets, members = [], dict[int, Member]()
        for layout in layouts:
            ranks, grad_divisor = reductions[entries[layout.members[0]].group]
            named = [params[index][1:] for index in layout.members]
            bucket = build(layout, named, ranks, grad_divisor, self._storage(named[0][1], layout in offloaded))
            buckets.append(bucket)
            members |= zip(layout.members, bucket.members, strict=True)
        for index, (number, _, _) in enumerate(params):
            groups[number].members.append(members[index])
        return buckets

    def _reduction(self, group: Group) -> tuple[Ranks, float]:
        """Over which ranks a group's gradients are summed, and what the sum is divided by."""
        mesh = group.mesh or self.mesh
        if mesh not in self._ranks:
            self._ranks[mesh] = Ranks(mesh, self.device_type)
        return self._ranks[mesh], group.grad_divisor or self.grad_divisor or self._ranks[self.mesh].size

    def _storage(self, like: Tensor, offloaded: bool) -> Storage:
        hold: Callable[..., Gradients] = ViewedGradients if self.capturable else Gradients
        if self.shard_gradients:
            pool = self.pools.setdefault((like.device, self._grad_dtype(like)), Pool())
            hold = partial(ShardedGradients, pool=pool)
        return Storage(hold, self.grad_dtype, self.inner_dtype, self.state_device if offloaded else None)

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return self.grad_dtype or param.dtype
