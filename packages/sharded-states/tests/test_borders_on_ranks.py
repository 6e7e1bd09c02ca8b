"""What is refused, and how: the parameter, the rank, what to do."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from stepstack_sharded_states import ShardedOptimizer, within_node_mesh
from stepstack_testing import on_ranks

SGD = torch.optim.SGD


def refusal_on_rank_1(make, error):
    """What rank 1 of 2 says to `make(rank)`; both ranks must refuse."""

    def attempt(rank):
        with pytest.raises(error) as caught:
            make(rank)
        return str(caught.value)

    return on_ranks(2, attempt)[1]


def param(n=4, **kwargs):
    return nn.Parameter(torch.ones(n, **kwargs))


def test_no_parameters():
    assert re.search("rank 1.*no parameters", refusal_on_rank_1(lambda _: ShardedOptimizer([], SGD), ValueError))


def test_nothing_trainable():
    frozen = param().requires_grad_(False)
    assert "requires_grad" in refusal_on_rank_1(lambda _: ShardedOptimizer([frozen], SGD), ValueError)


def test_the_same_parameter_twice():
    p = param()
    message = refusal_on_rank_1(lambda _: ShardedOptimizer([("embedding", p), ("head", p)], SGD), ValueError)
    assert "rank 1" in message
    assert "'head'" in message
    assert "'embedding'" in message


def test_the_same_parameter_in_two_groups():
    p = param()
    assert "twice" in refusal_on_rank_1(lambda _: ShardedOptimizer([{"params": [p]}, {"params": p}], SGD), ValueError)


def test_a_parameter_on_another_device_type_than_the_mesh():
    def make(rank):
        mesh = init_device_mesh("cpu", (2,))
        ShardedOptimizer([("fine", param()), ("lost", param(device="meta"))], SGD, mesh=mesh)

    assert re.search("rank 1.*'lost'.*meta", refusal_on_rank_1(make, ValueError))


def test_parameters_on_the_cpu_and_a_mesh_of_other_devices():
    def make(rank):
        mesh = DeviceMesh("meta", torch.arange(2), _init_backend=False)
        ShardedOptimizer([("w", param())], SGD, mesh=mesh)

    assert re.search("rank 1.*'w' is on 'cpu'.*'meta' devices", refusal_on_rank_1(make, ValueError))


def test_a_model_on_the_meta_device():
    message = refusal_on_rank_1(lambda _: ShardedOptimizer([("w", param(device="meta"))], SGD), ValueError)
    assert re.search("rank 1.*'w'.*meta", message)


def test_a_mesh_that_does_not_divide():
    message = refusal_on_rank_1(lambda _: within_node_mesh(size=3), ValueError)
    assert re.search("rank 1.*2 ranks.*3", message)


def test_a_mesh_with_three_axes():
    def make(rank):
        ShardedOptimizer([param()], SGD, mesh=init_device_mesh("cpu", (1, 1, 2)))

    assert re.search("rank 1.*3 axes", refusal_on_rank_1(make, ValueError))


def test_a_mesh_that_this_rank_is_not_in():
    def make(rank):
        mesh = DeviceMesh("cpu", torch.tensor([0]))
        if rank == 0:
            ShardedOptimizer([param()], SGD, mesh=mesh)
            raise ValueError("rank 0 is fine")
        ShardedOptimizer([param()], SGD, mesh=mesh)

    assert re.search(r"rank 1 is not in the mesh \[0\]", refusal_on_rank_1(make, ValueError))


def test_a_dtensor_parameter():
    def make(rank):
        p = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,))))
        ShardedOptimizer([("w", p)], SGD)

    assert re.search("rank 1.*'w' is a DTensor.*FusedAdamW", refusal_on_rank_1(make, TypeError))


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (torch.ones(3), TypeError),
        ([1, 2], TypeError),
        ([{"weights": []}], TypeError),
        ({param()}, TypeError),
        ([{"params": {param()}}], TypeError),
        ([param() * 2], ValueError),
    ],
    ids=["a tensor", "numbers", "a group without params", "a set", "a group of a set", "not a leaf"],
)
def test_other_things_than_parameters(params, error):
    with pytest.raises(error, match="this process"):
        ShardedOptimizer(params, SGD)


def test_something_else_than_an_optimizer_class():
    with pytest.raises(TypeError, match="optimizer_class"):
        ShardedOptimizer([param()], SGD([param()]))


@pytest.mark.parametrize("whole", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_that_needs_whole_parameters(whole):
    with pytest.raises(TypeError, match=f"{whole.__name__} is not elementwise"):
        ShardedOptimizer([param()], whole)


def test_a_capacity_of_nothing():
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive, got 0"):
        ShardedOptimizer([param()], SGD, bucket_cap_mb=0)


class Nested(torch.autograd.Function):
    """A backward that runs a backward of its own, as a re-entrant activation checkpoint does."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.inside = inside
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            (ctx.inside[0] * 2).sum().backward()
        return grad, None


def test_a_gradient_after_the_launch_of_its_bucket():
    def make(rank):
        first, late = param(), param()
        optimizer = ShardedOptimizer([("first", first), ("late", late)], SGD, bucket_cap_mb=1e-6)
        x = Nested.apply(first * 1, [late]).exp()
        with optimizer.no_sync():  # no harm where nothing is reduced
            (Nested.apply(first * 1, [late]) * late).sum().backward()
        optimizer.zero_grad()
        (x * late).sum().backward()

    assert re.search("rank 1.*'late'.*same backward", refusal_on_rank_1(make, RuntimeError))


def test_a_gradient_after_its_bucket_was_given_back():
    def make(rank):
        params = [(f"p{number}", param()) for number in range(6)]
        optimizer = ShardedOptimizer(params, SGD, bucket_cap_mb=1e-6, shard_gradients=True)
        x = Nested.apply(params[0][1] * 1, [params[-1][1]])
        for _, p in params[1:]:
            x = x * p
        x.sum().backward()
        optimizer.step()

    assert re.search("rank 1.*'p5'.*same backward", refusal_on_rank_1(make, RuntimeError))


def test_a_parameter_that_left_its_bucket():
    def make(rank):
        model = nn.Linear(3, 3)
        optimizer = ShardedOptimizer(model.named_parameters(), SGD)
        model.weight.data = model.weight.data.clone()
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    assert re.search("rank 1.*'weight' has left its bucket", refusal_on_rank_1(make, RuntimeError))


def test_a_second_optimizer_takes_over_and_the_first_one_says_so():
    def make(rank):
        p = param()
        first = ShardedOptimizer([("p", p)], SGD, lr=1.0)
        second = ShardedOptimizer([("p", p)], SGD, lr=1.0)
        p.sum().backward()
        second.step()
        assert torch.equal(p, torch.zeros(4))
        first.step()

    assert "closed: its parameter 'p' was given to another" in refusal_on_rank_1(make, RuntimeError)


DIFFERENT = {
    "another order": (
        lambda rank: {"params": [("a", param(70)), ("b", param(71))][:: 1 if rank else -1]},
        "here is parameter 'a', torch.float32, shape .70,.*rank 0, parameter 'b'",
    ),
    "one more": (
        lambda rank: {"params": [("a", param()), ("b", param())][: rank + 1]},
        "'b'.*on rank 0, nothing more",
    ),
    "another dtype": (lambda rank: {"params": [("a", param(dtype=torch.float32 if rank else torch.half))]}, "float16"),
    "another option": (
        lambda rank: {"params": [param()], "bucket_cap_mb": 1 + rank},
        "option bucket_cap_mb = 2; on rank 0, option bucket_cap_mb = 1",
    ),
}


@pytest.mark.parametrize(("given", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_parameters_or_options_than_on_another_rank(given, message):
    said = refusal_on_rank_1(lambda rank: ShardedOptimizer(**given(rank), optimizer_class=SGD), ValueError)
    assert re.search(f"rank 1.*{message}", said)


def test_groups_that_differ_when_they_are_added():
    def make(rank):
        ShardedOptimizer([param()], SGD).add_param_group({"params": [param(4 + rank)]})

    assert re.search(r"rank 1.*shape \(5,\).*on rank 0.*shape \(4,\)", refusal_on_rank_1(make, ValueError))


def test_an_optimizer_made_before_the_process_group():
    p = param()
    early = ShardedOptimizer([p], SGD)
    assert re.search("rank 1.*before.*init_process_group", refusal_on_rank_1(lambda _: early.step(), RuntimeError))


def test_a_gradient_that_is_assigned_by_hand_where_one_was_taken_from():
    def make(rank):
        model = nn.Linear(3, 3)
        optimizer = ShardedOptimizer(model.named_parameters(), SGD)
        model(torch.ones(3)).sum().backward()
        model.weight.grad = torch.ones(3, 3)
        if rank == 1:
            optimizer.step()
        model(torch.ones(3)).sum().backward()

    assert re.search("rank 1.*'weight'.*by hand", refusal_on_rank_1(make, RuntimeError))


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_distributed_data_parallel_around_the_model_of_whatever_kind():
    kinds = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
    ways = [{}, {"shard_gradients": True}, {"capturable": True}, {"find_unused_parameters": True}]

    def make(rank):
        for ours_first, kind, way in itertools.product((False, True), kinds, ways):
            model = nn.Linear(3, 3)
            outer = None if ours_first else nn.parallel.DistributedDataParallel(model, **kind)
            optimizer = ShardedOptimizer(model.named_parameters(), SGD, **way)
            outer = outer or nn.parallel.DistributedDataParallel(model, **kind)
            with pytest.raises(RuntimeError, match=f"rank {rank}.*'(weight|bias)'.*DistributedDataParallel"):
                train(outer, optimizer)

    def train(outer, optimizer):
        for _ in range(2):  # the first backward of a static graph is averaged before ours, which changes nothing
            outer(torch.ones(3)).sum().backward()
            optimizer.step()

    on_ranks(2, make)


def test_parameters_that_share_memory():
    shared = torch.ones(4, 6)
    for one, other in [(shared, shared), (shared[:3], shared[2:]), (shared[:, :4], shared[1:, 3:])]:
        with pytest.raises(ValueError, match="'one' and 'other' share memory"):
            ShardedOptimizer([("one", nn.Parameter(one)), ("other", nn.Parameter(other))], SGD)
    with pytest.raises(ValueError, match="'frozen'"):
        ShardedOptimizer([("w", nn.Parameter(shared)), ("frozen", nn.Parameter(shared).requires_grad_(False))], SGD)
    columns = [nn.Parameter(shared[:, place::2]) for place in (0, 1)]
    optimizer = ShardedOptimizer(columns, SGD)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.add_param_group({"params": [nn.Parameter(columns[0].detach())]})


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [
        (lambda: param(dtype=torch.complex64), TypeError, "complex64"),
        (lambda: nn.LazyLinear(3).weight, ValueError, "no shape yet"),
    ],
    ids=["complex", "lazy"],
)
def test_parameters_of_other_kinds(odd, error, message):
    with pytest.raises(error, match=f"'odd'.*{message}"):
        ShardedOptimizer([("odd", odd())], SGD)


def test_a_process_group_for_a_mesh():
    def make(rank):
        group = torch.distributed.group.WORLD
        with pytest.raises(TypeError, match="DeviceMesh, got ProcessGroup"):
            ShardedOptimizer([{"params": [param()], "mesh": group}], SGD)
        ShardedOptimizer([param()], SGD, mesh=group)

    assert re.search("rank 1.*DeviceMesh, got ProcessGroup; DeviceMesh.from_group", refusal_on_rank_1(make, TypeError))


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize(("flag", "error"), [(1.0, TypeError), (torch.ones(2), ValueError)], ids=["float", "two"])
def test_flags_that_are_not_one_number_on_a_device(name, flag, error):
    optimizer = ShardedOptimizer([param()], SGD)
    setattr(optimizer, name, flag)
    with pytest.raises(error, match=f"{name} must be"):
        optimizer.step()


def test_a_scaler_that_has_seen_no_gradients():
    def make(rank):
        p, scaler = param(), torch.amp.GradScaler("cpu")
        optimizer = ShardedOptimizer([p], SGD)
        with optimizer.no_sync():
            scaler.scale(p.sum()).backward()
        scaler.step(optimizer)

    assert re.search(r"rank 1.*found_inf.*got 0; .*grad_shards\(\) reduces", refusal_on_rank_1(make, TypeError))


def test_a_parameter_that_was_unfrozen():
    def make(rank):
        p, q = param(), param().requires_grad_(False)
        optimizer = ShardedOptimizer([("p", p), ("q", q)], SGD)
        q.requires_grad_(True)
        optimizer.step()

    assert re.search("rank 1.*'q' was frozen.*add_param_group", refusal_on_rank_1(make, RuntimeError))


def test_copies():
    optimizer = ShardedOptimizer([param()], SGD)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copying(optimizer)
