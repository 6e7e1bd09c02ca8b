"""What callers hold: the engine's optimizer with DeepSpeed's names on it, and the one that was theirs."""

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer

from stepstack_deepspeed._elsewhere import OPTIMIZER, explained
from stepstack_deepspeed._optimizers import HANDED_OVER
from stepstack_grad_scaler import GradScaler

if TYPE_CHECKING:
    from stepstack_deepspeed._engine import Engine


def name_as_deepspeed_(engine: "Engine", given: Optimizer | None) -> None:
    """From here on the engine's optimizer answers to what DeepSpeed's wrappers are asked for: the loss scale, say.

    `given` is the caller's own optimizer, if it brought one.
    """
    optimizer, of_engine = engine._optimizer, weakref.ref(engine)
    scaler = engine.scaler if isinstance(engine.scaler, GradScaler) else None
    kind = type(optimizer)

    class Named(kind):  # type: ignore[misc, valid-type]
        @property
        def optimizer(self) -> Optimizer:
            """With these groups and states: the caller's own, or this one."""
            return self if given is None else given

        @property
        def loss_scaler(self) -> "LossScaler":
            return LossScaler(scaler, of_engine)

        loss_scale_config = loss_scaler

        @property
        def dynamic_loss_scale(self) -> bool:
            return self.loss_scaler.dynamic

        @property
        def loss_scale(self) -> float:
            """What the loss is multiplied by. Waits."""
            return self.loss_scaler.cur_scale

        cur_scale = loss_scale

        @property
        def overflow(self) -> bool:
            """Whether the last step was skipped. Waits."""
            last = None if (found := of_engine()) is None else found._result
            return last is not None and bool(last.skipped)

        def override_loss_scale(self, loss_scale: float) -> None:
            """Go on with this one. ValueError without fp16."""
            if scaler is None:
                raise ValueError("override_loss_scale() without fp16: the loss is multiplied by nothing")
            if not self.dynamic_loss_scale:
                scaler.min_scale = scaler.max_scale = loss_scale
            scaler.update(loss_scale)

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explained(f"{kind.__name__} has no", name, OPTIMIZER))

    _become(optimizer, Named)


class LossScaler:
    """The loss scale in use and its rule, under DeepSpeed's names. Reading a number waits."""

    def __init__(self, scaler: GradScaler | None, engine: "weakref.ref[Engine]") -> None:
        self._scaler, self._engine = scaler, engine

    @property
    def cur_iter(self) -> int:
        """Steps of the optimizer, skipped ones included."""
        engine = self._engine()
        return 0 if engine is None else engine.global_steps

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by; 1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it ever changes by itself."""
        return self._scaler is not None and self._scaler.min_scale != self._scaler.max_scale

    dynamic_loss_scale = dynamic

    @property
    def scale_window(self) -> int | None:
        """Clean steps until it grows; None if it doesn't."""
        return self._scaler.get_growth_interval() if self._scaler is not None and self.dynamic else None


def hand_over_(given: Optimizer, ours: Optimizer) -> None:
    """The caller's optimizer, whose parameters are ours now, shows our groups and states, which may be edited there.

    It can't be stepped: RuntimeError, where it would do nothing.
    """
    kind = type(given)

    def step(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "initialize has taken this optimizer over, whose step() would change nothing: call engine.step()"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler looks whether it is told of steps

    class HandedOver(kind):  # type: ignore[misc, valid-type]
        param_groups = property(lambda _: ours.param_groups)
        state = property(lambda _: ours.state)
        zero_grad = ours.zero_grad
        add_param_group = ours.add_param_group
        state_dict = ours.state_dict
        load_state_dict = ours.load_state_dict

    setattr(HandedOver, HANDED_OVER, True)
    _become(given, HandedOver)
    vars(given)["step"] = step


def _become(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    before = type(optimizer)
    kind.__name__, kind.__qualname__, kind.__module__ = before.__name__, before.__qualname__, before.__module__
    optimizer.__class__ = kind
