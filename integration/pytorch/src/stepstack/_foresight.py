"""Which states an optimizer will have of a parameter, found out without one."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from stepstack_fused_adam import FusedAdamW


def first_states(optimizer: Optimizer, options: dict[str, Any], like: Tensor) -> set[str] | None:
    """Their names after a first step with the options of a group, made of zeros. None where that fails.

    An optimizer may want more than a gradient for a step, or have made its states when it was constructed.
    """
    stand_in = Parameter(torch.zeros([1] * like.ndim, dtype=like.dtype, device=like.device))
    stand_in.grad = torch.zeros_like(stand_in)
    probe: Any = object.__new__(type(optimizer))
    groups = [{**options, "params": [stand_in]}]
    try:
        probe.__setstate__({**optimizer.__getstate__(), "state": defaultdict(dict), "param_groups": groups})
        if isinstance(probe, FusedAdamW):
            probe.create_states([stand_in])
        else:
            probe.step()
        state = probe.state_dict()["state"].get(0, {})
    except Exception:  # whatever somebody else's step may raise
        return None
    return {name for name, value in state.items() if value is not None}
