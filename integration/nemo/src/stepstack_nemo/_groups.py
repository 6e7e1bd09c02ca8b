"""Parameter groups as a caller gives them, and what NeMo may have noted on the parameters."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.nn import Parameter

from stepstack_megatron import is_expert

Item: TypeAlias = Parameter | tuple[str, Parameter]


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """A list of groups, each with a list of "params": parameters, or (name, parameter) pairs."""
    items = list(params)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    return [{**group, "params": _listed(group["params"])} for group in groups]


def param_of(item: Item) -> Parameter:
    return item[1] if isinstance(item, tuple) else item


def apart(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group as one or two, since experts have buckets and ranks of their own: the dense parameters, the experts."""
    experts = [item for item in group["params"] if is_expert(param_of(item))]
    dense = [item for item in group["params"] if not is_expert(param_of(item))]
    return [{**group, "params": items} for items in ([dense, experts] if dense and experts else [group["params"]])]


def trained(group: dict[str, Any]) -> list[Parameter]:
    """The parameters of a group that a ShardedOptimizer takes, in its order."""
    return [param for param in map(param_of, group["params"]) if param.requires_grad]


def check_hook_flags(params: Iterable[Parameter], grad_dtype: torch.dtype) -> None:
    """ValueError where NeMo wants a parameter's gradient in fp32 and all are reduced in something else."""
    if grad_dtype is not torch.float32:
        for param in params:
            if getattr(param, "_with_fp32_optimizer", False):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} wants its gradient in float32 (_with_fp32_optimizer), "
                    f"but gradients are reduced in {grad_dtype}, all of them alike: set grad_sync_dtype to float32"
                )


def _listed(params: Any) -> list[Item]:
    return list((params,) if isinstance(params, torch.Tensor) else params)
