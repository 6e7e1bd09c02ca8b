"""What the inner optimizer is told in a step, and what is done for one that can't be told: torch's two attributes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepstack_sharded_states._bucket import Bucket, Member
from stepstack_sharded_states._mesh import this_rank


def flag_of(optimizer: Optimizer, name: str) -> Tensor | None:
    """`grad_scale` or `found_inf` of an optimizer, 0-d. TypeError or ValueError for what is not a tensor of one."""
    flag = getattr(optimizer, name, None)
    if flag is None:
        return None
    if not isinstance(flag, Tensor):
        hint = "; torch's GradScaler gives 0 if it has seen no gradients: grad_shards() reduces what no_sync() left"
        raise TypeError(
            f"{this_rank()}: {name} must be a tensor of one number, so that none is read; got {flag!r}"
            + (hint if flag == 0 else "")
        )
    if flag.numel() != 1:
        raise ValueError(f"{this_rank()}: {name} must be one number, got a tensor of shape {tuple(flag.shape)}")
    return flag.reshape(())


def step_inner(
    inner: Any,
    members: Iterable[Member],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    skip: Tensor | None,
    arguments: dict[str, Any],
) -> None:
    """A step, unless `skip` says no: what all ranks have made of `found_inf`.

    Raises RuntimeError where nobody but ranks that differ in what has a gradient can have said so, and it is known.
    """
    if getattr(inner, "_step_supports_amp_scaling", False):
        with _told(inner, grad_scale, skip):
            inner.step(**arguments)
    elif skip is None or not skip.item():  # The one wait: this optimizer can't read it on the device.
        _divide(members, grad_scale)
        inner.step(**arguments)
    elif found_inf is None:
        raise RuntimeError(
            f"{this_rank()}: ranks differ in which parameters have a gradient, so none has stepped. With "
            "find_unused_parameters=True a gradient on one rank counts for all"
        )


def wait_for_offloaded(buckets: Sequence[Bucket]) -> None:
    """The inner optimizer reads on one device what another is still writing: the wait that offloading costs."""
    for device in {b.params.device for b in buckets if b.inner_grads.device != b.params.device}:
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Learning rates and the like: whoever changed them last, the loop or the inner optimizer, is followed."""
    for ours, theirs in zip(source, target, strict=True):
        for key in theirs.keys() - ours.keys() - {"params", "param_names"}:
            del theirs[key]
        theirs |= {key: value for key, value in ours.items() if key not in ("params", "param_names")}


@contextmanager
def _told(inner: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """An optimizer that knows the attributes has them."""
    inner.grad_scale, inner.found_inf = None if grad_scale is None else grad_scale.float(), found_inf
    try:
        yield
    finally:
        del inner.grad_scale, inner.found_inf


def _divide(members: Iterable[Member], grad_scale: Tensor | None) -> None:
    """The gradients of one that doesn't."""
    if grad_scale is not None:
        grads: dict[torch.device, list[Tensor]] = {}
        for member in members:
            if member.piece is not None and member.used:
                grads.setdefault(member.piece_grad.device, []).append(member.piece_grad)
        for device, there in grads.items():
            torch._foreach_div_(there, grad_scale.to(device))
