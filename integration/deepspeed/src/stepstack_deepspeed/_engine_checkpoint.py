"""Checkpoints of an engine: stepstack's, in a folder for each tag, with the file `latest` beside them."""

import logging
import os
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import stepstack
from stepstack import CheckpointError
from stepstack_deepspeed._fsdp import reshard_
from stepstack_deepspeed._processes import on_first, ranks
from stepstack_deepspeed._weights import without_frozen
from stepstack_sharded_states import ShardedOptimizer

if TYPE_CHECKING:
    from stepstack_deepspeed._engine import Engine

log = logging.getLogger("stepstack_deepspeed")

_LATEST = "latest"
_ASIDE = f"{_LATEST}.new"


def save(
    engine: "Engine",
    folder: str | PathLike[str],
    tag: str | None,
    client_state: Any,
    save_latest: bool,
    *,
    exclude_frozen: bool,
) -> Path:
    """Write `folder/tag/step_N`, and then `folder/latest`. Every rank calls this."""
    folder = checked_folder(folder, "save_dir")
    tag = f"global_step{engine.global_steps}" if tag is None else _checked(str(tag))
    tag = _agreed(tag, engine._config.tags_that_differ)
    path = stepstack.save_checkpoint(
        folder / tag,
        model=without_frozen(engine.module) if exclude_frozen else engine.module,
        optimizer=engine._optimizer,
        scheduler=Progress(engine),
        extra=client_state,
        step=engine.global_steps,
        keep=1,
    )
    on_first(lambda: _point(folder, tag) if save_latest else None)
    return path


def load(
    engine: "Engine",
    folder: str | PathLike[str],
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    lr_scheduler_states: bool,
    module_only: bool,
) -> tuple[Path | None, Any]:
    """Make the engine what it was, or the parts of it that are asked for. Every rank calls this."""
    folder = checked_folder(folder, "load_dir")
    if tag is None:
        tag = on_first(lambda: _latest(folder))
        if tag is None:
            return None, None
    schedule = engine.lr_scheduler
    before = {} if schedule is None else schedule.state_dict()
    optimizer_states = optimizer_states and not module_only
    read = partial(
        stepstack.load_checkpoint,
        folder / str(tag),
        optimizer=engine._optimizer if optimizer_states else None,
        scheduler=None if module_only else Progress(engine, scale=optimizer_states, lr_scheduler=lr_scheduler_states),
    )
    try:
        loaded = read(model=engine.module)
    except CheckpointError:
        if strict or all(param.requires_grad for param in engine.module.parameters()):
            raise
        loaded = read(model=without_frozen(engine.module))
    reshard_(engine.module)
    engine.zero_grad()
    if not optimizer_states and isinstance(engine._optimizer, ShardedOptimizer):
        engine._optimizer.refresh_from_model()
    if schedule is not None:  # the rates in the optimizer's groups are those of the checkpoint now
        goes_on = lr_scheduler_states and not module_only
        schedule.load_state_dict(schedule.state_dict() if goes_on else before)
    return loaded.path, loaded.extra


def checked_folder(folder: str | PathLike[str], argument: str) -> Path:
    """ValueError for one without a name, which would be the current folder."""
    if not folder:
        raise ValueError(f"{argument} is {folder!r}: it must be the path of a folder ('.' is the current one)")
    return Path(folder)


def _agreed(tag: str, where_they_differ: str) -> str:
    """The first rank's. Every rank calls this."""
    if ranks() == 1:
        return tag
    tags: list[Any] = [None] * ranks()
    dist.all_gather_object(tags, tag)
    others = {f"rank {rank} says {other!r}" for rank, other in enumerate(tags) if other != tags[0]}
    if others and where_they_differ != "ignore":
        words = f"the tag of rank 0 is {tags[0]!r}, but {', '.join(sorted(others))}: all ranks give the same"
        if where_they_differ == "fail":
            raise ValueError(words)
        log.warning("%s; this checkpoint has rank 0's", words)
    return str(tags[0])


def _checked(tag: str) -> str:
    """ValueError for a tag that leads out of the folder, or to the file that has the latest one."""
    parts = Path(tag).parts
    if not parts or Path(tag).is_absolute() or ".." in parts or parts[0] in (_LATEST, _ASIDE):
        raise ValueError(f"tag is {tag!r}: it must be the name of a folder inside of save_dir, other than {_LATEST!r}")
    return tag


def _point(folder: Path, tag: str) -> None:
    (folder / _ASIDE).write_text(tag)
    os.replace(folder / _ASIDE, folder / _LATEST)


def _latest(folder: Path) -> str | None:
    latest = folder / _LATEST
    if not latest.is_file():
        log.warning("there is no checkpoint to load: %s does not exist, and no tag was given", latest)
        return None
    tag = latest.read_text().strip()
    if not tag:
        raise CheckpointError(f"{latest} is empty: give a tag")
    return tag


class Progress:
    """What an engine has counted, its loss scale and its schedule, as a state dict. Reading it waits."""

    def __init__(self, engine: "Engine", *, scale: bool = True, lr_scheduler: bool = True) -> None:
        self._engine, self._scale, self._schedule = engine, scale, lr_scheduler

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "applied_steps": int(engine.applied_steps),
            "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
            "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """An unfinished accumulation begins anew. A loss scale that wasn't saved stays as it is."""
        engine = self._engine
        if self._schedule and engine.lr_scheduler is not None:
            if state_dict["lr_scheduler"] is None:
                raise ValueError("it was saved without a schedule: load_lr_scheduler_states=False starts one anew")
            if state_dict["lr_scheduler"].keys() != engine.lr_scheduler.state_dict().keys():
                raise ValueError(
                    "it was saved with another kind of schedule: load_lr_scheduler_states=False starts anew"
                )
            engine.lr_scheduler.load_state_dict(state_dict["lr_scheduler"])
        if self._schedule:
            engine.applied_steps.fill_(state_dict["applied_steps"])
        if self._scale and engine.scaler is not None and state_dict["scaler"] is not None:
            engine.scaler.load_state_dict(state_dict["scaler"])
        engine.global_steps = state_dict["global_steps"]
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        engine._steps_counted = 0
        engine.global_samples = state_dict["global_samples"]
        engine.skipped_steps = state_dict["skipped_steps"]
