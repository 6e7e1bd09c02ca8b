"""A flat buffer of parameters, a flat buffer of their gradients, and who owns which slice."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ._layout import BucketLayout, dense_stride
from ._mesh import Pending, Ranks


@dataclass(eq=False)
class Member:
    """One parameter of a bucket: its gradient's place there, and the piece of both that this rank owns.

    `shard` and `shard_grad` are what callers see: DTensors (1-D, over the mesh) that share memory with the pieces, with
    nothing in them on a rank that owns nothing. `missing_grad` stands for a gradient that is not there.
    """

    name: str
    param: Parameter
    grad: Tensor
    address: int
    interval: tuple[int, int]
    """The piece, in elements of the padded parameter."""
    piece: Parameter | None
    piece_grad: Tensor
    shard: Tensor
    shard_grad: Tensor
    missing_grad: Tensor
    used: bool = False
    """Has a gradient in this step."""
    unreduced: bool = False
    """Its place in the bucket holds a gradient of this rank that no reduction has seen."""


@dataclass(eq=False)
class Bucket:
    """Gradients arrive by `receive`, are reduced by `launch` and `finish`, and parameters go out by `gather`."""

    ranks: Ranks
    grad_divisor: float
    params: Tensor
    grads: Tensor
    param_slice: Tensor
    grad_slice: Tensor
    inner_params: Tensor
    """What the inner optimizer steps: the slice itself, or a master copy, in another dtype or on another device."""
    inner_grads: Tensor
    """Its gradients: the slice itself, or a copy like the master."""
    padding: Tensor
    """Where this rank's slice holds no parameter (indices)."""
    members: list[Member] = field(default_factory=list)
    arrived: set[Member] = field(default_factory=set)
    """Those whose gradient has come in this backward."""
    reduction: Pending | None = None
    """Under way, from its launch to the end of backward."""
    reduced: bool = False
    """The slice holds what earlier backwards of this step have reduced."""
    carried: Tensor | None = None
    """That, set aside while the slice is needed for another backward."""

    def receive(self, member: Member) -> None:
        """Move `param.grad` into the bucket: copy the first of a step, add the later ones."""
        grad = member.param.grad
        assert grad is not None
        if self.reduced:
            self._set_aside()
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if member.unreduced:
            member.grad.add_(grad)
        else:
            member.grad.copy_(grad)
        member.param.grad = None
        member.unreduced = member.used = True

    def launch(self) -> None:
        """Start the reduction. Every rank launches its buckets in the same order."""
        if self.reduced:
            self._set_aside()
        missing = [member.grad for member in self.members if not member.unreduced]
        if len(missing) == len(self.members):
            self.grads.zero_()
        elif missing:
            torch._foreach_zero_(missing)
        self.reduction = self.ranks.reduce_scatter(self.grads, self.grad_slice, self._operation)

    def across_replicas(self) -> Pending:
        """Wait for the reduction inside the shard axis and start the one over the replicate axis."""
        assert self.reduction is not None
        self.reduction.wait()
        return self.ranks.all_reduce(self.grad_slice, self._operation)

    def finish(self) -> None:
        """The reduction is done: add what earlier backwards left and give the pieces their gradients."""
        if self._operation is dist.ReduceOp.SUM and self.grad_divisor != 1:
            self.grad_slice.div_(self.grad_divisor)
        if self.carried is not None:
            self.grad_slice.add_(self.carried)
        if self.padding.numel():  # it stays zero, though callers may multiply a shard by a coefficient that is NaN
            self.grad_slice.index_fill_(0, self.padding, 0)
        self.reduction, self.carried, self.reduced = None, None, True
        self.arrived.clear()
        for member in self.members:
            member.unreduced = False
            if member.used:
                _show(member, member.shard_grad)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients, or set those that are there to zero."""
        if self.reduction is not None:  # of a backward that never came to its end
            self.reduction.wait()
        self.reduction, self.carried, self.reduced = None, None, False
        self.arrived.clear()
        if not set_to_none:
            self.grads.zero_()
        for member in self.members:
            member.param.grad = None
            member.unreduced = member.used = member.used and not set_to_none
            _show(member, None)

    def before_step(self) -> None:
        """Start to give the inner optimizer the gradients, where it wants them elsewhere."""
        if self.inner_grads is not self.grad_slice:
            self.inner_grads.copy_(self.grad_slice, non_blocking=True)

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

    @property
    def _operation(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self.grad_divisor == self.ranks.size else dist.ReduceOp.SUM

    def _set_aside(self) -> None:
        self.carried, self.reduced = self.grad_slice.clone(), False


def build(
    layout: BucketLayout,
    params: Sequence[tuple[str, Parameter]],
    ranks: Ranks,
    *,
    grad_divisor: float,
    grad_dtype: torch.dtype | None,
    inner_dtype: torch.dtype | None,
    inner_device: torch.device | None,
) -> Bucket:
    """Move parameters into a new bucket: each becomes a view of it, with the strides it had.

    All ranks call this; they start with the values of the mesh's first rank.
    """
    like = params[0][1]
    flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
    grads = torch.zeros_like(flat, dtype=grad_dtype)
    padding = torch.ones_like(flat, dtype=torch.bool)
    homes = []
    for start, (_, param) in zip(layout.starts, params, strict=True):
        stride = dense_stride(param.shape, param.stride())
        home = flat.as_strided(param.shape, stride, start)
        home.copy_(param.detach())
        param.data = home
        homes.append(grads.as_strided(param.shape, stride, start))
        padding[start : start + param.numel()] = False
    ranks.broadcast(flat)
    mine = slice(ranks.shard * layout.slice_numel, (ranks.shard + 1) * layout.slice_numel)
    param_slice, grad_slice = flat[mine], grads[mine]
    bucket = Bucket(
        ranks,
        grad_divisor,
        flat,
        grads,
        param_slice,
        grad_slice,
        inner_params=_elsewhere(param_slice, inner_dtype, inner_device),
        inner_grads=_elsewhere(grad_slice, inner_dtype, inner_device),
        padding=padding[mine].nonzero().squeeze(1),
    )
    missing = ranks.sharded(grads[:0], 0)
    for position, (name, param) in enumerate(params):
        bucket.members.append(_member(bucket, layout, position, name, param, homes[position], missing))
    return bucket


def _elsewhere(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """A copy of that dtype on that device, pinned if it is on the CPU and the tensor is not; itself if it is so."""
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if (dtype, device) == (tensor.dtype, tensor.device):
        return tensor
    pinned = device.type == "cpu" and tensor.device.type != "cpu"
    return torch.empty_like(tensor, dtype=dtype, device=device, pin_memory=pinned).copy_(tensor)


def _member(
    bucket: Bucket, layout: BucketLayout, position: int, name: str, param: Parameter, grad: Tensor, missing: Tensor
) -> Member:
    ranks, start, numel = bucket.ranks, layout.starts[position], layout.stops[position] - layout.starts[position]
    first, last = layout.piece(position, ranks.shard)
    mine = slice(first - ranks.shard * layout.slice_numel, last - ranks.shard * layout.slice_numel)
    member = Member(
        name,
        param,
        grad,
        address=param.data_ptr(),
        interval=(first - start, last - start),
        piece=Parameter(bucket.inner_params[mine]) if first < last else None,
        piece_grad=bucket.inner_grads[mine],
        shard=ranks.sharded(bucket.inner_params[mine], numel),
        shard_grad=ranks.sharded(bucket.grad_slice[mine], numel),
        missing_grad=missing,
    )
    for tensor in (member.shard, member.piece):
        if tensor is not None:
            tensor.grad_dtype = None  # any
    _show(member, None)
    return member


def _show(member: Member, grad: Tensor | None) -> None:
    """Let everybody who looks for this parameter's gradient find it, or find that there is none."""
    member.shard.grad = grad
    member.param.grad_shard = member.missing_grad if grad is None else grad  # type: ignore[attr-defined]
    if member.piece is not None:
        member.piece.grad = None if grad is None else member.piece_grad
