"""The script that a newcomer reads, as it is run."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "deepspeed_engine.py"
TINY = ("--size", "tiny", "--out", "runs")


def run(folder, *words):
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_example_trains_and_goes_on_with_two_processes_in_another_stage(tmp_path):
    said = run(tmp_path, "-W", "error", SCRIPT, *TINY, "--steps", "10")
    step = re.search(r"^step 10: loss (\S+), gradient norm (\S+), lr 2\.3e-03$", said, re.MULTILINE)
    assert step, said
    assert 4 < float(step[1]) < 5.7
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(tmp_path, *launch, SCRIPT, *TINY, "--steps", "20", "--stage", "3", "--resume", "runs")
    assert f"runs/global_step10/step_10, where the loss was {float(step[1]):.2f}." in said
    step = re.search(r"^step 20: loss (\S+),", said, re.MULTILINE)
    assert step, said
    assert float(step[1]) < 5
    assert (tmp_path / "runs" / "latest").read_text() == "global_step20"
