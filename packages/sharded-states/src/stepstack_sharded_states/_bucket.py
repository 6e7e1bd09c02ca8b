"""A flat buffer of parameters, a flat buffer of their gradients, and who owns which slice."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from stepstack_sharded_states._collectives import Pending
from stepstack_sharded_states._gradients import Gradients, Reduction
from stepstack_sharded_states._layout import BucketLayout, dense_stride
from stepstack_sharded_states._listed import listed
from stepstack_sharded_states._mesh import Ranks
from stepstack_sharded_states._norms import Norms
from stepstack_sharded_states._owners import release
from stepstack_sharded_states._sharded_grad import ShardedGrad

_OURS = ("grad_shard", "current_grad_shard", "__getstate__")
"""What a parameter has as attributes while an optimizer has it."""


@dataclass(eq=False)
class Member:
    """One parameter of a bucket: its place there, and the piece of it that this rank owns.

    `shard` and `shard_grad` are what callers see: DTensors (1-D, over the mesh) that share memory with the pieces, with
    nothing in them on a rank that owns nothing. `missing_grad` stands for a gradient that is not there. What callers
    see in the parameter's `.grad` is `whole` or `sharded`.
    """

    name: str
    param: Parameter
    ranks: Ranks
    gradients: Gradients
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    address: int
    interval: tuple[int, int]
    """The piece, in elements of the padded parameter."""
    part: slice
    """Where the piece is in this rank's slice of the bucket."""
    piece: Parameter | None
    piece_grad: Tensor
    shard: Tensor
    shard_grad: Tensor
    missing_grad: Tensor
    whole: Tensor | None
    """The whole gradient, where it is in memory here when it is reduced: a view."""
    owner: Hashable = None
    """Of its norm."""
    group: int | None = 0
    """The parameter group that lists it; None: it was taken out of all of them."""
    used: bool = False
    """Has a gradient in this step."""
    unreduced: bool = False
    """Its place in the bucket holds a gradient of this rank that no reduction has seen."""
    reduced: bool = False
    """The slice holds the mean, which callers may look at."""
    displayed: bool = False
    """`.grad` was given `whole` or `sharded`, and if it is None now, that is the caller's doing."""
    shard_version: int = 0
    """That `shard` had when all ranks last had what is in it."""
    version: int = 0
    """That `whole` had after the reduction."""
    norms: Norms = field(init=False)
    """Of the optimizer's gradients."""

    def __post_init__(self) -> None:
        numel = self.param.numel()
        first, last = (max(0, min(end, numel)) for end in self.interval)  # a rank without a piece may be before it
        self.own_interval = first, last
        """The piece, without padding."""
        self._whole_address = None if self.whole is None else self.whole.data_ptr()
        held = self.gradients.slice[self.part]
        self.own_grad = held[: last - first]
        self.sharded = ShardedGrad(self, self.own_grad, live=True)
        self._grad_dtype = self.param.grad_dtype
        if self._grad_dtype not in (None, held.dtype):
            self.param.grad_dtype = None  # any

    def place_in(self, flat: Tensor) -> Tensor:
        """Its part of a buffer of the bucket's size, as the parameter lies in its own."""
        return flat.as_strided(self.shape, self.stride, self.start)

    @property
    def in_place(self) -> bool:
        """The parameter is where the optimizer has put it."""
        return self.param.data_ptr() == self.address

    @property
    def forgotten(self) -> bool:
        """The caller has set `.grad` to None."""
        return self.displayed and self.param.grad is None

    def is_new(self) -> bool:
        """Whether `.grad` holds something that does not come from here."""
        grad = self.param.grad
        if grad is None or grad is self.sharded:
            return False
        return grad is not self.whole or self._whole_has_left

    @property
    def _whole_has_left(self) -> bool:
        """The caller has given `whole` other memory (`p.grad.data = …`)."""
        return self.whole is not None and self.whole.data_ptr() != self._whole_address

    def renew_whole(self) -> None:
        """Let `whole` be a view of the buffer again, if it is none any more."""
        if self._whole_has_left:
            self.whole = self.gradients.whole(self.shape, self.stride, self.start)

    @property
    def regrouped(self) -> bool:
        """The caller has put something in the place of the gradient of what `param_groups` has."""
        return self.shard.grad is not (self.shard_grad if self.reduced else None) and self.group is not None

    @property
    def has_grad(self) -> bool:
        """As the caller of torch's optimizers would see it."""
        if self.param.grad is None:
            return self.used and not self.displayed
        return self.used or self.is_new()

    @property
    def whole_version(self) -> int:
        assert self.whole is not None
        return self.whole._version

    def display(self, *, reduced: bool) -> None:
        """Let `.grad` be the gradient, or say that it is not reduced yet."""
        shown = self.whole if reduced and self.whole is not None else self.sharded
        if self.param.grad is not shown:
            self.param.grad = shown
        self.displayed = True

    def take_away(self) -> None:
        """Let `.grad` be None, if it is not the caller's own."""
        grad = self.param.grad
        if grad is not None and not self.is_new():
            self.param.grad = None
            if grad.requires_grad:  # the caller's in-place operation with a parameter, say
                grad.detach_()
        if self.param.grad is None:
            self.displayed = False

    @property
    def shown_grad(self) -> Tensor:
        """Its gradient as callers see it, empty where there is none."""
        return self.missing_grad if self.shard.grad is None else self.shard.grad

    def leave(self) -> None:
        """No group lists it any more: its gradient is not taken in, and stays where autograd leaves it."""
        self.group, self.used, self.unreduced = None, False, False
        self.show(None)
        self.take_away()

    def hide(self) -> None:
        """Let nobody look for this parameter's gradient here any more."""
        shown = getattr(self.param, "grad_shard", None)
        if shown is self.shard_grad or shown is self.missing_grad:
            for name in _OURS:
                delattr(self.param, name)
        if self.gradients.spent or not self.gradients.replaceable:
            self.take_away()
        if self.param.grad is None and self.param.grad_dtype is None:
            self.param.grad_dtype = self._grad_dtype

    def show(self, grad: Tensor | None) -> None:
        """Let everybody who looks for this parameter's gradient find it, or find that there is none."""
        self.reduced = grad is not None
        self.shard.grad = grad
        self.param.grad_shard = self.missing_grad if grad is None else grad  # type: ignore[attr-defined]
        if self.piece is not None:
            self.piece.grad = None if grad is None else self.piece_grad
        if grad is not None and not self.is_new():
            self.display(reduced=True)


@dataclass(eq=False)
class Bucket:
    """Gradients arrive by `receive`, are reduced from `launch` to `finish`, and parameters go out by `gather`."""

    ranks: Ranks
    params: Tensor
    param_slice: Tensor
    gradients: Gradients
    inner_params: Tensor
    """What the inner optimizer steps: the slice itself, or a master copy, in another dtype or on another device."""
    inner_grads: Tensor
    """Its gradients: the slice itself, or a copy like the master."""
    members: list[Member] = field(default_factory=list)
    arrived: set[Member] = field(default_factory=set)
    """Those whose gradient has come in this backward."""
    launched: bool = False
    """In this backward."""
    shown: bool = False
    """Callers see the gradients."""
    followed: bool = False
    """In this backward, what callers have made of them."""

    def receive(self, member: Member) -> None:
        """Take in a gradient that is new in `member.param.grad`."""
        self.gradients.receive(member)
        member.unreduced = member.used = True
        if self.gradients.replaceable and not member.reduced:  # it is whole at once
            member.show(member.shard_grad)
        if self.shown and self.gradients.set_aside:  # the slice holds no mean until the next reduction
            self._hide()

    def launch(self) -> None:
        """Start the reduction. Every rank launches its buckets in the same order."""
        self.launched = True
        self.gradients.launch(self.members)

    def finish(self) -> None:
        """The reduction is over: give the pieces their gradients."""
        self.arrived.clear()
        self.launched = self.followed = False
        for member in self.members:
            member.unreduced = False
        forgotten = [member for member in self.members if member.used and member.forgotten]
        if forgotten:  # by a hook, in the middle of backward
            self.gradients.forget(forgotten)
        self._show()
        self.gradients.settled(self.members)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients, or set those that are there to zero."""
        self.arrived.clear()
        self.launched = self.followed = False
        self.gradients.zero(self.members, set_to_none=set_to_none)
        self._show()

    def forget(self, members: Sequence[Member]) -> None:
        """Forget the gradients of some."""
        if not self.launched and all(member.param.grad is None for member in self.members):
            self.zero_grad(set_to_none=True)
        else:
            self.gradients.forget(members)

    def before_step(self) -> None:
        """Start to give the inner optimizer the gradients, where it wants them elsewhere."""
        if self.inner_grads is not self.gradients.slice:
            self.inner_grads.copy_(self.gradients.slice, non_blocking=True)

    def after_step(self) -> None:
        """Start to round the master copy to the parameters."""
        if self.inner_params is not self.param_slice:
            self.param_slice.copy_(self.inner_params, non_blocking=True)

    def refresh(self) -> None:
        """Take the parameters' values as the master copy's."""
        if self.inner_params is not self.param_slice:
            self.inner_params.copy_(self.param_slice)

    def gather(self) -> Pending:
        """Start to give every rank of the shard axis all slices of the parameters."""
        return self.ranks.all_gather(self.params, self.param_slice)

    def _show(self) -> None:
        """Let callers find what is reduced."""
        self.shown = True
        for member in self.members:
            if not (self.gradients.replaceable and member.reduced and member.used):
                member.show(member.shard_grad if member.used and not member.unreduced else None)

    def _hide(self) -> None:
        self.shown = False
        for member in self.members:
            member.show(None)
            if member.used and not (self.gradients.keeps_views or member.forgotten or member.is_new()):
                member.display(reduced=False)


@dataclass(frozen=True)
class Storage:
    """How buckets hold what they hold."""

    hold_gradients: Callable[..., Gradients]
    """A class of `Gradients`."""
    grad_dtype: torch.dtype | None
    inner_dtype: torch.dtype | None
    inner_device: torch.device | None


def build(
    layout: BucketLayout, params: Sequence[tuple[str, Parameter]], reduction: Reduction, storage: Storage
) -> Bucket:
    """Move parameters into a new bucket: each lies in its memory, in a storage of its own, with the strides it had.

    All ranks call this; they start with the values of the mesh's first rank.
    """
    ranks, like = reduction.ranks, params[0][1]
    for name, param in params:
        release(name, param)
    flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
    padding = torch.ones_like(flat, dtype=torch.bool)
    for start, (_, param) in zip(layout.starts, params, strict=True):
        place = _own_storage(flat[start : start + param.numel()])
        home = place.as_strided(param.shape, dense_stride(param.shape, param.stride()))
        home.copy_(param.detach())
        param.data = home
        padding[start : start + param.numel()] = False
    ranks.broadcast(flat)
    if ranks.size > 1:  # a graph made before has other values than those that it would find now
        increment_version([param for _, param in params])
    mine = slice(ranks.shard * layout.slice_numel, (ranks.shard + 1) * layout.slice_numel)
    param_slice = flat[mine]
    gradients = storage.hold_gradients(
        reduction, flat, storage.grad_dtype or flat.dtype, mine, padding[mine].nonzero().squeeze(1)
    )
    bucket = Bucket(
        ranks,
        flat,
        param_slice,
        gradients,
        inner_params=_elsewhere(param_slice, storage.inner_dtype, storage.inner_device),
        inner_grads=_elsewhere(gradients.slice, storage.inner_dtype, storage.inner_device),
    )
    missing = ranks.sharded(gradients.slice[:0], 0)
    for position, (name, param) in enumerate(params):
        bucket.members.append(_member(bucket, layout, position, name, param, missing))
    for member in bucket.members:
        member.show(None)
    gradients.start(bucket.members)
    return bucket


def _own_storage(part: Tensor) -> Tensor:
    """A stretch of a buffer as a storage of its own over the same memory, which stays as long as either does.

    Whoever tells tensors apart by their storages (safetensors), or takes a tensor's whole storage (torch.save), sees
    parameters as they were, not one large buffer.
    """
    if not part.numel():
        return torch.empty_like(part)
    if part.device.type in ("cpu", "cuda", "xpu"):
        return torch.from_dlpack(part)  # type: ignore[attr-defined]
    return part  # where DLPack does not reach


def _elsewhere(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """A copy of that dtype on that device, pinned if it is on the CPU and the tensor is not; itself if it is so."""
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if (dtype, device) == (tensor.dtype, tensor.device):
        return tensor
    pinned = device.type == "cpu" and tensor.device.type != "cpu"
    return torch.empty_like(tensor, dtype=dtype, device=device, pin_memory=pinned).copy_(tensor)


def _member(
    bucket: Bucket, layout: BucketLayout, position: int, name: str, param: Parameter, missing: Tensor
) -> Member:
    ranks, start, numel = bucket.ranks, layout.starts[position], layout.stops[position] - layout.starts[position]
    first, last = layout.piece(position, ranks.shard)
    mine = slice(first - ranks.shard * layout.slice_numel, last - ranks.shard * layout.slice_numel)
    member = Member(
        name,
        param,
        ranks,
        bucket.gradients,
        start,
        param.shape,
        param.stride(),
        address=param.data_ptr(),
        interval=(first - start, last - start),
        part=mine,
        piece=Parameter(bucket.inner_params[mine]) if first < last else None,
        piece_grad=bucket.inner_grads[mine],
        shard=listed(ranks.sharded(bucket.inner_params[mine], numel), param),
        shard_grad=ranks.sharded(bucket.gradients.slice[mine], numel),
        missing_grad=missing,
        whole=bucket.gradients.whole(param.shape, param.stride(), start),
    )
    for tensor in (member.shard, member.piece):
        if tensor is not None:
            tensor.grad_dtype = None  # any
    param.__getstate__ = _attributes(weakref.ref(param))  # type: ignore[attr-defined]
    return member


def _attributes(param: "weakref.ref[Parameter]") -> Callable[[], dict[str, Any]]:
    """What pickle takes of a parameter beside its values: all but its gradient, which belongs to the optimizer."""

    def attributes() -> dict[str, Any]:
        return {name: value for name, value in vars(param()).items() if name not in _OURS}

    return attributes
