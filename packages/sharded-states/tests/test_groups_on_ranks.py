"""Groups without anything to train, parameters of no elements and parameters that come later, taken as torch does."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

FROZEN, EMPTY = "frozen", "empty"
GROUPS = {  # groups of indices; FROZEN has frozen parameters only, EMPTY none
    "a first group of frozen parameters": (FROZEN, (0, 1), (2,)),
    "a middle group of frozen parameters": ((0, 1), FROZEN, (2,)),
    "a last group of frozen parameters": ((0, 1), (2,), FROZEN),
    "a first group of no parameters": (EMPTY, (0, 1), (2,)),
    "a middle group of no parameters": ((0, 1), EMPTY, (2,)),
    "a last group of no parameters": ((0, 1), (2,), EMPTY),
    "groups of none and of frozen ones first": (EMPTY, FROZEN, EMPTY, (2, 1, 0)),
    "parameters of no elements": ((0, 3), (3 + 1, 1), (5, 2)),
    "a group of parameters of no elements": ((3, 4), (0, 1, 2), (5,)),
}
SHAPES = ((70, 3), (5,), (33,), (0,), (3, 0), (0, 4))


def train(groups, sharded, ranks, named=False, later=None, **options):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    frozen = [nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2)]

    def of(group):
        chosen = {FROZEN: frozen, EMPTY: []}[group] if isinstance(group, str) else [params[i] for i in group]
        return [(f"{group}.{i}", param) for i, param in enumerate(chosen)] if named else chosen

    given = [{"params": of(group), "lr": 0.1 / (at + 1)} for at, group in enumerate(groups)]
    make = ShardedOptimizer if sharded else torch.optim.AdamW
    optimizer = make(given, **({"optimizer_class": torch.optim.AdamW} if sharded else {}), **options)
    for number in range(4):
        if later is not None and number == 2:
            optimizer.add_param_group({"params": of(later), "lr": 0.3})
        for rank in ranks:
            (
                sum((param.sin() * (1 + i + number + rank)).sum() for i, param in enumerate(params)) / len(ranks)
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.grad = None  # of those that are not in the optimizer yet
    return [param.detach().clone() for param in params], [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_groups_without_anything_to_train_are_taken_as_torch_takes_them(world):
    def check(rank):
        return {
            name: train(groups, True, [rank], named=named, **options)
            for name, groups in GROUPS.items()
            for named, options in (
                (False, {"fused": True}),
                (True, {"capturable": False}),
                (False, {"shard_gradients": True}),
            )
        }

    expected = {name: train(groups, False, range(world)) for name, groups in GROUPS.items()}
    for of_rank in on_ranks(world, check):
        for name, found in of_rank.items():
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("later", [FROZEN, EMPTY, (1, 2)], ids=["frozen", "empty", "parameters"])
def test_groups_are_added_as_torch_adds_them(later):
    def check(rank):
        return train([(0,)], True, [rank], later=later)

    expected = train([(0,)], False, range(2), later=later)
    for found in on_ranks(2, check):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_frozen_later_is_skipped_and_trained_again_when_it_is_unfrozen():
    def train(make):
        p, q = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(7))
        optimizer = make([p, q])
        for frozen in (False, True, True, False):
            q.requires_grad_(not frozen)
            (p.square().sum() + q.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach(), q.detach()]

    expected = train(lambda params: torch.optim.AdamW(params, lr=0.1))
    for found in on_ranks(2, lambda _: train(lambda params: ShardedOptimizer(params, torch.optim.AdamW, lr=0.1))):
        torch.testing.assert_close(found, expected)


def test_a_model_of_which_a_rank_trains_nothing_is_refused_on_all():
    def check(rank):
        p = nn.Parameter(torch.ones(3), requires_grad=rank == 0)
        with pytest.raises(ValueError, match="rank 1: no parameters: none of those given has requires_grad=True"):
            ShardedOptimizer([p], torch.optim.SGD)

    on_ranks(2, check)


class Own(nn.Parameter):
    """A subclass with memory of its own."""


def test_a_parameter_of_a_subclass_is_trained_and_stays_one():
    p = Own(torch.ones(3))
    optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0)
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p, torch.zeros(3))
    assert type(p) is Own


def odd_parameters():
    with torch.inference_mode():
        inferred = nn.Parameter(torch.ones(3))
    return {
        "sparse_coo": nn.Parameter(torch.eye(3).to_sparse()),
        "TwoTensor": nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))),
        "inference_mode": inferred,
        "complex64": nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        "meta device": nn.Parameter(torch.ones(3, device="meta")),
        "no shape yet": nn.LazyLinear(3).weight,
        "result of an operation": nn.Parameter(torch.ones(3)) * 2,
    }


def test_parameters_that_cannot_be_cut_are_refused_by_name():
    for message, odd in odd_parameters().items():
        with pytest.raises((TypeError, ValueError), match=f"'odd'.*{message}"):
            ShardedOptimizer([("fine", nn.Parameter(torch.ones(3))), ("odd", odd)], torch.optim.SGD)


def test_parameters_that_cannot_be_cut_may_be_there_frozen():
    frozen = [nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)]
    frozen += [odd.detach() for message, odd in odd_parameters().items() if message != "no shape yet"]
    ShardedOptimizer([nn.Parameter(torch.ones(3)), *frozen], torch.optim.SGD)


def test_some_names_are_refused_as_torch_refuses_them():
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for params in ([("p", p), q], [{"params": [("p", p)]}, {"params": [q]}]):
        with pytest.raises(ValueError, match=r"some param.*have names"):
            ShardedOptimizer(params, torch.optim.SGD)
    optimizer = ShardedOptimizer([("p", p)], torch.optim.SGD)
    with pytest.raises(ValueError, match=r"some param.*have names"):
        optimizer.add_param_group({"params": [q]})
