"""The backend that is always here: `torch._fused_adam(w)_`, and around it what that cannot do on its own."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepstack_fused_adam._definition import update_
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, arithmetic, flat

Tensors = list[Tensor] | tuple[Tensor, ...]


def takes(run: Run, grad_dtype: torch.dtype) -> bool:
    """Whether torch's kernel does this run as it is, in one pass over memory."""
    return {*run.dtypes, grad_dtype} - {None} == {run.dtype}


class TorchStep:
    """A step of runs of equal dtypes on one device. The number of calls does not grow with the number of runs.

    But for what the kernel cannot read (codes, remainders, betas in tensors): that is the definition, run by run.
    """

    def __init__(self, runs: Sequence[Run], grad_dtype: torch.dtype) -> None:
        self._runs = runs
        self._limit = runs[0].batch
        self._one_pass = takes(runs[0], grad_dtype)

    def __call__(self, params: Tensors, grads: Tensors, by: Hyperparameters) -> None:
        if not self._runs[0].floating or not _kernel_reads(by, arithmetic(self._runs[0].dtype)):
            for piece in self._pieces:
                param, grad = self._cut(params, piece), self._cut(grads, piece)
                _through_definition_(piece.run, param, grad, by)
        elif self._one_pass:
            self._whole.step_(params, grads, by)
        else:
            for pieces, batch in self._packed:
                batch.step_(
                    [self._cut(params, piece) for piece in pieces], [self._cut(grads, piece) for piece in pieces], by
                )

    def _cut(self, tensors: Tensors, piece: "_Piece") -> Tensor:
        tensor = tensors[piece.whole]
        if piece.start is None:
            return tensor
        return flat(tensor, self._runs[piece.whole].numel)[piece.start : piece.start + piece.run.numel]

    @cached_property
    def _whole(self) -> "_Batch":
        return _Batch(self._runs, self._runs[0].dtype)

    @cached_property
    def _pieces(self) -> "list[_Piece]":
        """The runs, cut where they are longer than the limit."""
        pieces: list[_Piece] = []
        for index, run in enumerate(self._runs):
            if run.numel <= self._limit:
                pieces.append(_Piece(index, None, run))
            else:
                pieces += [_Piece(index, place * self._limit, part) for place, part in enumerate(run.cut(self._limit))]
        return pieces

    @cached_property
    def _packed(self) -> "list[tuple[list[_Piece], _Batch]]":
        """Those, several of them together as long as they are no longer than the limit."""
        packs: list[list[_Piece]] = []
        room = 0
        for piece in self._pieces:
            if piece.run.numel > room:
                packs.append([])
                room = self._limit
            packs[-1].append(piece)
            room -= piece.run.numel
        wide = arithmetic(self._runs[0].dtype)
        return [(pack, _Batch([piece.run for piece in pack], wide)) for pack in packs]


class _Piece(NamedTuple):
    """All of the run at an index, or what starts at an element of it."""

    whole: int
    start: int | None
    run: Run


class _Batch:
    """Runs for one call of the kernel, which gets what is not in the wide dtype as copies."""

    def __init__(self, runs: Sequence[Run], wide: torch.dtype) -> None:
        self._wide = wide
        self._masters = [run.states.master for run in runs if run.states.master is not None]
        self._moments = [
            [run.states.exp_avg for run in runs],
            [run.states.exp_avg_sq for run in runs],
            [run.states.max_exp_avg_sq for run in runs if run.states.max_exp_avg_sq is not None],
        ]
        self._counts = [run.step for run in runs]

    def step_(self, params: Tensors, grads: Tensors, by: Hyperparameters) -> None:
        stored = [self._masters or params, *self._moments]
        weights, exp_avgs, exp_avg_sqs, maxima = copies = [_widened(tensors, self._wide) for tensors in stored]
        weight_decay = by.weight_decay
        if isinstance(weight_decay, Tensor):
            _decay_(weights, by, self._wide)
            weight_decay = 0.0
        counts = self._counts
        if not by.bias_correction:
            counts = [torch.full_like(counts[0], torch.inf)] * len(counts)  # 1 - beta^inf is 1
        kernel: Any = torch._fused_adamw_ if by.decoupled else torch._fused_adam_
        kernel(
            weights,
            _widened(grads, self._wide),
            exp_avgs,
            exp_avg_sqs,
            maxima,
            counts,
            lr=by.lr if not isinstance(by.lr, Tensor) or by.lr.is_cpu else by.lr.float(),
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
        if self._masters:
            _round_(params, self._masters, by.skip)


def _kernel_reads(by: Hyperparameters, dtype: torch.dtype) -> bool:
    if any(isinstance(number, Tensor) for number in (by.beta1, by.beta2, by.eps)):
        return False
    if isinstance(by.lr, Tensor) and not by.lr.is_cpu and by.lr.dtype == dtype == torch.float64:
        return False  # on a device, it reads fp32
    return by.decoupled or not isinstance(by.weight_decay, Tensor)


def _through_definition_(run: Run, param: Tensor, grad: Tensor, by: Hyperparameters) -> None:
    count = run.step if by.bias_correction else torch.full_like(run.step, torch.inf)
    scalars = by.scalars(arithmetic(run.dtype), run.device)
    update_(flat(param, run.numel), flat(grad, run.numel), run.flat.states, count, scalars, by.decoupled)


def _widened(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    if not tensors or tensors[0].dtype == dtype:
        return tensors
    if tensors[0].dtype == torch.float64:  # gradients, for a narrower parameter
        return [tensor.to(dtype) for tensor in tensors]
    one = torch.ones(1, dtype=dtype, device=tensors[0].device)  # one dim, so that its dtype takes part in promotion
    return torch._foreach_mul(tensors, [one] * len(tensors))


def _round_(params: Tensors, masters: Tensors, skip: Tensor | None) -> None:
    """The parameters become their masters, rounded; or stay what they are."""
    if skip is None:
        torch._foreach_copy_(params, masters)
        return
    # A select with what there is for lists: of the parameter and the master, one is lowered to -inf.
    keep = torch.where(skip != 0, torch.inf, -torch.inf).reshape(1)
    kept = torch._foreach_minimum(_widened(params, torch.float32), [keep] * len(params))
    moved = torch._foreach_minimum(masters, [-keep] * len(params))
    torch._foreach_copy_(params, torch._foreach_maximum(kept, moved))


def _decay_(weights: Tensors, by: Hyperparameters, dtype: torch.dtype) -> None:
    scalars = by.scalars(dtype, weights[0].device)
    factor = 1 - scalars.lr * scalars.weight_decay
    if by.skip is not None:
        factor = torch.where(by.skip != 0, torch.ones_like(factor), factor)
    torch._foreach_mul_(weights, factor)
