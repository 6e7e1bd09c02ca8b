import time

import pytest
import torch
import torch.distributed as dist

from stepstack_testing import RankError, on_ranks


def test_every_rank_runs_and_answers_in_order():
    def add_up(rank, start):
        total = torch.tensor(float(rank + start))
        dist.all_reduce(total)
        return rank, total.item()

    assert on_ranks(3, add_up, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_an_error_on_one_rank_is_raised_here_with_its_rank():
    def fail(rank):
        if rank == 1:
            raise ValueError("no such thing")

    with pytest.raises(RankError, match="rank 1") as caught:
        on_ranks(2, fail, timeout=1.0)
    assert isinstance(caught.value.errors[1], ValueError)


def test_a_rank_that_waits_for_another_for_ever_ends():
    def wait(rank):
        if rank == 0:
            dist.barrier()
        else:
            time.sleep(3)

    with pytest.raises(RankError, match="rank 0"):
        on_ranks(2, wait, timeout=1.0)
