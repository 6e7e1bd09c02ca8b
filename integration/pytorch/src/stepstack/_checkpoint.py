"""`save_checkpoint` and `load_checkpoint`: a training run, put down on some ranks and taken up on others."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stepstack import _folder
from stepstack._contents import Contents
from stepstack._folder import VALUES, Marker
from stepstack._lock import Lock
from stepstack._ranks import CheckpointError, Ranks
from stepstack._step import OptimizerStep
from stepstack._storage import read_metadata, read_tensors, write_tensors
from stepstack._values import from_text, to_text

_one_at_a_time = threading.Lock()
_APART = "ranks with other parts of a model save apart, to folders of their own, with process_group="


class LoadedCheckpoint(NamedTuple):
    """What has been loaded."""

    step: int
    extra: Any
    path: Path


def save_checkpoint(
    dir: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | OptimizerStep,
    scaler: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `dir/step_N`, complete or not at all; return its path.

        save_checkpoint("runs/gpt", model=model, optimizer=optimizer_step, step=step, keep=3)

    Every rank of `process_group` (None: the default group, or this process alone) calls it, between a step and the
    next backward, and returns when the checkpoint is complete. `dir` is on a file system that all of them see, and is
    one run's own. Each rank writes its shards; of what several ranks have, one writes it.

    - model: parameters and buffers, whole or DTensors (`fully_shard`), inside of DistributedDataParallel or not.
    - optimizer: a `ShardedOptimizer` made with `model.named_parameters()`, or one of torch's, or the `OptimizerStep`
      around it, with its schedule and its scaler. Before the first step there are no states, which is kept as well.
    - scaler, scheduler: anything with `state_dict()` and `load_state_dict()`.
    - extra: what else a run needs, given back by `load_checkpoint`: None, bool, int, float, str, list, tuple, dict,
      torch.dtype and small tensors. It and the states of scaler and scheduler become JSON, as they are on rank 0.
    - step: None is one more than the highest in `dir`, from 0 on. One of the same step is replaced.
    - keep: how many checkpoints are to be left in `dir` when this one is complete: those of the highest steps, and
      this one. None leaves all.

    CheckpointError on every rank if one fails, with its words, or if another process is saving into `dir`; what was
    complete before still is.
    """
    with _one_at_a_time:
        ranks = Ranks(process_group)
        contents = _contents(ranks, model, optimizer, scaler, scheduler)
        return _save(ranks, dir, *_collected(ranks, contents, extra), step, keep)


def async_save_checkpoint(
    dir: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | OptimizerStep,
    scaler: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> "Future[Path]":
    """`save_checkpoint`, which returns when what this rank has to write is copied to the CPU's memory.

    The rest is done in a thread while training goes on; `result()` of what is returned waits for it, gives the path,
    and raises what there is to raise. Another save waits for it too, and so does the end of the program. A process
    that is killed before has not written a checkpoint, and the ones before are as they were.

    `process_group` must have a backend for the CPU, and nothing else may use it meanwhile. None: a group of its own
    with gloo, which all ranks make at the first call.
    """
    _one_at_a_time.acquire()
    try:
        if process_group is None and dist.is_initialized():
            process_group = _group_of_its_own(dist.group.WORLD)
        ranks = Ranks(process_group)
        contents = _contents(ranks, model, optimizer, scaler, scheduler)
        collected = _collected(ranks, contents, extra)
        folder = ranks.first(lambda: Path(dir).absolute())  # as of now: the program may go elsewhere meanwhile
        copied, future = threading.Event(), Future[Path]()
    except BaseException:
        _one_at_a_time.release()
        raise

    def save() -> None:
        try:
            future.set_result(_save(ranks, folder, *collected, step, keep, copied.set))
        except BaseException as error:
            future.set_exception(error)
        finally:
            _one_at_a_time.release()
            copied.set()

    threading.Thread(target=save, name="async_save_checkpoint").start()
    copied.wait()
    return future


def load_checkpoint(
    dir: str | PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | OptimizerStep | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Make everything what it was; return the step, `extra` and the path.

        step, extra, _ = load_checkpoint("runs/gpt", model=model, optimizer=optimizer_step)

    Every rank of `process_group` (None: the default group, or this process alone) calls it. It may have been written by
    any number of ranks, from other shards and buckets, in other dtypes: numbers are rounded to what they are read into.

    - dir: a folder of checkpoints, of which that of `step` is loaded (None: the newest), or one of these itself.
    - model, optimizer, scaler, scheduler: as for `save_checkpoint`. What is not given is not loaded. Where weights are
      loaded alone, tell an optimizer with master weights: `refresh_from_model` or `refresh_master_weights`.

    Everything is checked before anything is changed: that every file is there and has the bytes that were written,
    that names and shapes are those of `model` and `optimizer`. CheckpointError, on every rank, says what is not so.
    Nothing that a file says is run: tensors are read as numbers, and the rest is JSON.
    """
    with _one_at_a_time:  # what is being saved may be what is to be loaded
        return _load(Ranks(process_group), dir, step, model, optimizer, scaler, scheduler)


def _contents(ranks: Ranks, *objects: Any) -> Contents:
    contents = ranks.each(lambda: Contents(*objects))
    ranks.alike(contents.names, "give all ranks the same")
    return contents


def _load(ranks: Ranks, dir: str | PathLike[str], step: int | None, *objects: Any) -> LoadedCheckpoint:
    contents = _contents(ranks, *objects)
    checkpoint, marker = ranks.first(lambda: _found(Path(dir).absolute(), step))
    values = ranks.each(lambda: from_text(_folder.read(checkpoint / VALUES, marker.files[VALUES]).decode()))
    if contents.parts:
        ranks.each(lambda: _check_files(checkpoint, marker, ranks))
        metadata = ranks.each(lambda: read_metadata(checkpoint, marker))
        wanted = ranks.each(lambda: contents.wanted(metadata, values))
    before = ranks.each(lambda: deepcopy(contents.carried_states()))
    try:
        ranks.each(lambda: contents.carried_over(values))
        if contents.parts:
            read_tensors(checkpoint, metadata, wanted, ranks)
    except CheckpointError:
        contents.carried_over(before)
        raise
    ranks.each(lambda: contents.take(wanted.into if contents.parts else {}, values))
    return LoadedCheckpoint(marker.step, values["extra"], checkpoint)


def _collected(ranks: Ranks, contents: Contents, extra: Any) -> tuple[dict[str, dict[str, Tensor]], str]:
    """This rank's tensors, and the text of all ranks' other values."""
    kept = ranks.each(contents.kept)
    names = [*kept["model"].tensors, *kept["optimizer"].values]
    ranks.alike([name for name in names if not name.startswith("state.")], _APART)  # which only some have
    tensors = {name: part.tensors for name, part in kept.items()}
    values = {name: dict(part.values) for name, part in kept.items()}
    # An optimizer may hold numbers of a parameter that only the rank knows which steps it.
    for others in ranks.gather(lambda: {k: v for k, v in values["optimizer"].items() if k.startswith("state.")}):
        values["optimizer"].update(others)
    return tensors, ranks.each(lambda: to_text({**values, **contents.carried_states(), "extra": extra}))


def _save(
    ranks: Ranks,
    folder: str | PathLike[str],
    tensors: dict[str, dict[str, Tensor]],
    text: str,
    step: int | None,
    keep: int | None,
    copied: Callable[[], None] | None = None,
) -> Path:
    lock, aside = Lock(), None
    try:
        step, aside = ranks.first(lambda: _begin(lock, Path(folder).absolute(), step, keep))
        written = ranks.gather(lambda: write_tensors(aside, tensors, ranks, copied))
        files = {name: record for of_rank in written for name, record in of_rank.items()}

        def finish() -> Path:
            files[VALUES] = _folder.write(aside / VALUES, text.encode())
            checkpoint = _folder.finish(aside, step=step, ranks=ranks.size, files=files)
            if keep is not None:
                _folder.keep_newest(checkpoint.parent, keep, step=step)
            return checkpoint

        return ranks.first(finish)
    except BaseException:
        if aside is not None and ranks.rank == 0:
            _folder.give_up(aside)
        raise
    finally:
        lock.release()


def _begin(lock: Lock, folder: Path, step: int | None, keep: int | None) -> tuple[int, Path]:
    for name, number, least in (("step", step, 0), ("keep", keep, 1)):
        if number is not None and not (type(number) is int and number >= least):
            raise ValueError(f"{name} must be an integer of at least {least}, or None; got {number!r}")
    _folder.prepare(folder)
    lock.take(folder)
    if step is None:
        step = max(_folder.steps_in(folder), default=-1) + 1
    return step, _folder.begin(folder, step)


def _found(folder: Path, step: int | None) -> tuple[Path, Marker]:
    checkpoint = _folder.find(folder, step)
    marker = _folder.read_marker(checkpoint)
    _folder.check_names(checkpoint, marker)
    return checkpoint, marker


def _check_files(checkpoint: Path, marker: Marker, ranks: Ranks) -> None:
    """Each rank looks at some of the files, so that together they see all."""
    by_size = sorted(marker.files, key=lambda name: marker.files[name].size)
    for name in by_size[ranks.rank :: ranks.size]:
        _folder.check(checkpoint / name, marker.files[name])


@lru_cache(maxsize=1)
def _group_of_its_own(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """What is said in it can't come between what is said in `world`."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
