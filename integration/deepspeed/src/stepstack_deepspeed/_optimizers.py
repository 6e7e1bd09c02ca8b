"""Which optimizer steps: the one that a config names, or the caller's own."""

import inspect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from stepstack_deepspeed._lion import Lion
from stepstack_deepspeed._section import Section, check_arguments
from stepstack_fused_adam import FusedAdam

HANDED_OVER = "_handed_over"
"""An attribute of an optimizer whose parameters an engine has."""
_ELSEWHERE = {
    "lamb": "it needs norms of whole parameters",
    "onebitlamb": "it needs norms of whole parameters",
    "muon": "it needs whole matrices",
    "muadam": "it is of the package mup",
    "muadamw": "it is of the package mup",
    "musgd": "it is of the package mup",
    "onebitadam": "gradients are not compressed here",
    "zerooneadam": "gradients are not compressed here",
}


@dataclass(frozen=True)
class Inner:
    """An optimizer that is yet to be given its parameters: `optimizer_class(groups, **options)`.

    `has_masters`: it keeps fp32 masters of 16-bit parameters itself, if it is told to by `master_weights="fp32"`.
    `has_flag`: it can be told on the device to skip a step.
    """

    optimizer_class: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    has_masters: bool = False
    has_flag: bool = False

    @classmethod
    def read(cls, config: Section, *, steps_dtensors: bool) -> "Inner | None":
        """What the config names, if it names one. ValueError for what there isn't here."""
        optimizer = config.section("optimizer")
        optimizer.without_effect("legacy_fusion")
        name = optimizer.name_of_type()
        params = optimizer.section("params")
        if name is None:
            return None
        params.refuse("max_grad_norm", 'clipping is "gradient_clipping" of the whole config', unless=(0, 0.0))
        if name.lower() in _ELSEWHERE:
            raise ValueError(f"optimizer.type is {name!r}, which can't be had here: {_ELSEWHERE[name.lower()]}")
        if name.lower() in ("adam", "adamw"):
            return _adam(name.lower(), params)
        if name.lower() == "lion":
            params.without_effect("set_grad_none", as_here=(True,))
            return _of_class(Lion, params, "stepstack_deepspeed", steps_dtensors)
        return _of_torch("Adagrad" if name == "adagrad" else name, params, steps_dtensors)


def of_caller(optimizer: Any, params: list[Any]) -> Optimizer:
    """The caller's optimizer: as it is, or made of `params` by the class or function that was given. Checked."""
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, or a class or function that makes one of parameters; "
                f"got {type(optimizer).__name__}"
            )
        optimizer = optimizer(params)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"the function given as optimizer must make a torch.optim.Optimizer; it made {optimizer!r}")
    if getattr(optimizer, HANDED_OVER, False):
        raise ValueError("the optimizer has no parameters: another engine has taken them over. Make a new one")
    if optimizer.state:
        raise ValueError(
            "the optimizer has made steps: its states are of whole parameters. Give a new one, and load a checkpoint "
            "of the engine"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("the optimizer has no parameters")
    return optimizer


def like(optimizer: Optimizer) -> type[Optimizer]:
    """A class whose objects are as `optimizer` is, options of its constructor included, with other parameters."""
    of_it = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler wraps that
    kept = of_it | optimizer.__getstate__() | {"param_groups": []}

    class Like(type(optimizer)):  # type: ignore[misc]
        def __init__(self, params: Iterable[dict[str, Any]]) -> None:
            self.__setstate__({**kept, "state": defaultdict(dict), "param_groups": []})
            for group in params:
                self.add_param_group(group)

    Like.__name__ = Like.__qualname__ = type(optimizer).__name__
    return Like


def check_steps_dtensors(optimizer_class: type[Optimizer], fused: bool | None) -> None:
    """ValueError for a fused step that torch has for plain tensors only."""
    if fused and issubclass(optimizer_class, torch.optim.SGD | torch.optim.Adagrad):
        raise ValueError(
            f"in stage 3 parameters are DTensors, which {optimizer_class.__name__} can't step with fused=True"
        )


def _adam(name: str, params: Section) -> Inner:
    """`Adam` is AdamW too, unless `adam_w_mode` is false."""
    decoupled = params.flag("adam_w_mode", True) or name == "adamw"
    adams = params.flag("torch_adam")
    wide = params.flag("fp32_optimizer_states", True)
    options = _numbers(params)
    if adams:
        options |= params.rest()
        check_arguments(torch.optim.AdamW, options, params, module="torch.optim")
        return _with_flag(torch.optim.AdamW if decoupled else torch.optim.Adam, options)
    options["adam_w_mode"] = decoupled
    options["bias_correction"] = params.flag("bias_correction", True)
    options["amsgrad"] = params.flag("amsgrad")
    params.without_effect("set_grad_none", as_here=(True,))
    if not wide:
        options |= {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    return Inner(FusedAdam, options, has_masters=True, has_flag=True)


def _of_torch(name: str, params: Section, steps_dtensors: bool) -> Inner:
    optimizer_class = getattr(torch.optim, name, None)
    if (
        not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer))
        or optimizer_class is Optimizer
    ):
        raise ValueError(
            f"optimizer.type is {name!r}: it must be Adam, AdamW, Lion or one of torch.optim, spelled as there"
        )
    return _of_class(optimizer_class, params, "torch.optim", steps_dtensors)


def _of_class(optimizer_class: type[Optimizer], params: Section, module: str, steps_dtensors: bool) -> Inner:
    options = _numbers(params) | params.rest()
    check_arguments(optimizer_class, options, params, module=module)
    if steps_dtensors:
        check_steps_dtensors(optimizer_class, options.get("fused"))
        return Inner(optimizer_class, options)
    return _with_flag(optimizer_class, options)


def _numbers(params: Section) -> dict[str, Any]:
    """What all have: a rate and the like, if said."""
    given: dict[str, Any] = {
        key: params.number(key, 0.0, at_least=0)
        for key in ("lr", "eps", "weight_decay")
        if params.value(key, None) is not None
    }
    betas = params.value("betas", None)
    if betas is not None:
        fine = isinstance(betas, list | tuple) and len(betas) == 2
        if not (fine and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)):
            raise ValueError(f"{params.name('betas')} must be two numbers from 0 to below 1, got {betas!r}")
        given["betas"] = tuple(betas)
    return given


def _with_flag(optimizer_class: type[Optimizer], options: dict[str, Any]) -> Inner:
    """With torch's fused step, where there is one and nothing else was said: it is told to skip on the device."""
    can = "fused" in inspect.signature(optimizer_class).parameters
    if can and not any(options.get(key) for key in ("foreach", "differentiable", "capturable")):
        options = {"fused": True, **options}
    return Inner(optimizer_class, options, has_flag=can and options.get("fused") is True)
