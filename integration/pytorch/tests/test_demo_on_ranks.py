"""The demo's function `train`, on forked ranks."""

import threading
from argparse import Namespace
from itertools import pairwise

import matplotlib.pyplot  # noqa: F401  # once here, not in each forked rank
import pytest
import torch
import torch.distributed as dist
import train_gpt

from stepstack import load_checkpoint
from stepstack_testing import on_ranks


def losses_of(folder, ranks, dtype="fp32"):
    """Run for 30 steps on so many ranks; after 10 and after 20 steps, stop and go on with the next number."""
    text = torch.randint(256, (10_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def train(rank, ranks, stopped, **options):
        stop = threading.Event()
        if stopped and rank == ranks - 1:  # one rank is told, and all stop
            stop.set()
        train_gpt.stop_signal = lambda: stop
        train_gpt.standard_library = lambda: (text[:9000], text[9000:])
        train_gpt.join_the_others = lambda: (rank, ranks, torch.device("cpu"))
        dist.destroy_process_group = lambda: None
        train_gpt.train(Namespace(size="tiny", steps=30, batch=12, dtype=dtype, seed=0, out=folder, **options))

    for number, some in enumerate(ranks):
        stopped = number < len(ranks) - 1
        on_ranks(some, lambda rank: train(rank, some, stopped, resume=folder if number else None))  # noqa: B023
    step, extra, _ = load_checkpoint(folder)
    assert step == 30
    assert (folder / "training.png").exists()
    return torch.tensor(extra["history"]["training"]), torch.tensor(extra["history"]["validation"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_that_is_stopped_and_resumed_ends_as_one_that_is_not(tmp_path, dtype):
    whole = losses_of(tmp_path / "whole", [2], dtype)
    parts = losses_of(tmp_path / "parts", [2, 2, 2], dtype)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_a_run_goes_on_with_the_same_losses_on_any_number_of_ranks(tmp_path):
    whole = losses_of(tmp_path / "whole", [1])
    for ranks in ([2, 1, 4], [4, 3, 1]):
        parts = losses_of(tmp_path / str(ranks), ranks)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for before, after in pairwise(whole[1][:, 1]):
        assert after < before  # it learns
