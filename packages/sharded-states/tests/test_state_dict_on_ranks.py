"""`state_dict()` as trainers call it: the whole where it was consolidated, elsewhere a share that says so."""

import copy
import warnings

import pytest
import torch
from small import make, params_of, step
from torch.distributed.device_mesh import init_device_mesh

from stepstack_testing import on_ranks

SHAPES = {"w": (9, 7), "b": (70,), "s": ()}


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    return True


def plain(times):
    params = params_of(**SHAPES)
    optimizer = torch.optim.AdamW(params.items(), lr=0.1, fused=True)
    step(params, optimizer, times)
    return params, optimizer


def as_lightning_saves(rank, optimizer):
    """Its strategy: `optimizer_state`, on every rank; what rank 0 gets is written."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if rank == 0 else {}
    return optimizer.state_dict()


def test_what_rank_0_saves_after_consolidation_goes_on_anywhere():
    def save(rank):
        params = params_of(**SHAPES)
        optimizer = make(params)
        step(params, optimizer, 2)
        optimizer.param_groups[0]["lr"] = 0.05
        saved = as_lightning_saves(rank, optimizer)
        return saved, [param.detach() for param in params.values()]

    def load(rank, saved, weights):
        params = params_of(**SHAPES)
        optimizer = make(params)
        with torch.no_grad():
            for param, weight in zip(params.values(), weights, strict=True):
                param.copy_(weight)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.param_groups[0]["lr"] == 0.05
        step(params, optimizer, 2)
        return [param.detach() for param in params.values()]

    reference, optimizer = plain(2)
    (saved, weights), *others = on_ranks(3, save)
    assert [of_rank for of_rank, _ in others] == [{}, {}]
    same(saved["state"], optimizer.state_dict()["state"])
    assert saved["param_groups"][0]["params"] == [0, 1, 2]
    optimizer.load_state_dict(copy.deepcopy(saved))
    step(reference, optimizer, 2)
    for ranks in (1, 2, 4):
        for params in on_ranks(ranks, load, saved, weights):
            same(params, [param.detach() for param in reference.values()])


def test_a_share_says_that_it_is_one_once_and_not_where_all_is_there():
    def check(rank):
        params = params_of(**SHAPES)
        optimizer = make(params)
        optimizer.load_state_dict(optimizer.state_dict())  # before the first step, as accelerate's prepare does
        step(params, optimizer)
        with pytest.warns(
            UserWarning, match=rf"rank {rank}: state_dict\(\) has this rank's share .* one of 2, .*local_"
        ):
            share = optimizer.state_dict()
        assert optimizer.state_dict().keys() == share.keys() == optimizer.local_state_dict().keys()
        other = make(params_of(**SHAPES))
        other.load_state_dict(share)
        same(other.local_state_dict()["state"], share["state"])
        optimizer.consolidate_state_dict(to=1)
        assert ("cut" in optimizer.state_dict()) == (rank == 0)
        optimizer.consolidate_state_dict(to=None)
        whole = optimizer.state_dict()
        assert "cut" not in whole
        assert "cut" in optimizer.local_state_dict()
        step(params, optimizer)
        assert "cut" in optimizer.state_dict()  # what was gathered is of the step before
        optimizer.consolidate_state_dict(to=None)
        optimizer.load_state_dict(whole)
        assert "cut" in optimizer.state_dict()
        with pytest.raises(ValueError, match="to must be a rank of the mesh, 0 to 1, or None for all of them; got 2"):
            optimizer.consolidate_state_dict(to=2)
        replicated = make(params_of(**SHAPES), mesh=init_device_mesh("cpu", (2, 1)))
        step(params, replicated)
        replicated.state_dict()  # each rank has all

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, check)


def test_all_ranks_say_so_where_one_was_given_a_share_of_another_rank_or_of_another_kind():
    def check(rank):
        params = params_of(**SHAPES)
        optimizer = make(params, inner_dtype=torch.float64)
        step(params, optimizer)
        share, whole = optimizer.local_state_dict(), optimizer.full_state_dict(rank0_only=False)
        shares = [None, None]
        torch.distributed.all_gather_object(shares, share)
        before = copy.deepcopy(share["state"])
        with pytest.raises(ValueError, match=r"rank 1: this state dict doesn't fit: .* consolidate_state_dict\(\)"):
            optimizer.load_state_dict(shares[0])
        with pytest.raises(ValueError, match=rf"rank {rank}: some ranks were given whole states and others a share"):
            optimizer.load_state_dict(whole if rank else share)
        for spoil in (lambda state: state.pop("state"), lambda state: state["state"].popitem()):
            spoilt = copy.deepcopy(share)
            if rank == 1:
                spoil(spoilt)
            with pytest.raises(ValueError, match="rank 1: "):
                optimizer.load_state_dict(spoilt)
        with pytest.raises(TypeError, match="rank 0: a whole state dict must be a dict"):
            optimizer.load_state_dict(7 if rank == 0 else whole)
        assert same(optimizer.local_state_dict()["state"], before)

    on_ranks(2, check)
