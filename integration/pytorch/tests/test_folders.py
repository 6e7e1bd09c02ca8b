"""Which folders checkpoints are written to and read from, and what else may lie there."""

import multiprocessing
import resource
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

from stepstack import CheckpointError, async_save_checkpoint, load_checkpoint, save_checkpoint
from stepstack._folder import steps_in
from stepstack._lock import Lock


@pytest.fixture
def run():
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_file_is_no_folder_of_checkpoints(tmp_path, run, inside):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't be a folder of checkpoints: .*file.* is no folder"):
        save_checkpoint(tmp_path / "file" / inside, **run)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint, .* is no folder"):
        load_checkpoint(tmp_path / "file" / inside, **run)


def test_nothing_is_saved_into_a_checkpoint_which_would_no_longer_be_one(tmp_path, run):
    checkpoint = save_checkpoint(tmp_path, **run)
    with pytest.raises(CheckpointError, match=rf"itself a checkpoint: give the folder that it is in, {tmp_path}$"):
        save_checkpoint(checkpoint, **run)
    with pytest.raises(CheckpointError, match=r"itself a checkpoint: .* give the folder that they are in"):
        load_checkpoint(checkpoint, **run, step=0)
    assert load_checkpoint(checkpoint, **run).step == 0


def test_a_folder_may_be_relative_and_a_link(tmp_path, run, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    save_checkpoint("run", **run)
    assert load_checkpoint("disk", **run).step == 0


def test_of_links_to_checkpoints_only_the_link_is_removed(tmp_path, run):
    moved = save_checkpoint(tmp_path / "run", **run, step=1).rename(tmp_path / "moved")
    link = tmp_path / "run" / "step_1"
    link.symlink_to(moved)
    assert load_checkpoint(link.parent, **run).step == 1
    save_checkpoint(link.parent, **run, step=1)
    assert not link.is_symlink()
    link.rename(tmp_path / "run" / "step_0")
    link.symlink_to(moved)
    save_checkpoint(link.parent, **run, step=2, keep=1)
    assert [path.name for path in link.parent.iterdir()] == ["step_2"]
    assert load_checkpoint(moved, **run).step == 1


def test_what_is_left_of_a_save_is_cleared_away_and_nothing_else(tmp_path, run):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "step_1.partial").mkdir()
    (tmp_path / "run" / "step_1.0123abcd.partial").mkdir()
    (tmp_path / "run" / "step_2.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "step_1.note.partial").mkdir()
    (tmp_path / "run" / "step_4.partial").touch()
    save_checkpoint(tmp_path / "run", **run, step=3)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["step_1.note.partial", "step_3", "step_4.partial"]
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_what_is_no_checkpoint_is_not_replaced_nor_removed(tmp_path, run, kind):
    there = tmp_path / "step_9"
    if kind == "file":
        there.write_text("mine")
    elif kind == "folder":
        there.mkdir()
        (there / "mine").touch()
    else:
        there.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"step_9 is in the way: it has no checkpoint.json, so"):
        save_checkpoint(tmp_path, **run, step=9)
    for step in (10, 11):
        save_checkpoint(tmp_path, **run, step=step, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_11", "step_9"]


def in_a_process(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def hold(folder, ready):
    Lock().take(folder)
    ready.set()
    time.sleep(100)


def test_a_second_job_is_refused_until_the_first_has_ended_however_it_did(tmp_path, run):
    ready = multiprocessing.get_context("fork").Event()
    first = in_a_process(hold, tmp_path, ready)
    assert ready.wait(30)
    with pytest.raises(CheckpointError, match=rf"another process is saving .*process {first.pid} on "):
        save_checkpoint(tmp_path, **run, step=1)
    first.kill()
    first.join()
    save_checkpoint(tmp_path, **run, step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def save_often(folder, job, locks):
    if not locks:
        Lock.take = lambda lock, folder: None
    model = nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        with suppress(CheckpointError):
            save_checkpoint(folder, model=model, optimizer=optimizer, step=step, extra=step)


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "a file system without locks"])
def test_two_jobs_in_one_folder_leave_no_damaged_checkpoint(tmp_path, locks):
    jobs = [in_a_process(save_often, tmp_path, job, locks) for job in range(2)]
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    model = nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = steps_in(tmp_path)
    assert steps
    for step in steps:
        assert load_checkpoint(tmp_path, model=model, optimizer=optimizer, step=step).extra == step
        assert all((param == step).all() for param in model.parameters())


def test_a_full_disk_is_named_and_nothing_is_left_on_it(tmp_path):
    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # as far as a file may grow
        model = nn.Linear(300, 300)
        with pytest.raises(CheckpointError, match=r"step_0\.[0-9a-f]{8}\.partial/__0_0\.distcp"):
            save_checkpoint(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
        assert [*tmp_path.iterdir()] == []

    process = in_a_process(full)
    process.join(60)
    assert process.exitcode == 0


def test_a_folder_given_relatively_is_where_it_was_when_it_was_given(tmp_path, run, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = async_save_checkpoint("run", **run)
    monkeypatch.chdir("other")
    assert pending.result() == tmp_path / "run" / "step_0"
    assert not [*(tmp_path / "other").iterdir()]


def test_a_load_waits_for_what_is_being_saved(tmp_path, run):
    for extra in range(5):
        pending = async_save_checkpoint(tmp_path, **run, step=extra % 2, keep=1, extra=extra)
        assert load_checkpoint(tmp_path, **run).extra == extra
        assert pending.done()
