"""Which folders checkpoints are written to and read from, and what else may lie there."""

import pytest
import torch
from torch import nn

from stepstack import CheckpointError, async_save_checkpoint, load_checkpoint, save_checkpoint


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


def test_what_is_left_of_a_save_is_cleared_away_whatever_it_is(tmp_path, run):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "step_1.partial").touch()
    (tmp_path / "run" / "step_2.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "step_3").touch()
    save_checkpoint(tmp_path / "run", **run, step=3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_3"]
    assert (tmp_path / "elsewhere").exists()


def test_a_load_waits_for_what_is_being_saved(tmp_path, run):
    for extra in range(5):
        pending = async_save_checkpoint(tmp_path, **run, step=extra % 2, keep=1, extra=extra)
        assert load_checkpoint(tmp_path, **run).extra == extra
        assert pending.done()
