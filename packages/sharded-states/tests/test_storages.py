"""A parameter in a bucket looks as it did before: its own storage, its own version counter."""

import copy
import io
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks


class Odd(nn.Module):
    """Parameters of many shapes and orders in memory, all of one dtype."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(7, 5)
        self.number = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(3, 0))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.to(dtype)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def odd(dtype=torch.float32):
    model = Odd(dtype)
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.5)
    step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_parameter_has_a_storage_of_its_own_and_its_strides(dtype):
    model, _ = odd(dtype)
    for param, before in zip(model.parameters(), Odd(dtype).parameters(), strict=True):
        assert param.stride() == before.stride()
        assert torch.equal(param, before - 0.5)
        if param.numel():
            assert param.untyped_storage().nbytes() == param.numel() * param.element_size()
    storages = [param.untyped_storage().data_ptr() for param in model.parameters() if param.numel()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_keep_every_weight(dtype, tmp_path):
    model, _ = odd(dtype)
    model.to(memory_format=torch.contiguous_format)  # which is all that it saves
    model = nn.ModuleDict({"head": model.head, "number": nn.ParameterList([model.number])})
    save_model(model, str(tmp_path / "model"))
    save_file(model.state_dict(), tmp_path / "dict")
    for name in ("model", "dict"):
        loaded = load_file(tmp_path / name)
        assert loaded.keys() == model.state_dict().keys()
        assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


def test_a_saved_model_or_part_is_as_large_as_its_weights():
    def size(values):
        torch.save(values, file := io.BytesIO())
        return file.tell()

    model, _ = odd()
    whole, plain = size(model.state_dict()), size(Odd().state_dict())
    assert abs(whole - plain) < 128
    part, fresh = model.head.state_dict(), nn.Linear(7, 5).state_dict()
    assert size(part) == size(fresh)


def test_memory_is_kept_by_the_model_when_the_optimizer_is_gone_and_by_nothing_else():
    model, optimizer = odd()
    values = [param.detach().clone() for param in model.parameters()]
    bucket = weakref.ref(optimizer._backward.buckets[0])
    del optimizer
    assert bucket() is None
    torch.full((4096,), 7.0)  # what would be put where it was
    assert all(torch.equal(param, value) for param, value in zip(model.parameters(), values, strict=True))


def test_a_copy_is_in_storages_of_its_own():
    model, optimizer = odd()
    copied = copy.deepcopy(model)
    step(model, optimizer)
    for param, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(param, other - 0.5)


def test_parameters_in_shared_memory_are_refused_by_name():
    model = nn.Linear(2, 2).share_memory()
    with pytest.raises(ValueError, match="'weight' is in shared memory"):
        ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)


def two_losses(optimizer_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = optimizer_of(model)
    x = torch.ones(3, 4, requires_grad=True)
    return model, optimizer, model(x).square().mean(), model(x).sin().mean()


WRITES = {
    "step": lambda optimizer: optimizer.step(),
    "load": lambda optimizer: optimizer.load_full_state_dict(optimizer.full_state_dict(rank0_only=False)),
}


# Under overlap a graph that is kept is a view that is held, and that is said.
@pytest.mark.filterwarnings("ignore:.*has views that something holds")
def test_a_backward_through_a_graph_made_before_a_write_raises():
    def check(rank):
        said = []
        for overlap in (False, True):
            for write in WRITES.values():
                for inner in (torch.optim.SGD, torch.optim.AdamW):
                    model, optimizer, first, second = two_losses(
                        lambda model, inner=inner: ShardedOptimizer(model.named_parameters(), inner, lr=0.1)
                    )
                    if overlap:
                        optimizer.overlap_gather(model)
                    first.backward()
                    optimizer.step()
                    model(torch.ones(3, 4)).mean().backward()
                    optimizer.step()
                    optimizer.synchronize()
                    x = torch.ones(3, 4, requires_grad=True)
                    second = model(x).sin().mean()
                    write(optimizer)
                    try:
                        second.backward()
                    except RuntimeError as error:
                        said.append("modified by an inplace operation" in str(error))
        return said

    assert on_ranks(2, check) == [[True] * 8] * 2
    assert check(0) == [True] * 8


def test_a_graph_through_parameters_that_a_step_has_not_written_stays_good():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))
    optimizer = ShardedOptimizer([("a", a), ("b", b)], torch.optim.SGD, lr=0.1)
    kept = b.square().sum()
    a.sum().backward()
    optimizer.step()
    kept.backward()
    optimizer.step()
    assert torch.equal(b, torch.full((3,), 2.0) - 0.1 * 4)


def test_a_graph_made_before_the_first_ranks_values_came_raises():
    def check(rank):
        torch.manual_seed(rank)
        param = nn.Parameter(torch.randn(3))
        loss = param.square().sum()
        ShardedOptimizer([("param", param)], torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()

    on_ranks(2, check)
