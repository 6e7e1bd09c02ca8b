"""What a parameter of a model has in `.grad` when its gradient is cut over ranks: a tensor that says so."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stepstack_sharded_states._mesh import this_rank
from stepstack_sharded_states._norms import norms_of

if TYPE_CHECKING:
    from stepstack_sharded_states._bucket import Member


class ShardedGrad(Tensor):
    """The mean gradient of one parameter, with its shape, of which each rank of the shard axis has some elements.

    - Norms (`norm`, `torch.linalg.vector_norm`, `torch._foreach_norm`) and the reductions `sum`, `mean`, `max`, `min`,
      `any`, `all`, `count_nonzero` over all elements are those of the whole gradient: plain 0-d tensors, the same on
      all ranks. Every rank of the shard axis calls them. The norms of all parameters come with one reduction.
    - Operations that go element by element (`mul_`, `clamp_`, `zero_`, `isfinite`, `a * b`, …) work on what the rank
      has; other operands are numbers, 0-d tensors, tensors of the parameter's shape or the same parameter's gradient.
    - `full_tensor()` gathers the whole. Every rank of the shard axis calls it.

    Everything else raises TypeError. While a part of the gradient waits for its reduction, all but `zero_` raises
    RuntimeError.
    """

    _member: "Member"
    _local: Tensor
    _live: bool
    """`_local` is where the optimizer has the gradient, rather than the result of an operation."""

    @staticmethod
    def __new__(cls, member: "Member", local: Tensor, *, live: bool = False) -> "ShardedGrad":
        grad: ShardedGrad = Tensor._make_wrapper_subclass(
            cls, member.shape, strides=member.stride, dtype=local.dtype, device=local.device
        )
        grad._member, grad._local, grad._live = member, local, live
        return grad

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        grads = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, ShardedGrad)]
        if name in ("detach", "alias"):
            return ShardedGrad(grads[0]._member, grads[0]._local, live=grads[0]._live)
        if name == "detach_":  # after an operation with what requires a gradient
            return args[0]
        if name == "zero_" or name == "_foreach_zero_":
            return _zero_(args[0])
        for grad in grads:
            grad._check_reduced()
        for operation, names in _OPERATIONS.items():
            if name in names:
                return operation(func, *args, **kwargs)
        if name.startswith("_foreach_"):
            return _one_by_one(func, args, kwargs)
        if torch.Tag.pointwise in func.tags or name in _POINTWISE_TOO:
            return _pointwise(func, args, kwargs)
        return _refuse(grads[0], name)

    def is_of(self, member: "Member") -> bool:
        """It is that parameter's gradient, or what operations have made of it."""
        return self._member is member

    def write_to(self, place: Tensor) -> None:
        """Copy the elements that this rank has to where it has a gradient."""
        place.copy_(self._local)

    def full_tensor(self) -> Tensor:
        """The whole gradient, a plain tensor of its own. Every rank of the shard axis calls this."""
        self._check_reduced()
        member, numel = self._member, math.prod(self._member.shape)
        start, stop = member.own_interval
        flat = torch.zeros(numel, dtype=torch.uint8 if self.dtype is torch.bool else self.dtype, device=self.device)
        flat[start:stop] = self._local
        member.ranks.all_reduce_shards(flat, dist.ReduceOp.SUM)
        return flat.to(self.dtype).as_strided(member.shape, member.stride)

    def __repr__(self) -> str:  # type: ignore[override]
        (start, stop), member = self._member.own_interval, self._member
        return (
            f"ShardedGrad(of {member.name!r}, shape={tuple(member.shape)}, dtype={self.dtype}, cut over "
            f"{member.ranks.shards} ranks, of which this one has elements {start} to {stop})"
        )

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:  # `Module.to` and the like do that to `.grad`
        if self._live and (other.dtype, other.device) == (self.dtype, self.device):  # it stays where it is
            with torch.no_grad():
                self.copy_(other)
            return
        if not isinstance(other, ShardedGrad):
            _refuse(self, "data")
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._local, self._live = other._local, other._live

    def share_memory_(self) -> "ShardedGrad":
        return self  # as a gradient on a GPU does

    def numpy(self, **_: Any) -> Any:
        _refuse(self, "numpy")

    def tolist(self) -> Any:
        _refuse(self, "tolist")

    def __array__(self, *_: Any, **__: Any) -> Any:
        _refuse(self, "numpy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(self, "pickle")

    def __deepcopy__(self, memo: Any) -> Any:
        _refuse(self, "deepcopy")

    def _check_reduced(self) -> None:
        if self._live and not self._member.reduced:
            raise RuntimeError(
                f"{this_rank()}: the gradient of parameter {self._member.name!r} is not there yet: a part of it waits "
                "to be averaged over the ranks. If it was accumulated in no_sync(), grad_shards() of the optimizer "
                "averages it, on every rank. If this backward is still running, who looks at it is "
                "DistributedDataParallel around the model, which a ShardedOptimizer does not need, or a post-"
                "accumulate hook: register it before the optimizer is made, and it sees this rank's own gradient"
            )


def _norm(func: Any, grad: Any, order: Any = 2, dim: Any = None, *rest: Any, **options: Any) -> Any:
    if func.overloadpacket.__name__ == "_foreach_norm":
        return [
            _norm_of(one, order, options.get("dtype"))
            if isinstance(one, ShardedGrad)
            else torch.linalg.vector_norm(one, order, **options)
            for one in grad
        ]
    dtype = options.pop("dtype", None)
    if isinstance(dim, torch.dtype):  # norm.ScalarOpt_dtype(grad, p, dtype)
        dim, dtype = None, dim
    if any(rest) or any(options.values()) or not (dim is None or len(dim) in (0, grad.dim())):
        _refuse(grad, "a norm along dims")
    return _norm_of(grad, order, dtype)


def _norm_of(grad: ShardedGrad, order: Any, dtype: torch.dtype | None) -> Tensor:
    order, member = 2.0 if order is None else float(order), grad._member
    if not order >= 0:
        _refuse(grad, f"the {order:g}-norm")
    if grad._live:
        norm = member.norms.of(member, order)
    else:
        (norm,) = norms_of([grad._local], order, member.ranks)
    return norm.to(dtype or grad.dtype, copy=True)


def _sum(func: Any, grad: ShardedGrad, *dims: Any, **options: Any) -> Tensor:
    name = func.overloadpacket.__name__
    _check_all_elements(grad, name, dims, options)
    local = grad._local.count_nonzero() if name == "count_nonzero" else grad._local.sum(dtype=options.get("dtype"))
    grad._member.ranks.all_reduce_shards(local, dist.ReduceOp.SUM)
    return local / math.prod(grad.shape) if name == "mean" else local


def _extreme(func: Any, grad: ShardedGrad, *dims: Any, **options: Any) -> Tensor:
    name = func.overloadpacket.__name__
    _check_all_elements(grad, name, dims, options)
    # In fp64, which holds them all; a minimum is the maximum of the negative, and NaN travels beside, lest it be lost.
    sign = 1 if name in ("max", "amax", "any") else -1
    local = grad._local
    local = (local != 0 if name in ("any", "all") else local).double() * sign
    highest = torch.cat([local, local.new_full((1,), -math.inf)]).max()
    both = torch.stack([highest.masked_fill(highest.isnan(), -math.inf), highest.isnan().double()])
    grad._member.ranks.all_reduce_shards(both, dist.ReduceOp.MAX)
    found = both[0].masked_fill(both[1] > 0, math.nan) * sign
    return found.to(torch.bool if name in ("any", "all") else grad.dtype)


def _unscale_(func: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    sharded = [grad for grad in grads if isinstance(grad, ShardedGrad)]
    for locals_ in ([grad._local for grad in sharded], [g for g in grads if not isinstance(g, ShardedGrad)]):
        if locals_:
            func(locals_, found_inf, inv_scale)
    for ranks in dict.fromkeys(grad._member.ranks for grad in sharded):
        ranks.all_reduce_shards(found_inf, dist.ReduceOp.MAX)
    for grad in sharded:
        grad._member.norms.wrote(grad._member, was_current=False)


def _zero_(grads: Any) -> Any:
    for grad in grads if isinstance(grads, list | tuple) else [grads]:
        if not isinstance(grad, ShardedGrad):
            grad.zero_()
        elif grad._live and not grad._member.reduced:
            grad._member.gradients.zero_one(grad._member)
        else:
            _writing([grad], grad._local.zero_)
    return grads if isinstance(grads, Tensor) else None


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `_foreach_` operation: the n-th tensors of its lists are operands of one operation."""
    lists = [value for value in args if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value)]
    members = [next((v._member for v in nth if isinstance(v, ShardedGrad)), None) for nth in zip(*lists, strict=True)]
    name = func.overloadpacket.__name__

    def local(value: Any) -> Any:
        if not any(value is one for one in lists):
            return value
        return [_local_of(v, m, name) if m else v for v, m in zip(value, members, strict=True)]

    _check_written(func, args, kwargs)
    written = [value for value in args[0] if isinstance(value, ShardedGrad)] if func._schema.is_mutable else []
    results = _writing(written, lambda: func(*map(local, args), **kwargs))
    if results is None:
        return None
    return [ShardedGrad(m, result) if m else result for result, m in zip(results, members, strict=True)]


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads = [value for value in (*args, *kwargs.values()) if isinstance(value, ShardedGrad)]
    member, name = grads[0]._member, func.overloadpacket.__name__
    _check_written(func, args, kwargs)
    kwargs.pop("memory_format", None)  # what a rank has is flat
    here = [_local_of(value, member, name) for value in args]
    there = {key: _local_of(value, member, name) for key, value in kwargs.items()}
    if func._schema.is_mutable:
        target = next(value for value in (*kwargs.values(), *args) if isinstance(value, ShardedGrad))
        if not kwargs.get("out"):
            target = args[0]
        _writing([target], lambda: func(*here, **there))
        return target
    result = func(*here, **there)
    return [ShardedGrad(member, one) for one in result] if isinstance(result, tuple) else ShardedGrad(member, result)


def _writing(grads: list[ShardedGrad], write: Callable[[], Any]) -> Any:
    """Write, and let the norms know whose gradient that was."""
    live = [grad._member for grad in grads if grad._live]
    current = [member.norms.is_current(member) for member in live]
    result = write()
    for member, was_current in zip(live, current, strict=True):
        member.norms.wrote(member, was_current=was_current)
    return result


def _local_of(value: Any, member: "Member", name: str) -> Any:
    """An operand as it is for the elements that this rank has."""
    if isinstance(value, ShardedGrad):
        if value._member is not member:
            _refuse(value, f"{name} with the gradient of {member.name!r}")
        return value._local
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != member.shape or torch._C._current_graph_task_id() != -1:
        _refuse(member.sharded, f"{name} with a tensor of shape {tuple(value.shape)}")
    if value.stride() != member.stride:
        value = value.new_empty_strided(member.shape, member.stride).copy_(value)
    start, stop = member.own_interval
    return value.as_strided((stop - start,), (1,), value.storage_offset() + start)


def _check_all_elements(grad: ShardedGrad, name: str, dims: Iterable[Any], options: dict[str, Any]) -> None:
    some = [dim for dim in dims if not (dim is None or (isinstance(dim, list | tuple) and not dim))]
    if some or any(value for key, value in options.items() if key != "dtype"):
        _refuse(grad, f"{name} along dims")


def _check_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A plain tensor, a parameter say, can't take what this rank has of a gradient."""
    positions, names = _written(func)
    for target in [args[place] for place in positions if place < len(args)] + [kwargs[n] for n in names if n in kwargs]:
        for value in _flat([target]):
            if isinstance(value, Tensor) and not isinstance(value, ShardedGrad):
                grads = [one for one in _flat((*args, *kwargs.values())) if isinstance(one, ShardedGrad)]
                _refuse(grads[0], f"{func.overloadpacket.__name__} into another tensor")


@cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """Which arguments an operation writes to, by place and by name."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    names = [argument.name for argument in func._schema.arguments]
    return [n for n, one in enumerate(written) if one], [n for n, one in zip(names, written, strict=True) if one]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _refuse(grad: Any, what: str) -> NoReturn:
    raise TypeError(
        f"{this_rank()}: {what} is not possible with the gradient of parameter {grad._member.name!r}, which is cut "
        "over the ranks of a ShardedOptimizer. Its norm, sums over all of it, and in-place operations element by "
        "element are. full_tensor() gathers it, on every rank; the optimizer's grad_shards() have this rank's parts. "
        "For another optimizer to train this parameter, call close() of the ShardedOptimizer before"
    )


_POINTWISE_TOO = ("fill_", "copy_", "masked_fill_", "masked_fill", "_to_copy", "zeros_like", "ones_like", "empty_like")
_OPERATIONS: dict[Callable[..., Any], tuple[str, ...]] = {
    _norm: ("linalg_vector_norm", "norm", "_foreach_norm"),
    _sum: ("sum", "mean", "count_nonzero"),
    _extreme: ("max", "min", "amax", "amin", "any", "all"),
    _unscale_: ("_amp_foreach_non_finite_check_and_unscale_",),
}
