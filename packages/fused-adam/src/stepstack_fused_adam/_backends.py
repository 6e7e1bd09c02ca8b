"""Which backend takes which run."""

from collections.abc import Callable, Sequence

from torch import Tensor

from stepstack_fused_adam import _compiled, _torch
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._run import Run

Step = Callable[[Sequence[Run], Sequence[Tensor], Hyperparameters], None]

BACKENDS = ("auto", "torch", "compiled")

# In elements. A compilation takes seconds: below the first it is not worth them, below the second the call is not.
_WORTH_COMPILING = 2**24
_WORTH_CALLING = 2**17


def check_backend(backend: str) -> None:
    """Raise ValueError unless it is one of BACKENDS."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")


def assign(backend: str, runs: Sequence[Run], grads: Sequence[Tensor]) -> dict[Step, list[int]]:
    """The indices of the runs, all on one device, that each backend's step takes."""
    if backend == "torch" or not runs:
        return {_torch.step_: list(range(len(runs)))}
    if backend == "compiled":
        return {_compiled.step_: list(range(len(runs)))}
    large = [
        index
        for index, (run, grad) in enumerate(zip(runs, grads, strict=True))
        if run.numel >= _WORTH_CALLING and not _torch.takes(run, grad.dtype)
    ]
    if sum(runs[index].numel for index in large) < _WORTH_COMPILING or _compiled.missing(runs[0].param.device):
        return {_torch.step_: list(range(len(runs)))}
    rest = sorted({*range(len(runs))} - {*large})
    return {_compiled.step_: large, _torch.step_: rest} if rest else {_compiled.step_: large}
