"""What common lines of other code do to a model whose optimizer is sharded: what their users mean, or an error."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 5))
    return model, ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)


def step(model, optimizer):
    model(torch.ones(5)).square().sum().backward()
    optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_zeroing_the_model_s_gradients_after_a_step_or_not_at_all_is_the_same():
    results = []
    for forget in (lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad(), lambda m, o: None):
        model, optimizer = make()
        for _ in range(3):
            step(model, optimizer)
            forget(model, optimizer)
        results.append(values(model))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_weights_may_be_loaded_in_place():
    model, optimizer = make()
    other, _ = make()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    model.load_state_dict(other.state_dict())
    assert same(values(model), values(other))
    before = values(model)
    step(model, optimizer)
    assert not same(values(model), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: setattr(model[0].weight, "data", model[0].weight.detach().clone()),
    ],
    ids=["to another dtype", "param.data"],
)
def test_parameters_that_are_replaced_or_moved_are_refused_by_name(change):
    model, optimizer = make()
    change(model)
    model(torch.ones(5, dtype=model[0].weight.dtype)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight'"):
        optimizer.step()


def test_a_copy_of_the_model_is_a_model_of_its_own():
    model, optimizer = make()
    average = copy.deepcopy(model)
    before = values(average)
    step(model, optimizer)
    assert same(values(average), before)
    average(torch.ones(5)).sum().backward()
    assert average[0].weight.grad is not None
    assert not hasattr(average[0].weight, "grad_shard")


def test_weights_may_be_swapped_in_place_and_back():
    model, optimizer = make()
    step(model, optimizer)
    trained = values(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for p, value in zip(model.parameters(), trained, strict=True):
            p.copy_(value)
    reference, its = make()
    for _ in range(2):
        step(reference, its)
    step(model, optimizer)
    assert same(values(model), values(reference))


def test_a_saved_model_loads_anywhere():
    model, _ = make()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 5))
    fresh.load_state_dict(torch.load(file))
    assert same(values(fresh), values(model))


def test_a_model_is_pickled_without_its_gradients_and_keeps_its_other_attributes():
    def check(rank):
        model, _optimizer = make()
        model[0].weight.tensor_parallel = True
        model(torch.ones(5)).square().sum().backward()
        copied = pickle.loads(pickle.dumps(model))
        assert vars(copied[0].weight) == {"tensor_parallel": True}
        return same(values(copied), values(model))

    assert check(0)
    assert on_ranks(2, check) == [True, True]


def test_what_an_optimizer_has_left_on_a_model_goes_with_it():
    model, optimizer = make()
    step(model, optimizer)
    del optimizer
    gc.collect()
    assert all(vars(p) == {} for p in model.parameters())


def test_clip_from_torch_on_param_groups_clips():
    model, optimizer = make()
    model(torch.ones(5)).square().sum().backward()
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(shards, 1e-3)
    assert norm > 1e-3
    clipped = torch.cat(optimizer.grad_shards())
    torch.testing.assert_close(clipped.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_give_the_same(reentrant):
    def train(rank, checkpointed):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        optimizer = ShardedOptimizer(layers.named_parameters(), torch.optim.AdamW, lr=0.1, bucket_cap_mb=1e-4)
        for number in range(3):
            x = torch.full((8,), float(rank + number), requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            x.square().sum().backward()
            optimizer.step()
        return values(layers)

    for ours, theirs in zip(on_ranks(2, train, True), on_ranks(2, train, False), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_tied_weights_have_one_gradient():
    def train(make):
        weight = nn.Parameter(torch.linspace(0, 1, 100).view(10, 10))
        optimizer = make([weight])
        for _ in range(3):
            nn.functional.linear(torch.tanh(weight[3]), weight).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    ours = train(lambda params: ShardedOptimizer(params, torch.optim.SGD, lr=0.1))
    assert torch.equal(ours, train(lambda params: torch.optim.SGD(params, lr=0.1)))


def test_two_optimizers_on_parts_of_a_model_do_not_disturb_each_other():
    def train(make):
        torch.manual_seed(0)
        generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizers = [make(part.parameters()) for part in (generator, critic)]
        for number in range(4):
            optimizer = optimizers[number % 2]
            optimizer.zero_grad()
            critic(generator(torch.ones(3))).square().sum().backward()
            optimizer.step()
        return values(generator) + values(critic)

    ours = train(lambda params: ShardedOptimizer(params, torch.optim.SGD, lr=0.1))
    for a, b in zip(ours, train(lambda params: torch.optim.SGD(params, lr=0.1)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_weights_that_are_put_in_the_place_of_others_are_trained_by_nobody_as_in_torch():
    model, optimizer = make()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    before = values(model)
    step(model, optimizer)
    assert same(values(model), before)
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    step(model, optimizer)
    assert not same(values(model), before)


def test_a_saved_part_of_a_model_loads_and_is_no_larger_than_its_clones():
    model, _ = make()
    sizes = []
    for values_of in (lambda state: state, lambda state: {name: value.clone() for name, value in state.items()}):
        file = io.BytesIO()
        torch.save(values_of(model[2].state_dict()), file)
        sizes.append(file.tell())
        file.seek(0)
        fresh = nn.Linear(40, 5)
        fresh.load_state_dict(torch.load(file))
        assert same(values(fresh), values(model[2]))
    assert sizes[0] - sizes[1] < 128  # of an OrderedDict and of a dict


@pytest.mark.filterwarnings("ignore:.*overlap_gather is off from here on")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at an input's
def test_a_compiled_model_gives_the_same():
    def train(rank, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 5))
        optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=1e-4)
        optimizer.overlap_gather(model)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        for number in range(3):
            forward(torch.full((5,), float(rank + number))).square().sum().backward()
            optimizer.step()
        optimizer.synchronize()
        return values(model)

    # The first compilation in a process loads the compiler.
    for ours, theirs in on_ranks(2, lambda rank: (train(rank, True), train(rank, False)), timeout=60):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["torch's AdamW", "sharded"])
def test_hooks_of_state_dicts_are_called_as_torch_calls_them(sharded):
    p = nn.Parameter(torch.ones(3))
    kwargs = {"optimizer_class": torch.optim.AdamW} if sharded else {}
    optimizer = (ShardedOptimizer if sharded else torch.optim.AdamW)([p], lr=0.1, **kwargs)
    called = []

    def on_the_way_out(_, state_dict):
        called.append("after saving")
        return {**state_dict, "note": 7}

    def on_the_way_in(_, state_dict):
        called.append(f"before loading {state_dict.pop('note')}")
        changed = {**state_dict["param_groups"][0], "lr": 0.5}
        return {**state_dict, "param_groups": [changed]}

    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(on_the_way_out)
    optimizer.register_load_state_dict_pre_hook(on_the_way_in)
    optimizer.register_load_state_dict_post_hook(lambda it: called.append(f"after loading {it.param_groups[0]['lr']}"))
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    assert called == ["before saving", "after saving", "before loading 7", "after loading 0.5"]
    assert state_dict["note"] == 7
