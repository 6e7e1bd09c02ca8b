"""Ranks on one machine: forked processes with a gloo group, results by rank, errors with their traceback, no hangs."""

import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DTensor and optimizers load it, for a second: once here, not in each forked rank
import torch.distributed as dist


class RankError(AssertionError):
    """A rank failed, or did not end in time. `errors` has the exception of each rank that raised, by rank."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 15.0) -> list[Any]:
    """`[function(rank, *arguments) for rank in range(world_size)]`, each in a process of its own.

    The default process group is gloo; a collective that waits longer than `timeout` seconds for another rank raises.
    Ranks are forked (0.2 s each): closures are fine, what a rank changes is not seen here. Results are pickled.
    Raises RankError with every rank's traceback if one fails, or if one is not done long after the timeout.
    """
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)  # a forked child hangs in a thread pool that only its parent has
    with tempfile.TemporaryDirectory(prefix="stepstack-") as folder:
        store = Path(folder, "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank,
                args=(rank, world_size, store, timeout, sender, function, arguments),
                daemon=True,
            )
            with warnings.catch_warnings():  # newer Pythons warn of any fork in a process with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            outcomes = _receive(pipes, deadline=time.monotonic() + 3 * timeout + 30)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome[0] != "result"}
    if failed:
        errors = {rank: outcome[2] for rank, outcome in failed.items() if outcome[2] is not None}
        raise RankError("\n".join(f"rank {rank}: {outcome[1]}" for rank, outcome in failed.items()), errors)
    return [result for _, result, _ in outcomes]


def _rank(
    rank: int,
    world_size: int,
    store: Path,
    timeout: float,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what is inherited is no garbage, and looking through it takes long
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        outcome = pickle.dumps(("result", function(rank, *arguments), None))
    except BaseException as error:
        outcome = _failure(error)
    else:
        with suppress(RuntimeError):  # who failed says so itself
            dist.barrier()  # nobody leaves while another still talks to it
    sender.send_bytes(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        pickled = pickle.dumps(("error", text, error))
        pickle.loads(pickled)  # some exceptions go in but do not come out
    except Exception:
        pickled = pickle.dumps(("error", text, None))
    return pickled


def _receive(pipes: list[Connection], deadline: float) -> list[tuple[str, Any, BaseException | None]]:
    outcomes: dict[Connection, tuple[str, Any, BaseException | None]] = {}
    while len(outcomes) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in outcomes], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                outcomes[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[pipe] = ("died", "the process died without a word", None)
    return [outcomes.get(pipe, ("hung", "not done in time: it hangs", None)) for pipe in pipes]
