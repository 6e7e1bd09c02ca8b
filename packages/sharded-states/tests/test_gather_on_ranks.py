"""Gathering under the next forward: whoever reads a parameter finds it whole."""

import copy
import gc
import pickle

import torch
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks


def half_done():
    """A model of two layers, each a bucket, and its optimizer after a step that has only started to gather."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, bucket_cap_mb=64 * 64 * 4 / 2**20)
    optimizer.overlap_gather(model)
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    return model, optimizer


READS = {
    "forward": (lambda model: model(torch.ones(64)), 0),
    "forward of a part": (lambda model: model[1](torch.ones(64)), 1),
    "eval": (lambda model: model.eval()(torch.ones(64)), 0),
    "state dict": (lambda model: model.state_dict(), 0),
    "state dict of a part": (lambda model: model[0].state_dict(), 1),
}


def test_whoever_reads_a_parameter_waits_for_it_alone():
    def check(rank):
        waiting = {}
        for name, (read, _) in READS.items():
            model, optimizer = half_done()
            assert len(optimizer._gather._pending) == 2
            read(model)
            waiting[name] = len(optimizer._gather._pending)
        return waiting

    assert on_ranks(2, check) == [{name: waiting for name, (_, waiting) in READS.items()}] * 2


def test_weights_loaded_while_gathers_are_under_way_stay():
    def check(rank):
        model, optimizer = half_done()
        loaded = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        model.load_state_dict(loaded)
        waiting = len(optimizer._gather._pending)
        optimizer.synchronize()
        return waiting, all((p == 7).all().item() for p in model.parameters())

    assert on_ranks(2, check) == [(0, True)] * 2


def test_a_group_added_later_is_gathered_in_the_step_until_it_is_waited_for_too():
    def check(rank):
        model, optimizer = half_done()
        model.append(nn.Linear(64, 64))
        optimizer.add_param_group({"params": [*model[2].parameters()]})
        waiting = []
        for _ in range(2):
            model(torch.ones(64)).sum().backward()
            optimizer.step()
            waiting.append(len(optimizer._gather._pending))
            optimizer.overlap_gather(model)
        return waiting

    assert on_ranks(2, check) == [[2, 3]] * 2


def test_an_optimizer_that_goes_leaves_its_model_whole():
    def check(rank):
        gc.freeze()  # what has been there before need not be looked at
        model, optimizer = half_done()
        under_way = list(optimizer._gather._pending.values())
        del optimizer
        gc.collect()
        assert not any(gather._works for gather in under_way)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, second = on_ranks(2, check)
    assert torch.equal(first, second)


def test_a_model_is_copied_without_what_its_modules_wait_for():
    def check(rank):
        model, optimizer = half_done()
        optimizer.synchronize()
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        for copied in copies:
            copied(torch.ones(64))
        return len(optimizer._gather._pending)

    assert on_ranks(2, check) == [2, 2]
