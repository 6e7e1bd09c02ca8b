"""Training that goes on after something has failed, or was broken off."""

import pytest
import torch
from plain import RANKS, batch, engine_of, net, train
from torch import nn

from stepstack import CheckpointError
from stepstack_deepspeed import _fsdp
from stepstack_testing import on_ranks

STAGES = range(4)


class Fails(torch.autograd.Function):
    """In the middle of a backward, when it is told to."""

    told = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.told:
            raise MemoryError("in backward")
        return grad


class MayFail(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.net.blocks[0].register_forward_hook(lambda *of: Fails.apply(of[-1]))

    def forward(self, *batch):
        return self.net(*batch)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_backward_that_failed_the_next_batch_trains_as_ever(stage):
    def on_rank(rank):
        norms = []
        for fails in (False, True):
            engine = engine_of(MayFail(), stage=stage, accumulation=2)
            for step in range(2):
                Fails.told = fails
                loss = engine(*batch(rank, 7))
                if fails:
                    with pytest.raises(MemoryError):
                        engine.backward(loss)
                Fails.told = False
                train(engine, rank, step)
                norms.append(engine.get_global_grad_norm().item())
        return norms

    for norms in on_ranks(RANKS, on_rank):
        assert norms[:2] == norms[2:]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_failed_is_none(stage):
    def on_rank(rank):
        engine = engine_of(MayFail(), stage=stage)
        Fails.told = True
        with pytest.raises(MemoryError):
            engine.backward(engine(*batch(rank, 0)))
        with pytest.raises(RuntimeError, match=r"step\(\) without a backward"):
            engine.step()

    on_ranks(RANKS, on_rank)


def test_where_torch_cannot_go_on_after_a_backward_that_failed_it_is_said(monkeypatch):
    class Old(_fsdp.FSDPModule):
        reset_iter_state = None

    monkeypatch.setattr(_fsdp, "FSDPModule", Old)
    with pytest.raises(RuntimeError, match=r"fully_shard of torch .* gives no gradients any more"):
        _fsdp.forget_backward_(object.__new__(Old))


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_loaded_in_the_middle_of_an_accumulation_goes_on_without_its_gradients(tmp_path, stage):
    def on_rank(rank):
        engine = engine_of(stage=stage, accumulation=2)
        train(engine, rank, 0)
        engine.save_checkpoint(tmp_path)
        train(engine, rank, 1)
        other = engine_of(stage=stage, accumulation=2)
        other.backward(other(*batch(rank, 9)))
        other.step()
        other.load_checkpoint(tmp_path)
        train(other, rank, 1)
        return engine.get_global_grad_norm() == other.get_global_grad_norm()

    assert on_ranks(RANKS, on_rank) == [True] * RANKS


@pytest.mark.parametrize("stage", STAGES)
def test_in_the_middle_of_an_accumulation_nothing_is_saved(tmp_path, stage):
    def on_rank(rank):
        engine = engine_of(stage=stage, accumulation=2)
        engine.backward(engine(*batch(rank, 0)))
        engine.step()
        with pytest.raises(RuntimeError, match=r"save_checkpoint\(\) with the gradients of 1 backwards"):
            engine.save_checkpoint(tmp_path)
        engine.zero_grad()
        engine.save_checkpoint(tmp_path)

    on_ranks(RANKS, on_rank)


def test_which_checkpoint_is_the_latest_is_what_the_first_rank_sees(tmp_path):
    def on_rank(rank):
        engine = engine_of()
        train(engine, rank)
        path = engine.save_checkpoint(tmp_path / "seen")
        seen, unseen = (tmp_path / name for name in (("seen", "nothing") if rank == 0 else ("nothing", "seen")))
        return engine.load_checkpoint(seen)[0] == path, engine.load_checkpoint(unseen)

    assert on_ranks(RANKS, on_rank) == [(True, (None, None))] * RANKS


def test_a_first_rank_that_cannot_write_the_latest_tag_tells_all(tmp_path):
    def on_rank(rank):
        engine = engine_of()
        train(engine, rank)
        (tmp_path / "latest.new").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="rank 0: IsADirectoryError"):
            engine.save_checkpoint(tmp_path)

    on_ranks(RANKS, on_rank)
