"""The demo's function `train`, on forked ranks."""

import threading
from argparse import Namespace

import matplotlib.pyplot  # noqa: F401  # once here, not in each forked rank
import pytest
import torch
import torch.distributed as dist
import train_gpt

from stepstack_testing import on_ranks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_that_is_stopped_and_resumed_ends_as_one_that_is_not(tmp_path, dtype):
    text = torch.randint(256, (10_000,), dtype=torch.uint8)

    def train(rank, stopped, **options):
        stop = threading.Event()
        if stopped and rank == 1:  # one rank is told, and both stop
            stop.set()
        train_gpt.stop_signal = lambda: stop
        train_gpt.standard_library = lambda: (text[:9000], text[9000:])
        train_gpt.join_the_others = lambda: (rank, 2, torch.device("cpu"))
        dist.destroy_process_group = lambda: None
        train_gpt.train(Namespace(size="tiny", steps=15, ranks=2, dtype=dtype, seed=0, **options))

    on_ranks(2, lambda rank: train(rank, False, resume=None, out=tmp_path / "whole"))
    on_ranks(2, lambda rank: train(rank, True, resume=None, out=tmp_path / "parts"))
    on_ranks(2, lambda rank: train(rank, False, resume=tmp_path / "parts/step-000010", out=tmp_path / "parts"))

    assert not (tmp_path / "parts/step-000010/training.png").exists()
    for file in ("training.pt", "optimizer-0.pt", "optimizer-1.pt"):
        whole, parts = (torch.load(tmp_path / run / "step-000015" / file) for run in ("whole", "parts"))
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert (tmp_path / "parts/training.png").exists()
