"""A process that is killed while it saves never takes an older checkpoint with it. The kills are real ones."""

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepstack import _folder, _storage, load_checkpoint, save_checkpoint
from stepstack_testing import RankError, on_ranks

_LOOKS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree"}


@pytest.fixture
def child():
    """Run a function in a fork, until it ends, or is killed by itself or after some seconds: whether it ended."""

    def run(function, *arguments, killed_after=None):
        process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
        with warnings.catch_warnings():  # newer Pythons warn of any fork in a process with threads
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        if killed_after is not None:
            time.sleep(killed_after)
            process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode == 0

    return run


@pytest.mark.parametrize("same_step", [False, True], ids=["another step", "the same step"])
def test_a_kill_at_any_file_operation_leaves_what_was_complete(tmp_path, child, same_step):
    """Each save begins with what the kill before has left. `operation` counts until a save outlives it."""
    model, optimizer = make()
    save(tmp_path, model, optimizer, 1, number=1.0)
    step, there, kills = 1, {1: 1.0}, 0

    def saves(operation, step, number):
        kill_at(operation, tmp_path, [os.getpid()])
        save(tmp_path, model, optimizer, step, number, keep=2)

    for operation in range(1, 200):
        number = float(operation + 1)
        step = max(there) + (not same_step)
        ended = child(saves, operation, step, number)
        now = left(tmp_path)
        assert now.items() <= there.items() | {(step, number)}
        assert max(now) >= max(there)
        assert len(now) >= min(2, len(there))
        there = now
        if ended:
            break
        kills += 1
    assert there[step] == number
    assert kills >= 25
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"step_{step}" for step in there}  # nothing is left lying about


def test_a_kill_at_any_time_leaves_what_was_complete(tmp_path, child):
    model, optimizer = make()
    start = time.perf_counter()
    save(tmp_path, model, optimizer, 0, number=0.0)
    duration = time.perf_counter() - start
    random.seed(0)
    there = {0: 0.0}

    def saves(step):
        while True:
            save(tmp_path, model, optimizer, step, number=float(step), keep=3)
            step += 1

    for _ in range(12):
        assert not child(saves, max(there) + 1, killed_after=random.uniform(0.5, 4) * duration)
        now = left(tmp_path)
        assert max(now) >= max(there)
        assert all(now[step] == step for step in now)
        assert min(3, len(there)) <= len(now) <= max(3, len(there)) + 1  # a kill comes before old ones are removed
        there = now


def test_a_save_that_is_not_made_aside_would_be_caught(tmp_path, child, monkeypatch):
    model, optimizer = make()

    def in_place(folder, step):
        path = folder / f"step_{step}"
        path.mkdir()
        return path

    def saves():
        kill_at(8, tmp_path, [os.getpid()])
        save(tmp_path, model, optimizer, 1, number=1.0)

    monkeypatch.setattr(_folder, "begin", in_place)
    assert not child(saves)
    with pytest.raises(ValueError, match=r"step_1 has no checkpoint\.json"):
        left(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_are_killed_leave_what_was_complete(tmp_path, seed):
    def saves(rank):
        model, optimizer = make()
        save(tmp_path, model, optimizer, 1, number=1.0)
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == killer:
            kill_at(operation, tmp_path, [pids[1 - rank], pids[rank]])
        for step in range(2, 9):
            save(tmp_path, model, optimizer, step, float(step), keep=2)

    random.seed(seed)
    killer = seed % 2
    operation = random.randrange(3, 12) if killer else random.randrange(5, 80)  # the first rank does more
    with pytest.raises(RankError, match="died without a word"):
        on_ranks(2, saves)
    there = left(tmp_path)
    assert all(there[step] == step for step in there)
    assert 1 <= len(there) <= 3
    assert max(there) - min(there) == len(there) - 1


def make():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder, model, optimizer, step, number, **options):
    """Save a model all of whose numbers are `number`."""
    nn.init.constant_(model.weight, number)
    nn.init.constant_(model.bias, number)
    optimizer.state[model.bias]["exp_avg"].fill_(number)
    return save_checkpoint(folder, model=model, optimizer=optimizer, step=step, extra=number, **options)


def left(folder):
    """The number of each step that is there, each complete and of one piece."""
    found = {}
    for step, path in _folder.steps_in(folder).items():
        model, optimizer = make()
        _folder.verify(path)
        loaded = load_checkpoint(folder, model=model, optimizer=optimizer, step=step)
        numbers = {*model.weight.flatten().tolist(), *model.bias.tolist(), loaded.extra}
        numbers |= set(optimizer.state[model.bias]["exp_avg"].tolist())
        assert loaded.step == step
        assert len(numbers) == 1
        found[step] = numbers.pop()
    return found


def kill_at(operation, folder, pids):
    """From now on, count what this process does with files in the folder; at a number, kill processes at once."""
    done = 0

    def count():
        nonlocal done
        done += 1
        if done == operation:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def audit(event, arguments):
        if event in _LOOKS and str(folder) in str(arguments[0]):
            count()

    def counted(function):
        def call(*arguments):
            count()
            return function(*arguments)

        return call

    os.fsync = counted(os.fsync)
    _storage._Summed.write = counted(_storage._Summed.write)
    sys.addaudithook(audit)
