"""The name in NeMo's registry under which a config finds the optimizer, and the one of the strategy beside it."""

import inspect
from dataclasses import field, make_dataclass
from typing import Any

from stepstack_fused_adam import FusedAdam
from stepstack_nemo._optimizer import DistributedFusedAdam

NAME = "stepstack_distributed_fused_adam"
"""In a config: `optim.name`."""

APEXS_NAME = "distributed_fused_adam"

STRATEGY = "stepstack"
"""In a config: `trainer.strategy`."""


def register() -> None:
    """Add `stepstack_distributed_fused_adam` to NeMo's optimizers, and the strategy `stepstack` to Lightning's.

    Importing this package does it, where NeMo is installed; a second time changes nothing. ImportError without NeMo.
    """
    optimizers, params, strategies = _registries()
    from stepstack_nemo.strategy import ShardedStrategy

    optimizers[NAME] = DistributedFusedAdam
    # NeMo looks for `args: {name: auto}` under the optimizer's name, and for other words as they are.
    params[f"{NAME}_params"] = params[f"{DistributedFusedAdam.__name__}_params"] = _arguments(DistributedFusedAdam)
    if STRATEGY not in strategies:
        strategies.register(STRATEGY, ShardedStrategy, description="ddp by sharded optimizers")


def take_over() -> None:
    """Let the names of Apex's optimizers in NeMo's own configs mean ours, Apex or no Apex.

    `distributed_fused_adam` becomes `DistributedFusedAdam`, and `fused_adam` the `FusedAdam` of stepstack_fused_adam
    (for which NeMo itself asks for CUDA). Only models that are made afterwards see it. ImportError without NeMo.
    """
    optimizers, params, _ = _registries()
    for name, optimizer_class in {APEXS_NAME: DistributedFusedAdam, "fused_adam": FusedAdam}.items():
        optimizers[name] = optimizer_class
        params[f"{name}_params"] = _arguments(optimizer_class)


def _registries() -> tuple[dict[str, Any], dict[str, Any], Any]:
    try:
        from lightning.pytorch.strategies import StrategyRegistry  # type: ignore[import-not-found]
        from nemo.core.config.optimizers import AVAILABLE_OPTIMIZER_PARAMS  # type: ignore[import-not-found]
        from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(f"stepstack_nemo adds to NeMo's registries, but NeMo can't be imported: {error}") from error
    return AVAILABLE_OPTIMIZERS, AVAILABLE_OPTIMIZER_PARAMS, StrategyRegistry


def _arguments(optimizer_class: type) -> type:
    """The constructor's arguments as a dataclass of words and numbers, as NeMo has one for each optimizer."""
    arguments = list(inspect.signature(optimizer_class).parameters.values())[1:]
    fields = []
    for argument in arguments:
        value = argument.default
        plain = value if isinstance(value, bool | int | float | str | tuple | None) else str(value)
        fields.append((argument.name, Any, field(default=plain)))
    return make_dataclass(f"{optimizer_class.__name__}Params", fields)
