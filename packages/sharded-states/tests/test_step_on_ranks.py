"""A step: what it skips, what it costs, what it remembers."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepstack_sharded_states import ShardedOptimizer, within_node_mesh
from stepstack_testing import HostSyncs, Operations, on_ranks

INNER = {
    "fused": lambda params, **kwargs: ShardedOptimizer(params, torch.optim.AdamW, fused=True, lr=0.1, **kwargs),
    "plain": lambda params, **kwargs: ShardedOptimizer(params, torch.optim.AdamW, lr=0.1, **kwargs),
}


def everything(optimizer):
    inner = optimizer._inner
    tensors = [p for group in inner.param_groups for p in group["params"]]
    states = [value for p in tensors for value in inner.state[p].values()]
    return [t.detach().clone() for t in tensors + states]


@pytest.mark.parametrize("bad", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_a_skipped_step_changes_nothing_on_any_rank(make, bad):
    def check(rank):
        p = nn.Parameter(torch.linspace(0, 1, 100))
        optimizer = make([p])
        p.square().sum().backward()
        optimizer.step()
        before = everything(optimizer)
        optimizer.found_inf = torch.tensor(bad if rank == 1 else 0.0)
        optimizer.step()
        assert optimizer.found_inf == 1
        del optimizer.found_inf
        return all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))

    assert on_ranks(3, check) == [True] * 3


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_grad_scale_divides(make):
    def check(rank, scale):
        p = nn.Parameter(torch.linspace(0, 1, 100))
        optimizer = make([p], eps=1.0)
        for _ in range(3):
            (scale * p.square().sum()).backward()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        return p.detach().clone()

    scaled, plain = on_ranks(2, check, 1024.0), on_ranks(2, check, 1.0)
    assert torch.equal(scaled[0], plain[0])
    assert torch.equal(scaled[0], scaled[1])


@pytest.mark.parametrize("order", ["step", "unscale, clip, step"])
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_torch_scaler_and_torch_clip_see_what_is_sharded(make, order):
    def check(rank):
        p, small = nn.Parameter(torch.linspace(0, 1, 100)), nn.Parameter(torch.ones(3))
        optimizer = make([p, small], mesh=init_device_mesh("cpu", (2, 2)))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        shards = [p for group in optimizer.param_groups for p in group["params"]]
        history = []
        for step in range(3):
            loss = p.square().sum() * 30 + small.sum()
            if step == 1 and rank == 0:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if order != "step":
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(shards, 1.0).full_tensor()
                if step == 0:
                    expected = torch.linalg.vector_norm(torch.cat([60 * torch.linspace(0, 1, 100), torch.ones(3)]))
                    torch.testing.assert_close(norm, expected)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append((scaler.get_scale(), p.detach().clone()))
        return history

    results = on_ranks(4, check)
    scales, values = zip(*results[0], strict=True)
    assert scales == (1024.0, 512.0, 512.0)
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])
    for result in results[1:]:
        assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in zip(results[0], result, strict=True))


def a_step_s_collectives(mesh):
    params = [nn.Parameter(torch.ones(2**16)) for _ in range(6)]
    optimizer = INNER["fused"](params, mesh=mesh, bucket_cap_mb=0.5)
    optimizer.found_inf = torch.zeros(())
    sum(p.sum() for p in params).backward()
    optimizer.step()
    with HostSyncs() as syncs, Operations() as operations:
        sum(p.sum() for p in params).backward()
        optimizer.grad_shards()
        optimizer.step()
        optimizer.zero_grad()
    assert syncs == []
    return operations.collectives()


def test_a_step_has_two_collectives_a_bucket_and_waits_for_nothing():
    def check(rank):
        group = dist.new_group(backend="fake")  # it does nothing, but isn't gloo
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        return a_step_s_collectives(mesh)

    expected = {"c10d._reduce_scatter_base_": 3, "c10d._allgather_base_": 3, "c10d.allreduce_": 1}
    assert on_ranks(2, check) == [expected] * 2


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=["2 ranks", "3 ranks", "2x2 ranks"])
def test_on_gloo_an_all_to_all_reduces_and_a_broadcast_of_each_slice_gathers(shape):
    buckets, axes, world = 3, len(shape), torch.Size(shape).numel()
    expected = {
        "c10d.alltoall_base_": buckets,
        "c10d.broadcast_": buckets * shape[-1],
        "c10d.allreduce_": buckets * (axes - 1) + axes,  # a bucket's slice across replicas; the flag over each axis
    }
    assert on_ranks(world, lambda rank: a_step_s_collectives(init_device_mesh("cpu", shape))) == [expected] * world


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2x2 ranks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_on_which_ranks_differ_in_what_has_a_gradient_is_skipped_on_all(shape, dtype):
    def check(rank):
        params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (300, 70, 7)]
        optimizer = INNER["fused"](params, mesh=init_device_mesh("cpu", shape), bucket_cap_mb=1e-6)
        history = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for used in (range(3), range(2 if rank == 1 else 3), range(2), range(2)):
                sum(params[i].sum() for i in used).backward()
                optimizer.found_inf = torch.zeros(1)
                with HostSyncs() as syncs:
                    optimizer.step()
                assert syncs == []
                history.append((len(warned), optimizer.found_inf.item(), [p[0].item() for p in params]))
        assert all(f"rank {rank}: ranks differed" in str(warning.message) for warning in warned)
        return history

    for rank, history in enumerate(on_ranks(torch.Size(shape).numel(), check)):
        warned, flags, values = zip(*history[:3], strict=True)
        owns_the_last_slice = rank % shape[-1] == shape[-1] - 1
        assert warned == (0, 0, int(owns_the_last_slice))  # a step later, when it is known without a wait
        assert history[3][0] == warned[2]  # once
        assert flags == (0.0, 1.0, 0.0)
        assert values[0] == values[1]
        assert [after != before for before, after in zip(values[1], values[2], strict=True)] == [True, True, False]


def test_an_optimizer_without_the_flag_raises_on_all_ranks_that_differ_in_what_has_a_gradient():
    def check(rank):
        p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
        optimizer = INNER["plain"]([p, q], mesh=init_device_mesh("cpu", (2, 2)))
        (p.sum() + (q.sum() if rank == 2 else 0)).backward()
        with pytest.raises(RuntimeError, match=f"rank {rank}: ranks differ.*find_unused_parameters"):
            optimizer.step()
        assert all(torch.equal(t, torch.ones(5)) for t in (p, q))
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
        return p[0].item() < 1

    assert on_ranks(4, check) == [True] * 4


def test_operations_do_not_grow_with_the_number_of_parameters():
    def count(rank, number):
        params = [nn.Parameter(torch.ones(5)) for _ in range(number)]
        groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "weight_decay": 0.0}]
        optimizer = INNER["fused"](groups)
        for _ in range(2):
            sum(p.sum() for p in params).backward()
            optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
            with Operations() as operations:
                optimizer.grad_shards()
                optimizer.step()
                optimizer.zero_grad()
        return dict(operations)

    few, many = on_ranks(2, count, 100), on_ranks(2, count, 1000)
    assert few == many
    assert sum(few[0].values()) < 40


def test_launches_come_in_backward_not_after_it():
    def check(rank):
        first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = ShardedOptimizer([first, last], torch.optim.SGD, bucket_cap_mb=1e-6)
        pending = []
        x = first * 1
        x.register_hook(lambda _: pending.append([b.gradients.under_way for b in optimizer._backward.buckets]))
        (x * last).sum().backward()
        return pending

    assert on_ranks(2, check) == [[[True, False]]] * 2


def test_states_take_one_slice_a_rank():
    def check(rank):
        p = nn.Parameter(torch.ones(1000, 64))
        optimizer = INNER["fused"]([p], mesh=init_device_mesh("cpu", (2, 2)))
        p.sum().backward()
        optimizer.step()
        return sum(v.numel() for state in optimizer._inner.state.values() for v in state.values() if v.ndim)

    assert on_ranks(4, check) == [2 * 32_064, 2 * 31_936] * 2


def test_a_saved_run_goes_on_as_if_it_had_not_stopped():
    def train(model, optimizer, scheduler, steps):
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(4, 9)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def make(fused):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3))
        optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, fused=fused, lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def check(rank):
        straight = make(fused=True)
        train(*straight, range(6))
        half = make(fused=True)
        train(*half, range(3))
        saved = [half[0].state_dict(), half[1].local_state_dict(), half[2].state_dict()]
        resumed = make(fused=True)
        for part, state in zip(resumed, saved, strict=True):
            part.load_state_dict(state)
        train(*resumed, range(3, 6))
        same = [torch.equal(a, b) for a, b in zip(straight[0].parameters(), resumed[0].parameters(), strict=True)]
        return all(same), resumed[1].param_groups[0]["lr"], resumed[1]._inner.param_groups[0]["lr"]

    assert on_ranks(3, check) == [(True, 0.0125, 0.025)] * 3


def test_a_state_dict_of_another_cut_is_refused():
    def save(rank):
        return ShardedOptimizer([nn.Parameter(torch.ones(200))], torch.optim.AdamW).state_dict()

    def load(rank, state_dict):
        optimizer = ShardedOptimizer([nn.Parameter(torch.ones(200))], torch.optim.AdamW)
        with pytest.raises(ValueError, match=r"rank 0.*it has.*interval \(200, 1, 0, 256\), not"):
            optimizer.load_state_dict(state_dict)

    on_ranks(2, load, on_ranks(1, save)[0])


def test_a_group_added_later_is_trained_too():
    def check(rank):
        p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5), requires_grad=False)
        optimizer = ShardedOptimizer([("p", p), ("q", q)], torch.optim.SGD, lr=0.5)
        p.sum().backward()
        optimizer.step()
        q.requires_grad_(True)
        optimizer.add_param_group({"params": [("q", q)], "lr": 0.25})
        (p.sum() + (rank + 1) * q.sum()).backward()
        optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
        return p[0].item(), q[0].item()

    assert on_ranks(2, check) == [(0.0, 0.625)] * 2


def test_without_a_process_group_it_is_the_optimizer_itself():
    def train(make):
        torch.manual_seed(0)
        model = nn.Linear(3, 70)
        optimizer = make(model.parameters(), torch.optim.AdamW) if make else torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(3)).square().sum().backward()
            if make:
                assert [type(shard) for shard in optimizer.grad_shards()] == [torch.Tensor] * 2
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert not dist.is_initialized()
    for ours, theirs in zip(train(ShardedOptimizer), train(None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_within_node_mesh_shards_over_neighbours_and_replicates_across():
    def check(rank):
        mesh = within_node_mesh(size=2)
        whole = within_node_mesh()
        half = within_node_mesh(dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0])
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=mesh.get_group("replicate"))
        return mesh.mesh.tolist(), whole.mesh.tolist(), half.mesh.tolist(), mesh.mesh_dim_names, total.item()

    names = ("replicate", "shard")
    for rank, result in enumerate(on_ranks(4, check)):
        assert result == ([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[rank % 2, rank % 2 + 2]], names, 2.0 + 2 * (rank % 2))


def test_a_model_outlives_its_optimizer():
    p = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([p], torch.optim.SGD)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    p.sum().backward()
    assert torch.equal(p.grad, torch.ones(3))


def test_closures_and_hooks_work_as_in_torch():
    p, seen = nn.Parameter(torch.ones(3)), []
    optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=0.5)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert seen == ["after"]
    assert torch.equal(p, torch.full((3,), 0.5))
    assert "lr: 0.5" in repr(optimizer)


MASTERS = {
    "bf16 gradients": {"inner_dtype": torch.float32},
    "fp32 gradients": {"inner_dtype": torch.float32, "grad_dtype": torch.float32},
}


@pytest.mark.parametrize("options", MASTERS.values(), ids=MASTERS)
def test_any_optimizer_trains_a_bf16_model_in_full_precision(options):
    start = torch.linspace(0.5, 1, 150).bfloat16()

    def train(rank):
        p = nn.Parameter(start.clone())
        optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1e-4, momentum=0.9, **options)
        for _ in range(20):
            (p * torch.linspace(1, 2, 150).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = torch.cat([state["master_weight"] for state in optimizer.local_state_dict()["state"].values()])
        return p.detach().clone(), masters

    results = on_ranks(2, train)
    expected = nn.Parameter(start.float())
    reference = torch.optim.SGD([expected], lr=1e-4, momentum=0.9)
    expected.grad = torch.linspace(1, 2, 150).bfloat16().float()
    for _ in range(20):
        reference.step()
    torch.testing.assert_close(torch.cat([masters for _, masters in results])[:150], expected.detach())
    for p, _ in results:
        assert torch.equal(p, expected.detach().bfloat16())


def test_masters_are_saved_loaded_and_refreshed():
    def make():
        p = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
        return p, ShardedOptimizer([p], torch.optim.SGD, lr=1e-3, inner_dtype=torch.float32)

    def step(p, optimizer):
        p.sum().backward()
        optimizer.step()

    def check(rank):
        p, optimizer = make()
        step(p, optimizer)
        q, resumed = make()
        resumed.load_state_dict(optimizer.local_state_dict())
        for _ in range(3):
            step(p, optimizer)
            step(q, resumed)
        with torch.no_grad():
            q.fill_(2.0)
        resumed.refresh_from_model()
        same = p.detach().clone()
        step(q, resumed)
        return same[0].item(), torch.equal(same, make()[0] * 0.99609375), q[0].item()

    assert on_ranks(2, check) == [(0.99609375, True, 2.0)] * 2


def test_masters_of_the_inner_optimizer_are_refreshed_from_the_model_too():
    class WithMasters(torch.optim.SGD):
        def refresh_master_weights(self):
            refreshed.extend(p.detach().clone() for group in self.param_groups for p in group["params"])

    refreshed, p = [], nn.Parameter(torch.ones(64))
    optimizer = ShardedOptimizer([p], WithMasters)
    with torch.no_grad():
        p.fill_(2.0)
    optimizer.refresh_from_model()
    assert torch.equal(*refreshed, torch.full((64,), 2.0))


def test_gradients_are_reduced_in_the_dtype_asked_for():
    def check(rank, grad_dtype):
        p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, grad_dtype=grad_dtype)
        with optimizer.no_sync():
            (p * 256).sum().backward()
        p.sum().backward()  # 257 is no bfloat16
        return torch.cat([shard.to_local() for shard in optimizer.grad_shards()])[:3].float()

    assert torch.equal(on_ranks(2, check, torch.float32)[0], torch.full((3,), 257.0))
    assert torch.equal(on_ranks(2, check, None)[0], torch.full((3,), 256.0))


def test_a_state_dict_in_another_memory_format_is_refused():
    def make(memory_format):
        conv = nn.Conv2d(8, 8, 3).to(memory_format=memory_format)
        return ShardedOptimizer(conv.named_parameters(), torch.optim.AdamW)

    saved = make(torch.channels_last).state_dict()
    make(torch.channels_last).load_state_dict(saved)
    with pytest.raises(ValueError, match="'weight' it has shape, stride"):
        make(torch.contiguous_format).load_state_dict(saved)


def test_experts_are_reduced_over_a_mesh_of_their_own():
    def check(rank):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
        dense, expert, summed = (nn.Parameter(torch.zeros(3)) for _ in range(3))
        groups = [
            {"params": [dense]},
            {"params": [expert], "mesh": grid["data"]},
            {"params": [summed], "grad_divisor": 1},
        ]
        optimizer = ShardedOptimizer(groups, torch.optim.SGD, lr=1.0)
        assert "mesh" not in optimizer.param_groups[1]
        ((rank + 1) * (dense.sum() + expert.sum() + summed.sum())).backward()
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        values = [p[0].item() for p in (dense, expert, summed)]
        optimizer.found_inf = torch.tensor(1.0 if rank == 3 else 0.0)
        optimizer.step()
        assert [p[0].item() for p in (dense, expert, summed)] == values
        return values

    # dense: 10 / 4; experts: their own sum over the dense size; summed: 10
    assert on_ranks(4, check) == [[-2.5, -0.75, -10.0]] * 2 + [[-2.5, -1.75, -10.0]] * 2


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_offloaded_states_train_the_same(ratio):
    def train(rank, **options):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(10)])
        optimizer = INNER["fused"](model.parameters(), bucket_cap_mb=0.004, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 30)).square().mean().backward()
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(step == 2)), torch.ones(())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        buckets = optimizer._backward.buckets
        away = sum(b.params.numel() for b in buckets if b.inner_params is not b.param_slice)
        return away / sum(b.params.numel() for b in buckets), [p.detach().clone() for p in model.parameters()]

    # The CPU with a number passes for another device than the CPU without.
    plain = on_ranks(2, train)
    offloaded = on_ranks(2, lambda rank: train(rank, state_device="cpu:0", offload_ratio=ratio))
    for (_, theirs), (away, ours) in zip(plain, offloaded, strict=True):
        assert abs(away - ratio) < 0.11
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_capturable_gradients_keep_their_addresses_and_are_zeroed_by_one_fill_a_bucket():
    def check(rank):
        params = [nn.Parameter(torch.ones(2**16)) for _ in range(6)]
        optimizer = INNER["fused"](params, bucket_cap_mb=0.5, capturable=True)
        addresses = [p.grad.data_ptr() for p in params]
        for set_to_none in (True, False, True):
            with optimizer.no_sync():
                sum(p.sum() for p in params).backward()
            sum(p.sum() for p in params).backward()
            optimizer.step()
            with Operations() as operations:
                optimizer.zero_grad(set_to_none=set_to_none)
            assert [p.grad.data_ptr() for p in params] == addresses
            assert operations["aten.zero_"] == len(optimizer._backward.buckets) == 3
            assert not any(p.grad.any() for p in params)
        return operations.collectives()

    assert on_ranks(2, check) == [{}] * 2


def test_a_gradient_asked_for_otherwise_does_not_disturb_capturable_ones():
    def check(rank, ask):
        p = nn.Parameter(torch.ones(100))
        optimizer = ShardedOptimizer([p], torch.optim.SGD, lr=1.0, capturable=True)
        p.sum().backward()
        if ask:
            torch.autograd.grad((p * 3).sum(), p)
        optimizer.step()
        return p.detach().clone()

    assert torch.equal(on_ranks(2, check, True)[0], on_ranks(2, check, False)[0])


def test_sharded_gradients_take_a_slice_and_two_buffers():
    def check(rank):
        params = [nn.Parameter(torch.ones(1024)) for _ in range(8)]
        optimizer = INNER["fused"](params, bucket_cap_mb=4096 / 2**20, shard_gradients=True)
        sum(p.sum() for p in params).backward()
        pool = next(iter(optimizer._distribution.pools.values()))
        slices = sum(bucket.gradients.slice.untyped_storage().nbytes() for bucket in optimizer._backward.buckets)
        return slices, [buffer.numel() for buffer in pool._free]

    assert on_ranks(2, check) == [(8 * 4 * (1024 + 128) // 2, [1024 + 128] * 2)] * 2


BYTES = {  # of bf16 parameters: on the device, for each parameter
    "as it is": ({}, lambda n: 2 + 2 + 4 / n),
    "fp32 masters": ({"inner_dtype": torch.float32}, lambda n: 2 + 2 + (4 + 4 + 8) / n),
    "fp32 masters and gradients": (
        {"inner_dtype": torch.float32, "grad_dtype": torch.float32},
        lambda n: 2 + 4 + (4 + 8) / n,
    ),
    "sharded gradients": ({"shard_gradients": True}, lambda n: 2 + 2 / n + 2 * 2 / 8 + 4 / n),
    "capturable": ({"capturable": True}, lambda n: 2 + 2 + 4 / n),
}


def storages():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_bytes_are_those_of_the_formula():
    def bytes_with(options):
        gc.freeze()  # what has been there before isn't looked at
        params = [nn.Parameter(torch.ones(2**15, dtype=torch.bfloat16)) for _ in range(8)]
        optimizer = INNER["fused"](params, bucket_cap_mb=2**15 * 2 / 2**20, **options)
        sum(p.sum() for p in params).backward()
        optimizer.step()
        return sum(storages().values()) / (8 * 2**15)

    for seen in on_ranks(2, lambda rank: {name: bytes_with(options) for name, (options, _) in BYTES.items()}):
        assert seen == {name: pytest.approx(expected(2), rel=0.01) for name, (_, expected) in BYTES.items()}
