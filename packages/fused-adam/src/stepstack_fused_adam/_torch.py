"""The backend that is always here: `torch._fused_adam(w)_`, and around it what that cannot do on its own."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stepstack_fused_adam._definition import update_, weight
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, arithmetic, flat

# Elements whose wide copies exist at a time: a CPU keeps so many in its caches, a GPU wants long kernels.
_BATCH = {"cpu": 2**20}
_LONG_BATCH = 2**25

_Batch = list[tuple[Run, Tensor]]


def takes(run: Run, grad_dtype: torch.dtype) -> bool:
    """Whether torch's kernel does this run as it is, in one pass over memory."""
    return {*run.dtypes, grad_dtype} - {None} == {run.stored.param.dtype}


def step_(runs: Sequence[Run], grads: Sequence[Tensor], by: Hyperparameters) -> None:
    """One step of runs on one device; the number of calls does not grow with the number of runs.

    What the kernel cannot read (codes, remainders, betas in tensors) goes through the definition, run by run.
    """
    alike: dict[object, _Batch] = defaultdict(list)
    for run, grad in zip(runs, grads, strict=True):
        alike[run.dtypes, grad.dtype].append((run, grad))
    for batch in alike.values():
        run, grad = batch[0]
        limit = _BATCH.get(run.device.type, _LONG_BATCH)
        if not run.floating or not _kernel_reads(by):
            for piece in _cut(batch, limit):
                _through_definition_(*piece, by)
        elif takes(run, grad.dtype):
            _through_kernel_(batch, by)
        else:
            for packed in _packed(_cut(batch, limit), limit):
                _through_kernel_(packed, by)


def _kernel_reads(by: Hyperparameters) -> bool:
    if isinstance(by.beta1, Tensor) or isinstance(by.beta2, Tensor):
        return False
    return by.decoupled or not isinstance(by.weight_decay, Tensor)


def _cut(batch: _Batch, limit: int) -> Iterator[tuple[Run, Tensor]]:
    for run, grad in batch:
        if run.numel <= limit:
            yield run, grad
        else:
            yield from zip(
                run.cut(limit), flat(grad, run.numel).split_with_sizes(_parts(run.numel, limit)), strict=True
            )


def _parts(numel: int, limit: int) -> list[int]:
    whole, rest = divmod(numel, limit)
    return [limit] * whole + [rest] * (rest > 0)


def _packed(pieces: Iterator[tuple[Run, Tensor]], limit: int) -> Iterator[_Batch]:
    packed: _Batch = []
    room = limit
    for run, grad in pieces:
        if run.numel > room:
            yield packed
            packed, room = [], limit
        packed.append((run, grad))
        room -= run.numel
    if packed:
        yield packed


def _through_definition_(run: Run, grad: Tensor, by: Hyperparameters) -> None:
    count = run.step if by.bias_correction else torch.full_like(run.step, torch.inf)
    update_(
        run.flat.stored,
        flat(grad, run.numel),
        count,
        by.scalars(arithmetic(run.stored.param.dtype), run.device),
        by.decoupled,
    )


def _through_kernel_(batch: _Batch, by: Hyperparameters) -> None:
    runs, grads = [run for run, _ in batch], [grad for _, grad in batch]
    first = runs[0].stored
    wide = first.param.dtype if takes(runs[0], grads[0].dtype) else arithmetic(first.param.dtype)
    stored = [[weight(run.stored) for run in runs]]
    stored += [[run.stored.exp_avg for run in runs], [run.stored.exp_avg_sq for run in runs]]
    if first.max_exp_avg_sq is not None:
        stored.append([run.stored.max_exp_avg_sq for run in runs if run.stored.max_exp_avg_sq is not None])
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
        _counts(runs, by),
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


def _counts(runs: Sequence[Run], by: Hyperparameters) -> list[Tensor]:
    if by.bias_correction:
        return [run.step for run in runs]
    return [torch.full_like(runs[0].step, torch.inf)] * len(runs)  # 1 - beta^inf is 1


def _decay_(weights: list[Tensor], by: Hyperparameters) -> None:
    factor = 1 - by.lr * by.weight_decay
    assert isinstance(factor, Tensor)
    factor = factor.to(weights[0].device, non_blocking=True)
    if by.skip is not None:
        factor = torch.where(by.skip != 0, torch.ones_like(factor), factor)
    torch._foreach_mul_(weights, factor)


def _round_(runs: Sequence[Run], skip: Tensor | None) -> None:
    """The parameters become their masters, rounded; or stay what they are."""
    params, masters = [run.flat.stored.param for run in runs], [weight(run.flat.stored) for run in runs]
    if skip is None:
        torch._foreach_copy_(params, masters)
        return
    chosen = torch.where(skip != 0, torch.cat(params), torch.cat(masters).to(params[0].dtype))
    torch._foreach_copy_(params, list(chosen.split_with_sizes([run.numel for run in runs])))
