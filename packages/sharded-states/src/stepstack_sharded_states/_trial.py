"""A trial of an optimizer class: small tensors are trained whole, and again in the slices that two ranks would have."""

import contextlib
import inspect
import io
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree


class Part(NamedTuple):
    """A stretch of a tensor, and the shape that an optimizer sees it in."""

    tensor: int
    start: int
    stop: int
    shape: tuple[int, ...]


_SHAPES = ((8, 20), (4, 3, 3, 4), (70,))
_PADDED = (192, 192, 128)  # a slice begins at a multiple of 64 elements, and what is left of the last 64 is zero
_WHOLE = [[Part(tensor, 0, torch.Size(shape).numel(), shape) for tensor, shape in enumerate(_SHAPES)]]
_CUT = [
    [Part(0, 0, 64, (64,)), Part(2, 0, 64, (64,))],
    [Part(0, 64, 192, (128,)), Part(1, 0, 192, (192,)), Part(2, 64, 128, (64,))],
]
"""Of one rank alone; of two."""

_STEPS = 14  # RAdam rectifies from the 6th on; lookaheads of 5 and 6 come round twice
_DELAYS = re.compile(r"step|warm|start|freq|interval|every|gap|period|delay|after|iter|epoch|length|t_max")
_LONG, _SHORT = 6, 3  # a delay of more steps than this is made so short that what it delays is seen
_LEAST_LR = 1e-2  # so that what a step changes stands out from the rounding of weights
_CLOSE = 1e-5  # of the way. What is elementwise ends bitwise equal or 1e-6 apart, what is not, 3e-5 or more
_CLOSE_IN_16_BITS = 0.1  # vectors and what is left of them are rounded in other ways


class Untried(Exception):
    """The trial can't be made; says why."""

    refused: Exception | None = None
    """What the constructor raised, given slices."""


@dataclass(frozen=True)
class Candidate:
    """An optimizer class, its keyword arguments, the options of its groups, and what its parameters will be like."""

    optimizer_class: type[Optimizer]
    options: dict[str, Any]
    groups: list[dict[str, Any]]
    dtype: torch.dtype
    device: torch.device


def difference(candidate: Candidate) -> tuple[float, tuple[int, ...]] | None:
    """How far apart a tensor ends that is trained whole and in slices, as a part of its way, and its shape.

    None where that is rounding. Raises Untried where the trial can't be made. Leaves no trace in random numbers,
    attributes of the class, warnings, global hooks, and on the terminal.
    """
    failure = Untried("nothing was tried")
    for variant in _variants(candidate):
        try:
            with _no_trace(variant):
                return _difference(variant)
        except Untried as error:
            failure = error
    raise failure


def with_visible_lr(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a learning rate whose updates stand out from the rounding of weights."""
    lr = options.get("lr")
    if isinstance(lr, float | int | Tensor) and float(lr) < _LEAST_LR:
        return {**options, "lr": torch.full_like(lr, _LEAST_LR) if isinstance(lr, Tensor) else _LEAST_LR}
    return dict(options)


def _variants(candidate: Candidate) -> Iterator[Candidate]:
    """Ways to try it, of which the first that works is taken.

    In float32 rather than in 16 bits, where rounding, which may differ within a tensor, hides what is looked for;
    on the CPU rather than on another device, which would be waited for; with delays shortened rather than as they are.
    """
    defaults = {
        name: argument.default
        for name, argument in inspect.signature(candidate.optimizer_class.__init__).parameters.items()
        if argument.default is not argument.empty and argument.kind is not argument.POSITIONAL_ONLY
    }
    seen = with_visible_lr({"lr": defaults["lr"]}) if defaults.get("lr") is not None else {}
    options = {**seen, **candidate.options}
    short = {**options, **_short({**defaults, **options})}, [{**group, **_short(group)} for group in candidate.groups]
    for device in dict.fromkeys((torch.device("cpu"), candidate.device)):
        for dtype in dict.fromkeys((torch.float32, candidate.dtype)):
            as_given = replace(candidate, options=options, dtype=dtype, device=device)
            if short != (options, candidate.groups):
                yield replace(as_given, options=short[0], groups=short[1])
            yield as_given


def _short(options: Mapping[str, Any]) -> dict[str, Any]:
    """The delays among them that are long, short."""
    return {
        name: _SHORT
        for name, value in options.items()
        if type(value) is int and value > _LONG and _DELAYS.search(name.lower())
    }


def _difference(candidate: Candidate) -> tuple[float, tuple[int, ...]] | None:
    starts, gradients = _numbers(candidate)
    cut, whole = (_trained(candidate, ranks, starts, gradients) for ranks in (_CUT, _WHOLE))
    ulp, worst, moved = torch.finfo(candidate.dtype).eps, None, False
    close = _CLOSE if ulp < _CLOSE else _CLOSE_IN_16_BITS
    for number, tensors in enumerate(zip(starts, whole, cut, strict=True)):
        part = _WHOLE[0][number % len(_SHAPES)]
        start, one, other = (tensor[: part.stop].double() for tensor in tensors)
        way = float((one - start).abs().nan_to_num().max())
        apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
        distance = float(apart.nan_to_num(torch.inf).max())
        moved |= way > 0
        if distance > max(close * way, ulp * float(start.abs().max())):
            worst = max(worst or (0.0, ()), (distance / max(way, ulp), part.shape))
    if not moved:
        raise Untried(f"it changed no weight in {_STEPS} steps")
    return worst


def _numbers(candidate: Candidate) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights of each tensor of each group, padded, and their gradients for each step.

    Of the three tensors of a group, one has gradients whose norm jumps, one whose norm grows, one whose signs change.
    """
    generator = torch.Generator().manual_seed(0)
    weights: list[Tensor] = []
    gradients: list[list[Tensor]] = [[] for _ in range(_STEPS)]
    jumps = (1.0, 3.0, 0.3, 1.0, 30.0, 1.0, 1e-3, 1.0, 1.0, 10.0, 1.0, 1.0, 0.1, 1.0)
    for _ in candidate.groups:
        for tensor, (shape, padded) in enumerate(zip(_SHAPES, _PADDED, strict=True)):
            numel = torch.Size(shape).numel()
            draws = torch.randn(_STEPS + 1, numel, generator=generator)
            weight, of_steps = draws[0] * 0.3, draws[1:]
            for step, gradient in enumerate(of_steps):
                if tensor == 0:
                    gradient *= jumps[step]
                    gradient[0] *= 50 if step > 2 else 1
                    if step == 5:  # at a right angle to the weight, for who projects
                        gradient -= (gradient @ weight) / (weight @ weight) * weight
                elif tensor == 1:
                    gradient *= 1e-3 * 2**step
                else:
                    gradient.abs_().mul_((-1) ** step)
                gradients[step].append(nn.functional.pad(gradient, (0, padded - numel)))
            weights.append(nn.functional.pad(weight, (0, padded - numel)))
    as_there = [weight.to(candidate.device, candidate.dtype) for weight in weights]
    return as_there, [[g.to(candidate.device, candidate.dtype) for g in of_step] for of_step in gradients]


def _trained(
    candidate: Candidate, ranks: Sequence[Sequence[Part]], starts: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """The tensors after all steps, of which each rank's optimizer steps its parts."""
    ends = [start.clone() for start in starts]
    for parts in ranks:
        random.setstate(_SEED)
        torch.set_rng_state(_TORCH_SEED)
        _train(candidate, parts, ends, gradients)
    return ends


def _train(candidate: Candidate, parts: Sequence[Part], ends: list[Tensor], gradients: list[list[Tensor]]) -> None:
    """Step one rank's parts of `ends`, in place."""
    groups = [[nn.Parameter(_place(ends, number, part)) for part in parts] for number in range(len(candidate.groups))]
    params = [(number, part, param) for number, of in enumerate(groups) for part, param in zip(parts, of, strict=True)]
    with _named("its constructor", slices=parts not in _WHOLE):
        optimizer: Any = candidate.optimizer_class(
            [{**_copied(options), "params": list(of)} for options, of in zip(candidate.groups, groups, strict=True)],
            **_copied(candidate.options),
        )
    for step in range(_STEPS):
        if step == _STEPS // 2:
            _set_mode(optimizer, "eval")
        if step in (0, _STEPS // 2):
            _set_mode(optimizer, "train")
        for number, part, param in params:
            param.grad = _place(gradients[step], number, part).clone()
        with _named(f"step {step + 1} of one with shapes {[part.shape for part in parts]}"), torch.no_grad():
            optimizer.step()
    _set_mode(optimizer, "eval")
    _check_kept(optimizer, groups, ends, parts)


def _set_mode(optimizer: Any, name: str) -> None:
    """Call its `train()` or `eval()`, if it has one: a schedule-free one must be told."""
    if callable(getattr(optimizer, name, None)):
        with _named(f"its {name}()"), torch.no_grad():
            getattr(optimizer, name)()


def _check_kept(optimizer: Any, groups: list[list[nn.Parameter]], ends: list[Tensor], parts: Sequence[Part]) -> None:
    """Raise Untried if the optimizer has made groups of its own, or given parameters other memory."""
    theirs = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    if theirs != [[id(param) for param in of_group] for of_group in groups]:
        raise Untried("it makes parameter groups of its own")
    for number, of_group in enumerate(groups):
        for part, param in zip(parts, of_group, strict=True):
            if param.data_ptr() != _place(ends, number, part).data_ptr():
                raise Untried("it gives parameters other memory (param.data = …), where slices can't follow")


def _place(tensors: list[Tensor], group: int, part: Part) -> Tensor:
    return tensors[group * len(_SHAPES) + part.tensor][part.start : part.stop].view(part.shape)


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """With tensors and containers of its own."""
    copied: dict[str, Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), dict(options))
    return copied


@contextlib.contextmanager
def _named(what: str, *, slices: bool = False) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        untried = Untried(f"{what} raised {type(error).__name__}: {error}")
        untried.refused = error if slices else None
        raise untried from error


@contextlib.contextmanager
def _no_trace(candidate: Candidate) -> Iterator[None]:
    """What a trial changes beside its own objects is as before afterwards."""
    classes = [
        base for base in candidate.optimizer_class.__mro__ if not base.__module__.startswith(("torch.", "builtins"))
    ]
    before = [(base, dict(vars(base))) for base in classes]
    hooks: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    held = [dict(of_all) for of_all in hooks]
    numpy = sys.modules.get("numpy")
    state, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [candidate.device] if candidate.device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices, device_type=candidate.device.type if devices else "cuda"),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for of_all in hooks:
            of_all.clear()
        try:
            yield
        finally:
            for of_all, kept in zip(hooks, held, strict=True):
                of_all.clear()
                of_all.update(kept)
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(of_numpy)
            for base, attributes in before:
                _put_back(base, attributes)


def _put_back(base: type, attributes: dict[str, Any]) -> None:
    for name, value in list(vars(base).items()):
        if name not in attributes:
            delattr(base, name)
        elif value is not attributes[name]:
            setattr(base, name, attributes[name])


_SEED, _TORCH_SEED = random.Random(0).getstate(), torch.Generator().manual_seed(0).get_state()
