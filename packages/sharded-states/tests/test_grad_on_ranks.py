"""What is in `.grad` of a model's parameters while a sharded optimizer trains them: what torch has, or an error."""

import copy
import math
import pickle
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks

# Number of ranks, and options; "mesh" as a shape.
WAYS = [
    (1, {}),
    (1, {"shard_gradients": True}),
    (2, {}),
    (2, {"shard_gradients": True}),
    (2, {"mesh": (2, 1)}),
    (2, {"find_unused_parameters": True, "state_device": "cpu:0"}),
    (4, {"mesh": (2, 2)}),
    (4, {"zero_fill_unused": True}),
]


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Conv1d(30, 2, 1), nn.Flatten(), nn.Linear(10, 3))


def data_of(*seeds):
    return torch.cat([torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def loss_of(model, data):
    return model[3:](model[2](model[:2](data).mT)).square().mean()


def sharded(params, optimizer_class=torch.optim.AdamW, **options):
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"])
    options = {"lr": 0.05, "bucket_cap_mb": 2e-4, **options}
    return ShardedOptimizer(params, optimizer_class, **options)


def on_each_way(check, ways=WAYS):
    """What `check(rank, world, options)` gives, by the number of ranks and options, on the first rank."""
    for world in sorted({world for world, _ in ways}):
        options = [options for ranks, options in ways if ranks == world]
        on_ranks(world, lambda rank, world=world, options=options: [check(rank, world, one) for one in options])


def close(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 1e-5, "atol": 1e-7}))


class Gradients:
    """A model after one backward on this rank, and a plain one after the same on the data of all."""

    def __init__(self, rank, world, options, optimizer_class=torch.optim.SGD):
        self.model, self.plain = model_of(), model_of()
        self.optimizer = sharded(self.model.named_parameters(), optimizer_class, **options)
        self.plain_optimizer = optimizer_class(self.plain.parameters(), lr=0.05)
        loss_of(self.model, data_of(rank)).backward()
        loss_of(self.plain, data_of(*range(world))).backward()

    def pairs(self):
        return zip(self.model.parameters(), self.plain.parameters(), strict=True)

    def check_step(self):
        self.optimizer.step()
        self.plain_optimizer.step()
        for ours, theirs in self.pairs():
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


NUMBERS = [
    lambda grad: grad.norm(),
    lambda grad: grad.data.norm(1),
    lambda grad: torch.norm(grad.detach(), math.inf),
    lambda grad: torch.linalg.vector_norm(grad, 3.5, dtype=torch.float64),
    lambda grad: torch.linalg.vector_norm(grad, 0),
    lambda grad: torch._foreach_norm([grad], 2)[0],
    lambda grad: grad.abs().max(),
    lambda grad: grad.min(),
    lambda grad: grad.mean(),
    lambda grad: (grad**2).sum(),
    lambda grad: grad.pow(2).mean().sqrt(),
    lambda grad: grad.isfinite().all(),
    lambda grad: grad.isnan().any(),
    lambda grad: (grad > 0).sum(),
    lambda grad: grad.count_nonzero(),
]


def test_numbers_of_a_gradient_are_those_of_the_whole_on_all_ranks():
    def check(rank, world, options):
        gradients = Gradients(rank, world, options)
        for ours, theirs in gradients.pairs():
            assert ours.grad.shape == theirs.grad.shape
            assert ours.grad.stride() == ours.stride()
            assert ours.grad.dtype == theirs.grad.dtype
            whole = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-5, atol=1e-7)
            for number in NUMBERS:
                got, expected = number(ours.grad), number(theirs.grad)
                assert type(got) is torch.Tensor
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
                everywhere = [None] * world
                dist.all_gather_object(everywhere, got)
                assert all(torch.equal(got, other) for other in everywhere)

    on_each_way(check)


def test_a_nan_is_in_every_norm_and_extreme():
    def check(rank, world, options):
        model = nn.Linear(100, 3)
        optimizer = sharded(model.named_parameters(), **options)
        (model.weight * torch.where(torch.arange(100) == 7, math.nan, 1.0)).sum().backward()
        for order in (1, 2, math.inf):
            assert model.weight.grad.norm(order).isnan()
        assert model.weight.grad.max().isnan()
        assert model.weight.grad.min().isnan()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        model.weight.grad.nan_to_num_(5.0)
        assert model.weight.grad.max() == 5
        optimizer.zero_grad()

    on_each_way(check)


def clip_by_norm(model):
    return clip_grad_norm_(model.parameters(), 0.01)


def clip_by_foreach(model):
    return clip_grad_norm_(model.parameters(), 0.01, foreach=True)


def clip_by_value(model):
    clip_grad_value_(model.parameters(), 1e-3)
    return torch.zeros(())


def clip_by_maximum(model):
    return clip_grad_norm_(model.parameters(), 0.001, norm_type=math.inf)


def clip_as_people_write_it(model):
    """As many loops have it, and once more to see that the norm is not the old one."""
    for max_norm in (0.01, 0.005):
        norm = sum(p.grad.data.norm(2) ** 2 for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.data.mul_(max_norm / (norm + 1e-6))
    return norm


def clip_each(model):
    norms = []
    for p in model.parameters():
        norms.append(p.grad.norm())
        p.grad = p.grad * (0.01 / norms[-1])
        norms.append(p.grad.norm())
    return torch.stack(norms)


def decay_and_clean(model):
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)
        p.grad = torch.where(p.grad > 0.01, p.grad, p.grad / 2)
        p.grad.clamp_(-0.05).nan_to_num_()
        p.grad.masked_fill_(p.grad < -0.04, 0.0)
    return torch.zeros(())


@pytest.mark.parametrize(
    "change",
    [
        clip_by_norm,
        clip_by_foreach,
        clip_by_value,
        clip_by_maximum,
        clip_as_people_write_it,
        clip_each,
        decay_and_clean,
    ],
)
def test_gradients_are_clipped_and_changed_through_the_model_as_in_torch(change):
    def check(rank, world, options):
        gradients = Gradients(rank, world, options)
        got, expected = change(gradients.model), change(gradients.plain)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        gradients.check_step()

    # On replicas without shards gradients are plain, and one that is assigned can't be told from one to be averaged.
    assigns = change in (clip_each, decay_and_clean)
    on_each_way(check, [way for way in WAYS if not (assigns and way[1].get("mesh") == (2, 1))])


def test_torch_s_clipping_of_the_model_costs_one_collective():
    def check(rank):
        counts = []
        for foreach in (None, True):
            gradients = Gradients(rank, 2, {})
            with mock.patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as counted:
                clip_grad_norm_(gradients.model.parameters(), 0.01, foreach=foreach)
            counts.append(counted.call_count)
        return counts

    assert on_ranks(2, check) == [[1, 1]] * 2


def adamw(params, options):
    if options is None:
        return torch.optim.AdamW(params, lr=0.01, eps=1e-4)
    return sharded(params, **options, lr=0.01, eps=1e-4)


def gan(rank, world, options):
    """Two models, each zeroed as a module; the critic's gradients of the generator's backward are never used."""
    generator, critic = model_of(1), model_of(2)
    head = nn.Linear(3, 35)
    parts = [[*generator.named_parameters("g"), *head.named_parameters("h")], [*critic.named_parameters("c")]]
    optimizers = [adamw(part, options) for part in parts]
    for step in range(3):
        data = data_of(*[10 * step + r for r in (range(world) if options is None else [rank])])
        critic.zero_grad()
        loss_of(critic, data).backward()
        fake = head(generator[3:](generator[2](generator[:2](data).mT))).view(-1, 5, 7)
        (-loss_of(critic, fake.detach())).backward()
        optimizers[1].step()
        generator.zero_grad()
        head.zero_grad()
        loss_of(critic, fake).backward()
        optimizers[0].step()
    return [*generator.parameters(), *head.parameters(), *critic.parameters()]


def huggingface(rank, world, options):
    """Accumulate, clip with torch, step, schedule, zero the model."""
    model = model_of()
    optimizer = adamw(model.parameters(), options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    for step in range(3):
        for micro in range(2):
            ranks = range(world) if options is None else [rank]
            with nullcontext() if options is None or micro else optimizer.no_sync():
                (loss_of(model, data_of(*[100 * step + 10 * micro + r for r in ranks])) / 2).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return [*model.parameters(), *norms]


def lightning(rank, world, options):
    """A closure that zeroes, runs backward and logs norms; the step that calls it clips the model in it."""
    model = model_of()
    optimizer = adamw(model.parameters(), options)
    norms = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, data_of(*[10 * step + r for r in (range(world) if options is None else [rank])]))
            loss.backward()
            norms.extend(p.grad.data.norm(2) for p in model.parameters() if p.grad is not None)
            clip_grad_value_(model.parameters(), 1e-3)
            norms.append(clip_grad_norm_(model.parameters(), 0.01))
            return loss

        optimizer.step(closure)
    return [*model.parameters(), *norms]


@pytest.mark.parametrize("loop", [gan, huggingface, lightning])
def test_loops_that_know_the_model_only_end_where_torch_s_do(loop):
    def check(rank, world, options):
        for ours, theirs in zip(loop(rank, world, options), loop(rank, world, None), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    on_each_way(check)


REFUSED = [
    lambda p: p.grad.numpy(),
    lambda p: p.grad.tolist(),
    lambda p: p.grad.view(-1),
    lambda p: p.grad[0],
    lambda p: p.grad.std(),
    lambda p: p.grad.sum(0),
    lambda p: p.grad.norm(dim=0),
    lambda p: p.grad.norm(-1),
    lambda p: list(p.grad),
    lambda p: p.data.add_(p.grad, alpha=-0.1),
    lambda p: torch.add(p.data, p.grad, out=torch.empty_like(p.data)),
    lambda p: torch._foreach_add_([p.data], [p.grad]),
    lambda p: p.grad.add_(torch.ones(30, 1)),
    lambda p: p.grad.normal_(),
    lambda p: torch.randn_like(p.grad),
    lambda p: copy.deepcopy(p.grad),
    lambda p: pickle.dumps(p.grad),
    lambda p: torch.optim.SGD([p], lr=0.1).step(),
    lambda p: torch.optim.SGD([p], lr=0.1, foreach=True, momentum=0.9).step(),
    lambda p: torch.optim.AdamW([p], fused=True, weight_decay=0).step(),
    lambda p: torch.optim.AdamW([p], foreach=True, weight_decay=0).step(),
    lambda p: torch.optim.LBFGS([p]).step(lambda: torch.zeros(())),
]


def test_what_a_rank_can_t_do_with_its_part_is_refused_by_name():
    def check(rank):
        gradients = Gradients(rank, 2, {})
        weight = gradients.model[0].weight
        for number, attempt in enumerate(REFUSED):
            with pytest.raises(TypeError) as caught:
                attempt(weight)
            text = str(caught.value)
            assert re.search(rf"rank {rank}.*parameter '0.weight'.*grad_shards.*close\(\)", text), (number, text)
        with pytest.raises(TypeError, match=r"'0.weight'.*|'4.bias'.*"):
            weight.grad.add_(gradients.model[4].bias.grad)
        gradients.check_step()
        return repr(weight.grad)

    assert "of '0.weight', shape=(30, 7)" in on_ranks(2, check)[0]


def test_before_its_reduction_a_gradient_says_so_and_can_be_zeroed():
    def check(rank, options):
        gradients = Gradients(rank, 2, options)
        optimizer, model = gradients.optimizer, gradients.model
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, data_of(rank)).backward()
        if "shard_gradients" not in options:
            with pytest.raises(RuntimeError, match=rf"rank {rank}.*'0.weight'.*no_sync.*grad_shards\(\)"):
                clip_grad_norm_(model.parameters(), 0.01)
            repr(model[0].weight.grad)
        optimizer.grad_shards()
        torch.testing.assert_close(clip_by_norm(model), clip_by_norm(gradients.plain))
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, data_of(rank)).backward()
        model.zero_grad(set_to_none=False)
        gradients.plain.zero_grad(set_to_none=False)
        loss_of(model, data_of(rank + 2)).backward()
        loss_of(gradients.plain, data_of(2, 3)).backward()
        gradients.check_step()

    on_ranks(2, lambda rank: [check(rank, options) for options in ({}, {"shard_gradients": True}, {"mesh": (2, 1)})])


def test_a_second_optimizer_trains_where_gradients_are_whole_and_raises_where_they_are_not():
    def train(make_first, make_second, classes):
        model = model_of()
        first = make_first(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
        for optimizer in (first, make_second(model)):
            for seed in range(3):
                optimizer.zero_grad()
                loss_of(model, data_of(seed)).backward()
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.step(lambda: loss_of(model, data_of(0)))
                else:
                    optimizer.step()
        assert scheduler.optimizer is first
        return model.parameters()

    seconds = [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        lambda model: torch.optim.LBFGS(model.parameters()),
    ]
    for second in seconds:
        expected = train(lambda model: torch.optim.AdamW(model.parameters(), lr=0.05), second, torch.optim.AdamW)
        close(train(lambda model: sharded(model.parameters()), second, ShardedOptimizer), expected, rtol=0, atol=1e-6)

    def check(rank):
        for second in seconds:
            with pytest.raises(TypeError, match=rf"rank {rank}.*close\(\)"):
                train(lambda model: sharded(model.parameters()), second, ShardedOptimizer)

    on_ranks(2, check)


def test_a_closed_optimizer_has_given_the_parameters_back_and_says_so():
    def check(rank, world, options):
        model, storages = model_of(), set()
        model[0].weight.tensor_parallel = True
        optimizer = sharded(model.named_parameters(), **options)
        loss_of(model, data_of(rank)).backward()
        optimizer.step()
        values = [p.detach().clone() for p in model.parameters()]
        optimizer.close()
        optimizer.close()
        for p, value in zip(model.parameters(), values, strict=True):
            assert torch.equal(p, value)
            assert p.grad is None or type(p.grad) is torch.Tensor
            storages.add(p.untyped_storage().data_ptr())
        assert len(storages) == len(values)
        assert vars(model[0].weight) == {"tensor_parallel": True}
        model.zero_grad()
        loss_of(model, data_of(rank)).backward()
        assert all(type(p.grad) is torch.Tensor for p in model.parameters())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not any(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
        for call in (
            optimizer.step,
            optimizer.zero_grad,
            optimizer.grad_shards,
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        ):
            with pytest.raises(RuntimeError, match=rf"(rank {rank}|this process).*closed"):
                call()
        assert optimizer.full_state_dict(rank0_only=False)["param_groups"]

    on_each_way(check)


def test_another_sharded_optimizer_closes_the_first_unless_that_has_gradients_to_use():
    def check(rank):
        model = model_of()
        first = sharded(model.named_parameters())
        loss_of(model, data_of(rank)).backward()
        with pytest.raises(RuntimeError, match=rf"rank {rank}.*no step of the first one has used.*zero_grad"):
            sharded(model[0].named_parameters())
        first.step()
        second = sharded(model[0].named_parameters())
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, data_of(rank)).backward()
        second.step()
        with pytest.raises(RuntimeError, match=rf"rank {rank}.*closed.*'weight' was given to another"):
            first.step()
        return [torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True)]

    assert on_ranks(2, check) == [[False, False, True, True, True, True]] * 2


def test_gradients_that_are_there_before_the_optimizer_count_as_in_torch():
    def check(rank, world, options):
        model, plain = model_of(), model_of()
        loss_of(model, data_of(rank)).backward()
        loss_of(plain, data_of(*range(world))).backward()
        ours = sharded(model.named_parameters(), torch.optim.SGD, **options)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
        for number in range(2):
            if number:
                loss_of(model, data_of(rank + 4)).backward()
                loss_of(plain, data_of(*range(4, world + 4))).backward()
            ours.step()
            theirs.step()
            plain.zero_grad()
            close(model.parameters(), plain.parameters(), rtol=0, atol=1e-6)

    on_each_way(check)
    on_each_way(check, [(1, {"capturable": True}), (2, {"capturable": True})])


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_in_another_dtype_than_the_parameter_s(world):
    def check(rank, options):
        model = nn.Linear(40, 3).bfloat16()
        optimizer = sharded(model.named_parameters(), torch.optim.SGD, **options)
        for scale in (1.0, 1 / 512):  # which bf16 would lose
            (scale * (rank + 1) * model.weight.sum() + model.bias.sum()).backward()
        assert model.weight.grad.dtype == torch.float32
        mean = sum(range(1, world + 1)) / world
        expected = (120 * (mean * (1 + 1 / 512)) ** 2 + 3 * 2.0**2) ** 0.5
        if not (world > 1 and "capturable" in options):
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0), torch.tensor(expected))
        optimizer.step()
        optimizer.close()
        assert model.weight.grad_dtype in (torch.bfloat16, torch.float32)
        model.weight.grad = torch.ones(3, 40, dtype=model.weight.grad_dtype)

    ways = [
        {"grad_dtype": torch.float32},
        {"grad_dtype": torch.float32, "inner_dtype": torch.float32},
        {"grad_dtype": torch.float32, "capturable": True},
        {"grad_dtype": torch.float32, "shard_gradients": True},
    ]
    on_ranks(world, lambda rank: [check(rank, options) for options in ways])


def test_half_precision_gradients_have_torch_s_norms():
    def check(rank):
        for dtype in (torch.bfloat16, torch.float16):
            gradients = [torch.linspace(-1, 1, 300).to(dtype) * (n + 1) for n in range(3)]
            params = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(3)]
            optimizer = sharded(params)
            sum((p * g).sum() for p, g in zip(params, gradients, strict=True)).backward()
            for p, g in zip(params, gradients, strict=True):
                assert torch.equal(p.grad.full_tensor(), g)
                torch.testing.assert_close(p.grad.norm(), g.norm())
            assert clip_grad_norm_(params, 1.0).dtype == dtype
            optimizer.step()

    on_ranks(2, check)


def test_experts_on_meshes_of_their_own_are_clipped_each_over_its_mesh():
    def check(rank):
        dense, expert = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(100))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
        optimizer = ShardedOptimizer(
            [{"params": [dense]}, {"params": [expert], "mesh": grid["data"], "grad_divisor": 2.0}],
            torch.optim.SGD,
            lr=1.0,
        )
        ((rank + 1) * dense.sum() + (rank + 1) * expert.sum()).backward()
        norms = dense.grad.norm().item(), expert.grad.norm().item()
        expert.grad.mul_(2)
        optimizer.step()
        return *norms, dense.max().item(), expert.max().item()

    for rank, result in enumerate(on_ranks(4, check)):
        mean = 1.5 if rank < 2 else 3.5
        assert result == pytest.approx((25, 10 * mean, -2.5, -2 * mean))


def test_clipping_views_in_several_processes_is_noticed_in_the_step():
    def check(rank):
        gradients = Gradients(rank, 2, {"capturable": True})
        clip_by_norm(gradients.model)
        with pytest.raises(
            RuntimeError, match=rf"rank {rank}.*'\d.(weight|bias)' was changed.*capturable.*param_groups"
        ):
            gradients.optimizer.step()
        gradients.optimizer.zero_grad()
        for _ in range(2):
            loss_of(gradients.model, data_of(rank)).backward()
            clip_grad_norm_(gradients.optimizer.param_groups[0]["params"], 0.01)
            gradients.optimizer.step()
            gradients.model.zero_grad(set_to_none=False)

    on_ranks(2, check)
    gradients = Gradients(0, 1, {"capturable": True})
    torch.testing.assert_close(clip_by_norm(gradients.model), clip_by_norm(gradients.plain))
    gradients.check_step()


def test_hooks_of_the_caller_s_see_a_gradient_or_an_error():
    def check(rank, world):
        torch.manual_seed(0)
        model, seen = nn.Linear(7, 3), {}
        for moment in ("before", "after"):
            model.weight.register_hook(lambda grad: grad * 2)
            model.weight.register_post_accumulate_grad_hook(
                lambda p, moment=moment: seen.update({moment: norm_or_error(p)})
            )
            if moment == "before":
                optimizer = sharded(model.named_parameters(), torch.optim.SGD, lr=1.0)
        ((rank + 1) * model.weight.sum()).backward()
        optimizer.step()
        return seen, model.weight.grad.norm().item() if world == 1 else None

    def norm_or_error(p):
        try:
            return p.grad.norm().item()
        except RuntimeError as error:
            return "register it before the optimizer is made" in str(error)

    whole = pytest.approx(4 * 21**0.5)
    assert check(0, 1) == ({"before": whole, "after": whole}, whole)
    first, second = on_ranks(2, check, 2)
    assert first[0] == {"before": whole, "after": True}
    assert second[0] == {"before": pytest.approx(8 * 21**0.5), "after": True}


def test_a_hook_that_drops_a_gradient_has_dropped_it():
    def check(rank, world, options):
        model = model_of()
        optimizer = sharded(model.named_parameters(), **options)
        bias = model[0].bias
        bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        before = bias.detach().clone()
        loss_of(model, data_of(rank)).backward()
        assert bias.grad is None
        optimizer.step()
        assert torch.equal(bias, before)

    on_each_way(check, [way for way in WAYS if "zero_fill_unused" not in way[1]])


def test_a_gradient_that_is_to_be_differentiated_is_there_or_refused():
    def check(rank, world, options):
        model = model_of()
        optimizer = sharded(model.named_parameters(), **options)
        loss_of(model, data_of(rank)).backward(create_graph=True)
        differentiable = model[0].weight.grad.square().sum().requires_grad
        optimizer.step()
        return differentiable

    with pytest.warns(UserWarning, match="create_graph"):
        assert check(0, 1, {})

    def refused(rank):
        for options in ({}, {"shard_gradients": True}, {"capturable": True}):
            with pytest.raises(RuntimeError, match=rf"rank {rank}.*create_graph.*autograd.grad"):
                check(rank, 2, options)

    on_ranks(2, refused)


def test_a_model_may_be_moved_after_a_step():
    def check(rank, world, options):
        for move in (lambda m: m.double(), lambda m: m.half(), lambda m: m.to("cpu"), lambda m: m.share_memory()):
            gradients = Gradients(rank, world, options)
            gradients.optimizer.step()
            move(gradients.model)
            data = data_of(rank).to(gradients.model[0].weight.dtype)
            copied = copy.deepcopy(gradients.model)
            loss_of(copied, data).backward()
            assert all(type(p.grad) is torch.Tensor for p in copied.parameters())
            del gradients.optimizer
            gradients.model.zero_grad()
            loss_of(gradients.model, data).backward()
            assert all(type(p.grad) is torch.Tensor for p in gradients.model.parameters())

    on_each_way(check)


def test_what_the_caller_does_to_grad_is_done_to_its_shard():
    def check(rank, world, options):
        model = model_of()
        optimizer = sharded(model.named_parameters(), **options)
        loss_of(model, data_of(rank)).backward()
        weight, bias = model[0].weight, model[0].bias
        before = local(weight.current_grad_shard()).clone()
        if options.get("mesh") != (2, 1):
            weight.grad = weight.grad * 2
        else:
            weight.grad.mul_(2)
        assert torch.equal(local(weight.current_grad_shard()), before * 2)
        bias.grad = None
        assert local(bias.current_grad_shard()).numel() == 0
        with optimizer.no_sync():
            loss_of(model, data_of(rank)).backward()
        if world > 1 and "shard_gradients" not in options:
            with pytest.raises(RuntimeError, match=rf"rank {rank}.*'0.bias' is not averaged.*grad_shards\(\)"):
                bias.current_grad_shard()
        optimizer.grad_shards()
        assert bias.current_grad_shard() is bias.grad_shard

    def local(shard):
        return shard.to_local() if hasattr(shard, "to_local") else shard

    on_each_way(check, [way for way in WAYS if "zero_fill_unused" not in way[1]])
