"""The backend that is always here: `torch._fused_adam(w)_`, and around it what that cannot do on its own."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stepstack_fused_adam._definition import update_
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, arithmetic, flat

# Elements whose wide copies exist at a time: a CPU keeps so many in its caches, a GPU wants long kernels.
_BATCH = {"cpu": 2**20}
_LONG_BATCH = 2**25


def takes(run: Run, grad_dtype: torch.dtype) -> bool:
    """Whether torch's kernel does this run as it is, in one pass over memory."""
    return run.master is None and {*run.dtypes, grad_dtype} == {run.param.dtype}


def step_(runs: Sequence[Run], grads: Sequence[Tensor], by: Hyperparameters) -> None:
    """One step of runs on one device; the number of calls does not grow with the number of runs.

    Except where betas are tensors, which the kernel does not read: then it is the definition, run by run.
    """
    for members, their_grads in _batches(runs, grads):
        if _kernel_reads(by):
            _through_kernel_(members, their_grads, by)
        else:
            _through_definition_(members, their_grads, by)


def _batches(runs: Sequence[Run], grads: Sequence[Tensor]) -> Iterator[tuple[list[Run], list[Tensor]]]:
    """Runs of equal dtypes; those that need wide copies are cut and packed, so that few copies exist at a time."""
    alike: dict[object, tuple[list[Run], list[Tensor]]] = {}
    for run, grad in zip(runs, grads, strict=True):
        members, their_grads = alike.setdefault((run.param.dtype, run.dtypes, grad.dtype), ([], []))
        members.append(run)
        their_grads.append(grad)
    for members, their_grads in alike.values():
        if takes(members[0], their_grads[0].dtype):
            yield members, their_grads
        else:
            yield from _packed(members, their_grads, _BATCH.get(members[0].param.device.type, _LONG_BATCH))


def _packed(runs: list[Run], grads: list[Tensor], limit: int) -> Iterator[tuple[list[Run], list[Tensor]]]:
    members: list[Run] = []
    their_grads: list[Tensor] = []
    room = limit
    for run, grad in zip(runs, grads, strict=True):
        if run.numel > limit:
            grad = flat(grad, run.numel)
            for place, piece in enumerate(run.cut(limit)):
                yield [piece], [grad[place * limit : (place + 1) * limit]]
            continue
        if run.numel > room:
            yield members, their_grads
            members, their_grads, room = [], [], limit
        members.append(run)
        their_grads.append(grad)
        room -= run.numel
    if members:
        yield members, their_grads


def _kernel_reads(by: Hyperparameters) -> bool:
    if isinstance(by.beta1, Tensor) or isinstance(by.beta2, Tensor):
        return False
    return by.decoupled or not isinstance(by.weight_decay, Tensor)


def _through_kernel_(runs: list[Run], grads: list[Tensor], by: Hyperparameters) -> None:
    first = runs[0]
    wide = first.param.dtype if takes(first, grads[0].dtype) else arithmetic(first.weight.dtype)
    stored = [[run.weight for run in runs], [run.exp_avg for run in runs], [run.exp_avg_sq for run in runs]]
    if first.max_exp_avg_sq is not None:
        stored.append([run.max_exp_avg_sq for run in runs if run.max_exp_avg_sq is not None])
    weights, exp_avgs, exp_avg_sqs, *maxima = copies = [_widened(tensors, wide) for tensors in stored]
    weight_decay = by.weight_decay
    if isinstance(weight_decay, Tensor):
        _decay_(weights, by)
        weight_decay = 0.0
    kernel: Any = torch._fused_adamw_ if by.decoupled else torch._fused_adam_
    kernel(
        weights,
        _widened(grads, wide),
        exp_avgs,
        exp_avg_sqs,
        maxima[0] if maxima else [],
        [run.step for run in runs],
        lr=by.lr,
        beta1=by.beta1,
        beta2=by.beta2,
        weight_decay=weight_decay,
        eps=by.eps,
        amsgrad=bool(maxima),
        maximize=by.maximize,
        grad_scale=by.grad_scale,
        found_inf=by.skip,
    )
    for originals, copied in zip(stored, copies, strict=True):
        if copied is not originals:
            # A skipped step left the copies alone, and narrowing a widened number gives it back.
            torch._foreach_copy_(originals, copied)
    if first.master is not None:
        _round_(runs, by.skip)


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if tensors[0].dtype == dtype:
        return tensors
    one = torch.ones(1, dtype=dtype, device=tensors[0].device)  # one dim, so that its dtype takes part in promotion
    return list(torch._foreach_mul(tensors, [one] * len(tensors)))


def _decay_(weights: list[Tensor], by: Hyperparameters) -> None:
    factor = 1 - by.lr * by.weight_decay
    assert isinstance(factor, Tensor)
    factor = factor.to(weights[0].device, non_blocking=True)
    if by.skip is not None:
        factor = torch.where(by.skip != 0, torch.ones_like(factor), factor)
    torch._foreach_mul_(weights, factor)


def _round_(runs: list[Run], skip: Tensor | None) -> None:
    """The parameters become their masters, rounded; or stay what they are."""
    params, masters = [run.flat.param for run in runs], [run.flat.weight for run in runs]
    if skip is None:
        torch._foreach_copy_(params, masters)
        return
    chosen = torch.where(skip != 0, torch.cat(params), torch.cat(masters).to(params[0].dtype))
    torch._foreach_copy_(params, list(chosen.split_with_sizes([run.numel for run in runs])))


def _through_definition_(runs: list[Run], grads: list[Tensor], by: Hyperparameters) -> None:
    scalars = by.scalars(arithmetic(runs[0].weight.dtype), runs[0].param.device)
    for run, grad in zip(runs, grads, strict=True):
        update_(
            run.param,
            grad,
            run.exp_avg,
            run.exp_avg_sq,
            run.max_exp_avg_sq,
            run.master,
            run.step,
            scalars,
            by.decoupled,
        )
