"""The demo from the command line: processes, signals, files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_gpt

from stepstack import load_checkpoint, save_checkpoint


def start(*arguments, ranks=2):
    return subprocess.Popen(
        [sys.executable, train_gpt.__file__, "--ranks", str(ranks), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def run(tmp_path):
    """A run without an end in sight, that has made its first steps."""
    process = start("--size", "tiny", "--steps", 1_000_000, "--out", tmp_path)
    try:
        seen = b""
        while b"tokens/s" not in seen:
            seen += (some := process.stderr.read1())
            assert some, f"it ended after\n{seen.decode()}"
        yield process
    finally:
        process.terminate()  # torchrun passes it on
        process.communicate(timeout=90)


def test_ctrl_c_stops_all_ranks_after_the_same_step_and_a_resumed_run_goes_on(run, tmp_path):
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    printed, errors = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGINT, errors.decode()
    (checkpoint,) = (path for path in tmp_path.iterdir() if int(path.name.removeprefix("step_")) % train_gpt.SAVE_EVERY)
    step = load_checkpoint(checkpoint).step
    assert f"Stopped after step {step} of 1000000." in printed.decode()
    assert f"--resume {checkpoint}" in printed.decode()

    resumed = start("--resume", tmp_path, "--steps", step + 20, ranks=1)
    printed, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors.decode()
    assert {f"step_{step}", f"step_{step + 20}", "training.png"} <= {path.name for path in tmp_path.iterdir()}
    assert Path(tmp_path, "training.png").read_bytes().startswith(b"\x89PNG")
    assert "Validation loss 5." in printed.decode(errors="replace")


def options(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *map(str, arguments)])
    return train_gpt.read_options()


@pytest.fixture
def checkpoint(tmp_path):
    model = torch.nn.Linear(1, 1)
    kept = {"dtype": "bf16", "size": "tiny", "steps": 70, "seed": 3, "batch": 12}
    optimizer = torch.optim.SGD(model.parameters())
    return save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=7, extra={"options": kept})


@pytest.mark.parametrize("of_several", [True, False])
def test_a_resumed_run_has_the_options_of_its_checkpoint(monkeypatch, checkpoint, of_several):
    resume = ("--resume", checkpoint.parent if of_several else checkpoint)
    resumed = options(monkeypatch, *resume)
    assert (resumed.batch, resumed.dtype, resumed.size, resumed.steps, resumed.seed) == (12, "bf16", "tiny", 70, 3)
    assert options(monkeypatch, *resume, "--steps", 90, "--ranks", 3).steps == 90
    assert resumed.out == checkpoint.parent
    assert options(monkeypatch, *resume, "--out", "elsewhere").out == Path("elsewhere")


@pytest.mark.parametrize(
    ("option", "value", "kept"), [("--batch", 2, 12), ("--seed", 1, 3), ("--size", "small", "tiny")]
)
def test_a_checkpoint_is_not_resumed_with_options_that_it_is_not_made_for(
    monkeypatch, checkpoint, capsys, option, value, kept
):
    with pytest.raises(SystemExit):
        options(monkeypatch, "--resume", checkpoint, option, value)
    assert f"it goes on with {option} {kept} only" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_not_resumed(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        options(monkeypatch, "--resume", tmp_path / "nothing")
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_new_run_keeps_out_of_the_folders_of_others(monkeypatch, checkpoint, capsys):
    monkeypatch.chdir(checkpoint.parent)
    assert options(monkeypatch).out == Path("runs/gpt")
    for taken in ("gpt", "gpt-2"):
        Path("runs", taken, "step_20").mkdir(parents=True)
    assert options(monkeypatch).out == Path("runs/gpt-3")
    with pytest.raises(SystemExit):
        options(monkeypatch, "--out", "runs/gpt")
    assert "it has checkpoints of another run: --resume runs/gpt, or" in capsys.readouterr().err


def test_a_step_is_shared_out_evenly(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert options(monkeypatch, "--ranks", 4).batch == 32
    with pytest.raises(SystemExit):
        options(monkeypatch, "--ranks", 3)
    assert "--batch 32 can't be shared out evenly among 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--ranks"])
def test_no_steps_and_no_processes_are_refused(monkeypatch, capsys, option):
    with pytest.raises(SystemExit):
        options(monkeypatch, option, 0)
    assert f"{option}: must be 1 or more, not 0" in capsys.readouterr().err
