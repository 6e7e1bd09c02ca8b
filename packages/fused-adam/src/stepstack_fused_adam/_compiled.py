"""The backend that runs the definition through `torch.compile`: one pass over memory, in every precision."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from stepstack_fused_adam import _compiler
from stepstack_fused_adam._block8 import BLOCK
from stepstack_fused_adam._compiler import SMALLEST, Case
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run, apart, arithmetic, flat
from stepstack_fused_adam._torch import Tensors, TorchStep

_TOGETHER = 8  # runs in a call, where there are so many: after a long run, the code of a call is in no cache any more


class CompiledStep:
    """A step of runs of equal dtypes on one device. What is small or does not compile goes through torch."""

    def __init__(self, runs: Sequence[Run], grad_dtype: torch.dtype) -> None:
        self._parts = [_parts(run) for run in runs]
        self._runs = list(chain.from_iterable(self._parts))
        self._grad_dtype = grad_dtype
        large = [place for place, run in enumerate(self._runs) if run.numel >= SMALLEST]
        self._small = tuple(place for place, run in enumerate(self._runs) if run.numel < SMALLEST)
        together = 1 if runs[0].coded else _TOGETHER  # with codes, a part is long as it is, and long to compile
        grouped = len(large) - len(large) % together
        self._calls = [tuple(large[start : start + together]) for start in range(0, grouped, together)]
        self._calls += [(place,) for place in large[grouped:]]
        self._through_torch: dict[tuple[int, ...], TorchStep] = {}

    def __call__(self, params: Tensors, grads: Tensors, by: Hyperparameters) -> None:
        params, grads = self._cut(params), self._cut(grads)
        scalars = by.scalars(arithmetic(self._runs[0].dtype), self._runs[0].device)
        never = None if by.bias_correction else torch.full_like(self._runs[0].step, torch.inf)
        left = self._small
        for places in self._calls:
            case = self._case(places, by)
            done = _compiler.is_compiled(case) and _compiler.call(
                case,
                [apart(params[place]) for place in places],
                [apart(grads[place]) for place in places],
                [self._runs[place].apart for place in places],
                [self._runs[place].step if never is None else never for place in places],
                scalars,
            )
            left += () if done else places
        if left:
            if left not in self._through_torch:
                self._through_torch[left] = TorchStep([self._runs[place] for place in left], self._grad_dtype)
            self._through_torch[left]([params[place] for place in left], [grads[place] for place in left], by)

    def compile(self, by: Hyperparameters) -> None:
        """Do now what the first call would wait for."""
        for case in {self._case(places, by): None for places in self._calls}:
            _compiler.is_compiled(case)

    def _case(self, places: tuple[int, ...], by: Hyperparameters) -> Case:
        run = self._runs[0]
        return Case(len(places), run.device, run.dtypes, self._grad_dtype, by.decoupled)

    def _cut(self, tensors: Tensors) -> list[Tensor]:
        """As the runs are cut."""
        cut: list[Tensor] = []
        for tensor, parts in zip(tensors, self._parts, strict=True):
            whole = flat(tensor, sum(part.numel for part in parts))
            cut += [whole] if len(parts) == 1 else whole.split_with_sizes([part.numel for part in parts])
        return cut


def _parts(run: Run) -> list[Run]:
    """All of a run. If it has codes, in whole blocks, not too many since the compiler keeps copies; and the rest."""
    if not run.coded:
        return [run.flat]
    *parts, last = run.cut(run.batch)
    whole = last.numel - last.numel % BLOCK
    return [*parts, *last.cut(whole)] if whole else [*parts, last]
