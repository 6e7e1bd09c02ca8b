"""The parameters that are trained, by name: a model's own, a list, or groups."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Groups = list[dict[str, Any]]
"""As torch's optimizers take them, with (name, parameter) pairs under "params"."""


def groups_of(model: nn.Module, params: Iterable[Any] | None) -> Groups:
    """What `model_parameters` says, checked; None is all that the model trains."""
    if params is None:
        params = [param for param in model.parameters() if param.requires_grad]
        if not params:
            raise ValueError("there is nothing to train: no parameter of the model requires a gradient")
    items = [params] if isinstance(params, Tensor) else list(params)
    if not items:
        raise ValueError("model_parameters is empty (a generator that was used up before?)")
    groups: list[Any] = items if isinstance(items[0], dict) else [{"params": items}]
    named = [{**group, "params": _named(model, _params_of(group))} for group in groups]
    return [group for group in named if group["params"]]


def groups_of_optimizer(model: nn.Module, optimizer: Optimizer) -> Groups:
    """The groups of a caller's optimizer, with all their options. Its own lists are emptied: it is taken over."""
    groups = [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": list(group["params"])}
        for group in optimizer.param_groups
    ]
    named = groups_of(model, groups)
    for group in optimizer.param_groups:
        group["params"].clear()
    return named


def convert_(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the model's floating point parameters to that dtype, in place. Buffers stay as they are."""
    for param in model.parameters():
        if param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)


def _params_of(group: Any) -> list[Any]:
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"a parameter group must be a dict with 'params', got {type(group).__name__}")
    params = group["params"]
    return [params] if isinstance(params, Tensor) else list(params)


def _named(model: nn.Module, params: list[Any]) -> list[tuple[str, nn.Parameter]]:
    names = {param: name for name, param in model.named_parameters()}
    pairs = []
    for item in params:
        param = item[1] if isinstance(item, tuple) else item
        if param not in names:
            raise ValueError(
                f"a parameter of shape {tuple(getattr(param, 'shape', ()))} to be trained is not one of the model's; "
                "if the model was moved or converted after the optimizer was made, make it after that"
            )
        pairs.append((names[param], param))
    return pairs
