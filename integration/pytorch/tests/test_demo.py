"""The demo from the command line: processes, signals, files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import train_gpt


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, train_gpt.__file__, "--ranks", "2", *map(str, arguments)],
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
    printed, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, errors.decode()
    (checkpoint,) = tmp_path.iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert {path.name for path in checkpoint.iterdir()} == {
        "options.json",
        "training.pt",
        "optimizer-0.pt",
        "optimizer-1.pt",
    }
    assert f"Stopped after step {step} of 1000000." in printed.decode()
    assert f"--resume {checkpoint}" in printed.decode()

    resumed = start("--resume", checkpoint, "--steps", step + 20, "--out", tmp_path)
    printed, errors = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, errors.decode()
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint.name, f"step-{step + 20:06d}", "training.png"}
    assert Path(tmp_path, "training.png").read_bytes().startswith(b"\x89PNG")
    assert "Validation loss 5." in printed.decode(errors="replace")


def options(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *map(str, arguments)])
    return train_gpt.read_options()


@pytest.fixture
def checkpoint(tmp_path):
    kept = '{"ranks": 4, "dtype": "bf16", "size": "tiny", "steps": 70, "seed": 3}'
    tmp_path.joinpath("options.json").write_text(kept)
    return tmp_path


def test_a_resumed_run_has_the_options_of_its_checkpoint(monkeypatch, checkpoint):
    resumed = options(monkeypatch, "--resume", checkpoint)
    assert (resumed.ranks, resumed.dtype, resumed.size, resumed.steps, resumed.seed) == (4, "bf16", "tiny", 70, 3)
    assert options(monkeypatch, "--resume", checkpoint, "--steps", 90).steps == 90
    assert resumed.out == checkpoint.parent
    assert options(monkeypatch, "--resume", checkpoint, "--out", "elsewhere").out == Path("elsewhere")


@pytest.mark.parametrize(("option", "value"), [("--ranks", 2), ("--dtype", "fp32"), ("--size", "small")])
def test_a_checkpoint_is_not_resumed_with_options_that_it_is_not_made_for(
    monkeypatch, checkpoint, capsys, option, value
):
    with pytest.raises(SystemExit):
        options(monkeypatch, "--resume", checkpoint, option, value)
    assert f"it was written with {option} " in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_not_resumed(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        options(monkeypatch, "--resume", tmp_path / "nothing")
    assert "there is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--ranks"])
def test_no_steps_and_no_processes_are_refused(monkeypatch, capsys, option):
    with pytest.raises(SystemExit):
        options(monkeypatch, option, 0)
    assert f"{option}: must be 1 or more, not 0" in capsys.readouterr().err
