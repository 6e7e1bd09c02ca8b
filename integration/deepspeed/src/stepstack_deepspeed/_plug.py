"""`plug`: norm, clip and Adam of a live DeepSpeed engine become ours."""

import inspect
import sys
from types import TracebackType
from typing import Any

import torch

from stepstack_deepspeed._plug_adam import InnerAdam
from stepstack_deepspeed._plug_bf16 import Bf16
from stepstack_deepspeed._plug_overrides import Overrides
from stepstack_deepspeed._plug_seam import Seam
from stepstack_deepspeed._plug_stage0 import Fp16, Fp16Unfused, Fp32
from stepstack_deepspeed._plug_stage3 import Stage3
from stepstack_deepspeed._plug_stage12 import Stage12

_SEAMS: dict[str, type[Seam]] = {
    "DeepSpeedZeroOptimizer_Stage3": Stage3,
    "DeepSpeedZeroOptimizer": Stage12,
    "BF16_Optimizer": Bf16,
    "FP16_Optimizer": Fp16,
    "FP16_UnfusedOptimizer": Fp16Unfused,
}
_VERSIONS = "0.19.8 and later ones of 0.19"


def plug(engine: Any, *, norm: bool = True, clip: bool = True, optimizer: bool = True) -> "Plug":
    """Let a DeepSpeed engine measure, clip and update by stepstack's means, from its next step on.

        engine, *_ = deepspeed.initialize(model=model, config=config)
        with plug(engine):
            ...  # the training loop, as it is

    - `norm`: the global gradient norm is that of all groups and sub-groups, accumulated in fp64 out of what is in the
      gradient buffers when the step begins, by one all-reduce. `engine.get_global_grad_norm()` is a 0-d fp32 tensor in
      every stage: before clipping, without the loss scale, on the CPU under optimizer offload. If it is not finite, the
      step is skipped in every stage and dtype: nothing changes, `was_step_applied()` is False, the schedule stays
      (unless `bf16.check_grad_overflow` is false in stages 1 and 2: then the step is made, as DeepSpeed does). In the
      first step it is compared with DeepSpeed's own (RuntimeError if they differ).
    - `clip`: gradients are divided by loss scale ÷ clip coefficient, a number on the device. The scale is the one that
      the loss was multiplied by, also when it grows in this step.
    - `optimizer`: `FusedAdamW` makes the update, with that number as its `grad_scale`, so the gradient is not rewritten
      at all. It works on the states and by the numbers of the Adam inside (torch's Adam and AdamW, DeepSpeed's
      DeepSpeedCPUAdam and FusedAdam, or ours), which checkpoints and schedules go on seeing. With an offload `ratio`,
      both halves go by those numbers.

    Without one of them that part stays DeepSpeed's. Every rank plugs the same. Handled are ZeRO stages 0 to 3 and
    BF16_Optimizer, in fp32, bf16 and fp16, with or without optimizer offload to the CPU, of DeepSpeed 0.19.8 and later
    ones of 0.19. In stage 0 and BF16_Optimizer the step is replaced as a whole, so `norm` and `clip` come together.

    Raises TypeError for what is no DeepSpeedEngine, and for optimizers and versions that it does not handle; ValueError
    for configurations that it does not, by name, and for an engine that is plugged already. Then nothing has changed.
    """
    _check_engine(engine)
    if not (norm or clip or optimizer):
        raise ValueError("plug(engine, norm=False, clip=False, optimizer=False) would replace nothing")
    seam_class = _seam_class(engine)
    if not seam_class.takes_parts and not (norm and clip):
        raise ValueError(
            f"{type(engine.optimizer).__name__} measures and clips within one step, which is replaced as a whole: "
            "plug(engine), or plug(engine, optimizer=False)"
        )
    inner = InnerAdam(getattr(engine.optimizer, "optimizer", engine.optimizer)) if optimizer else None
    return Plug(engine, seam_class(engine, norm=norm, clip=clip, inner=inner))


class Plug:
    """What `plug` has replaced in an engine, until `remove()` or the end of a `with` block."""

    def __init__(self, engine: Any, seam: Seam) -> None:
        self.engine = engine
        self._seam: Seam | None = None  # once it is attached
        self._overrides = Overrides()
        self._overrides.replace(engine, "stepstack_plug", self)
        try:
            seam.attach(self._overrides)
        except BaseException:
            self.remove()
            raise
        self._seam = seam

    def remove(self) -> None:
        """Give the engine its own methods and attributes back; weights and states stay as trained. Twice is once."""
        seam, self._seam = self._seam, None
        if seam is not None:
            seam.hand_back()
        self._overrides.restore()

    def __enter__(self) -> "Plug":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _check_engine(engine: Any) -> None:
    name = type(engine).__name__
    if name != "DeepSpeedEngine":
        raise TypeError(f"plug takes a DeepSpeedEngine, as deepspeed.initialize returns it, not {name}")
    _check_version(getattr(sys.modules.get("deepspeed"), "__version__", "unknown"))
    if getattr(engine, "stepstack_plug", None) is not None:
        raise ValueError("this engine is plugged already: remove() that Plug first")
    for what, is_so in (
        ("mixture of experts", engine.has_moe_layers),
        ("ZenFlow", engine.zenflow),
        ("DeepCompile", engine.is_deepcompile_active()),
        ("torch_autocast in fp16", _has_autocast_scaler(engine)),
    ):
        if is_so:
            raise ValueError(f"plug does not handle engines with {what}: turn it off, or train without plug")


def _has_autocast_scaler(engine: Any) -> bool:
    scalers = (engine.torch_autocast_z0_gradscaler, getattr(engine.optimizer, "torch_autocast_gradscaler", None))
    return any(scaler is not None for scaler in scalers)


def _check_version(version: str) -> None:
    numbers = version.split("+")[0].split(".")[:3]
    known = all(number.isdigit() for number in numbers) and (0, 19, 8) <= tuple(map(int, numbers)) < (0, 20)
    if not known:
        raise TypeError(f"plug does not handle DeepSpeed {version}; it handles {_VERSIONS}")


def _seam_class(engine: Any) -> type[Seam]:
    optimizer = engine.optimizer
    name = type(optimizer).__name__
    if name in ("NoneType", "DummyOptim"):
        raise TypeError(
            "plug: this engine has no optimizer; give deepspeed.initialize one, by its config or as argument"
        )
    if name in _SEAMS:
        seam_class = _SEAMS[name]
    elif isinstance(optimizer, torch.optim.Optimizer):
        seam_class = Fp32
    else:
        raise TypeError(f"plug does not handle {name}; it handles {', '.join(_SEAMS)} and torch's optimizers")
    for method, names in seam_class.signatures.items():
        found = _parameters(type(optimizer), method)
        if found != names:
            raise TypeError(
                f"{name}.{method} takes {found}, where plug knows {names}: it handles DeepSpeed {_VERSIONS}"
            )
    if reason := seam_class.refusal(engine):
        raise ValueError(f"plug does not handle this {name}: {reason}")
    return seam_class


def _parameters(owner: type, method: str) -> tuple[str, ...] | None:
    function = getattr(owner, method, None)
    if function is None:
        return None
    # DeepSpeed's tracing decorator does not tell what it wraps.
    function = inspect.getclosurevars(function).nonlocals.get("func", function)
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
