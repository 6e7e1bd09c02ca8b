"""Ranks that are given different things all say so and name what differs; one that refuses its own tells the others."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def param(n=4):
    return nn.Parameter(torch.ones(n))


class Momentum(SGD):
    """Has an argument that is in no group."""

    def __init__(self, params, lr=0.1, *, backend="auto"):
        self.backend = backend
        super().__init__(params, lr, momentum=0.9)


def construct(*, groups=None, optimizer_class=AdamW, **options):
    return ShardedOptimizer(groups or [param()], optimizer_class, **options)


DIFFERENT = {  # by rank: what is given to it, and what both say
    "the learning rate": (lambda rank: {"lr": 0.1 * rank}, "option lr = 0.1; on rank 0, option lr = 0.0"),
    "betas": (lambda rank: {"betas": (0.9, 0.9 + 0.09 * rank)}, r"betas = \(0.9, 0.99\); on rank 0, option betas"),
    "a learning rate as a tensor": (
        lambda rank: {"lr": torch.tensor(0.5 + rank)},
        r"lr = tensor torch.float32 \(\) 1.5; on rank 0, .* 0.5",
    ),
    "the class": (
        lambda rank: {"optimizer_class": (AdamW, SGD)[rank], "lr": 0.1},
        "optimizer_class = torch.optim.sgd.SGD; on rank 0, .*torch.optim.adamw.AdamW",
    ),
    "an argument that is in no group": (
        lambda rank: {"optimizer_class": Momentum, "backend": ("auto", "torch")[rank]},
        "option backend = 'torch'; on rank 0, option backend = 'auto'",
    ),
    "an argument that only one has": (
        lambda rank: {"amsgrad": True} if rank else {},
        "option amsgrad = True; on rank 0, .*find_unused",
    ),
    "a group's option": (
        lambda rank: {"groups": [{"params": [param()], "weight_decay": 0.1 * rank}]},
        "group 0: option weight_decay = 0.1; on rank 0, group 0: option weight_decay = 0.0",
    ),
    "which group a parameter is in": (
        lambda rank: {"groups": [{"params": [param()] * (1 - rank)}, {"params": [param()] * rank}, [param()]][:2]},
        "in group 1; on rank 0, .*in group 0",
    ),
    "find_unused_parameters": (lambda rank: {"find_unused_parameters": bool(rank)}, "find_unused = True; on rank 0"),
    "zero_fill_unused": (lambda rank: {"zero_fill_unused": bool(rank)}, "zero_fill_unused = True; on rank 0"),
    "grad_dtype": (lambda rank: {"grad_dtype": (None, torch.bfloat16)[rank]}, "torch.bfloat16; on rank 0.*None"),
    "state_device": (lambda rank: {"state_device": (None, "cpu")[rank]}, "state_device = cpu; on rank 0"),
    "bucket_cap_mb": (lambda rank: {"bucket_cap_mb": 1.0 + rank}, "bucket_cap_mb = 2.0; on rank 0"),
    "norm_owner": (
        lambda rank: {"groups": [param(), param()], "norm_owner": lambda name, _: name if rank else name[:0]},
        "of owner 0; on rank 0, ",
    ),
}


def test_ranks_that_are_given_different_things_all_say_what_differs():
    def attempt(rank):
        said = {}
        for name, (given, _) in DIFFERENT.items():
            with pytest.raises(ValueError, match="the ranks of the mesh must be given") as caught:
                construct(**given(rank))
            said[name] = str(caught.value)
        return said

    first, second = on_ranks(2, attempt)
    for name, (_, message) in DIFFERENT.items():
        assert re.search(f"rank 1: .*here is .*{message}", second[name]), second[name]
        assert re.search("rank 0: .*here is .*on rank 1, ", first[name]), first[name]


def test_what_may_differ_between_ranks_is_not_compared():
    def attempt(rank):
        class Hooked(SGD):
            def __init__(self, params, note, device, **options):
                super().__init__(params, **options)

        note = [object(), torch.Generator().manual_seed(rank), {"a": lambda: rank}]
        construct(optimizer_class=Hooked, note=note, device=f"cuda:{rank}")
        construct(optimizer_class=Hooked, note=note, device=torch.device("cuda", rank))

    on_ranks(2, attempt)


def test_a_rank_in_another_mesh_of_the_same_size_is_named():
    def make(rank):
        ShardedOptimizer([param()], SGD, lr=0.1 * rank, mesh=init_device_mesh("cpu", (2, 2)))

    def attempt(rank):
        with pytest.raises(ValueError, match="option lr") as caught:
            make(rank == 2)
        return re.search("on rank ([0-9])", str(caught.value)).group(1)

    assert on_ranks(4, attempt) == ["2", "2", "0", "2"]


class NoRoom(SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        if dist.get_rank() == 1:
            raise MemoryError("no room")


def add(group, optimizer_class=SGD):
    ShardedOptimizer([param()], optimizer_class).add_param_group(group)


REFUSED = {  # what rank 1 of 2 is given and refuses, and what rank 0 says
    "no parameters": (lambda rank: construct(groups=iter([param()][rank:])), "ValueError: rank 1: no parameters"),
    "nothing trainable": (lambda rank: construct(groups=[param().requires_grad_(not rank)]), "rank 1: no param.*none"),
    "no class": (lambda rank: construct(optimizer_class=None if rank else SGD), "TypeError: rank 1: optimizer_class"),
    "an option": (
        lambda rank: construct(bucket_cap_mb=-rank or 25.0),
        "rank 1: bucket_cap_mb must be positive",
    ),
    "a norm_owner that fails": (
        lambda rank: construct(norm_owner=lambda name, param: 1 // (1 - rank)),
        "it said ZeroDivisionError",
    ),
    "a class that raises": (lambda rank: construct(optimizer_class=NoRoom), "it said MemoryError: no room"),
    "a group to add": (lambda rank: add([] if rank else {"params": [param()]}), "it said TypeError: rank 1: .* a dict"),
    "another group to add": (lambda rank: add({"params": [param()], "lr": 0.1 * rank}), "0.0; on rank 1, .*lr = 0.1"),
}


def test_a_rank_that_refuses_what_it_was_given_tells_the_others_at_once():
    def attempt(rank):
        said = {}
        for name, (make, _) in REFUSED.items():
            start = time.monotonic()
            with pytest.raises((ValueError, TypeError, ZeroDivisionError, MemoryError)) as caught:
                make(rank)
            assert time.monotonic() - start < 5, "that was the process group's timeout"
            said[name] = str(caught.value)
        return said

    first, _ = on_ranks(2, attempt)
    for name, (_, message) in REFUSED.items():
        assert re.search(message, first[name]), (name, first[name])
        assert "rank 1" in first[name]
