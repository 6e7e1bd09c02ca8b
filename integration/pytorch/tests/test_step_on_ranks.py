import math
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepstack import OptimizerStep
from stepstack_fused_adam import FusedAdamW
from stepstack_grad_scaler import GradScaler
from stepstack_gradnorm import Part
from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import HostSyncs, RankError, on_ranks


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((30, 5), (70,), ())]


def sharded(params):
    return ShardedOptimizer(params, FusedAdamW, lr=0.1)


def backward(params, scaler, rank, number, bad_rank=None):
    generator = torch.Generator().manual_seed(10 * number + rank)
    loss = sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params)
    if rank == bad_rank:
        loss = loss + params[0][0, 0] * math.nan
    (loss if scaler is None else scaler.scale(loss)).backward()


def test_the_step_composed_by_hand_is_the_same_bit_for_bit(step_by_hand):
    def run(rank):
        params, by_hand = parameters(), parameters()
        composed_scaler, scaler = GradScaler("cpu"), GradScaler("cpu")
        optimizer = sharded(by_hand)
        step = OptimizerStep(sharded(params), max_norm=1.0, scaler=composed_scaler)
        for number in range(4):
            bad_rank = 1 if number == 2 else None
            backward(params, composed_scaler, rank, number, bad_rank)
            result = step()

            backward(by_hand, scaler, rank, number, bad_rank)
            norm, found_inf = step_by_hand(optimizer, scaler, optimizer.grad_shards())

            assert torch.equal(result.grad_norm, norm) or number == 2
            assert torch.equal(result.skipped, found_inf)
            assert torch.equal(composed_scaler.scale_tensor, scaler.scale_tensor)
            assert all(map(torch.equal, params, by_hand))

    on_ranks(2, run)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=["2 ranks", "4 ranks", "2 pairs"])
def test_all_ranks_see_one_norm_and_skip_together(shape):
    def run(rank):
        params = parameters()[2:]  # a single number: most ranks own nothing
        optimizer = ShardedOptimizer(params, FusedAdamW, mesh=init_device_mesh("cpu", shape))
        step = OptimizerStep(optimizer, lr_scheduler=lambda applied_steps: 0.5**applied_steps)
        results = []
        for number, bad in enumerate((False, True, False)):
            params[0].square().mul(math.inf if bad and rank == 0 else rank + number + 1).backward()
            result = step()
            results.append(torch.stack([*result, step.applied_steps, params[0].detach()]))
        return torch.stack(results)

    first, *others = on_ranks(torch.Size(shape).numel(), run)
    assert all(torch.equal(other.nan_to_num(), first.nan_to_num()) for other in others)
    norm, _, skipped, applied_steps, weight = first.T
    assert skipped.tolist() == [0, 1, 0]
    assert applied_steps.tolist() == [1, 1, 2]
    assert norm.isfinite().tolist() == [True, False, True]
    assert weight[1] == weight[0] != weight[2]


@pytest.mark.filterwarnings("ignore:.*ranks differed")
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3 ranks", "2 pairs"])
def test_a_step_is_skipped_on_all_ranks_if_they_differ_in_what_has_a_gradient(shape):
    def run(rank):
        params = parameters()
        step = OptimizerStep(ShardedOptimizer(params, FusedAdamW, mesh=init_device_mesh("cpu", shape)), max_norm=1.0)
        history = []
        for number in range(3):
            used = params[:2] if number == 1 and rank == 1 else params
            sum(param.square().sum() for param in used).backward()
            history.append((step().skipped.item(), params[0][0, 0].item()))
        return history

    for history in on_ranks(torch.Size(shape).numel(), run):
        skipped, (first, second, third) = zip(*history, strict=True)
        assert skipped == (0, 1, 0)
        assert first == second != third


def test_parameters_that_fsdp_shards_are_stepped_as_one_process_steps_them():
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))

    def run(rank):
        whole, cut = model(), model()
        fully_shard(cut, mesh=init_device_mesh("cpu", (2,)))
        reference = torch.optim.AdamW(whole.parameters(), lr=0.1)
        step = OptimizerStep(FusedAdamW(cut.parameters(), lr=0.1), max_norm=0.1)
        for number in range(5):
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            whole(batch).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            reference.step()
            reference.zero_grad()
            cut(batch.chunk(2)[rank]).square().mean().backward()
            with HostSyncs() as syncs:
                result = step()
            assert syncs == []
            torch.testing.assert_close(result.grad_norm, norm)
        for mine, expected in zip(cut.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), expected, rtol=1e-5, atol=1e-6)

    on_ranks(2, run)


def expert_grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))


def test_experts_of_a_sharded_optimizer_step_as_one_with_a_part_and_are_refused_without():
    def check(rank):
        grid = expert_grid()
        dense, expert = torch.nn.Parameter(torch.zeros(300)), torch.nn.Parameter(torch.zeros(300))
        groups = [{"params": [dense]}, {"params": [expert], "mesh": grid["data"]}]
        optimizer = ShardedOptimizer(groups, torch.optim.SGD, lr=1.0)
        with pytest.raises(ValueError, match=f"rank {rank}: parameters in several meshes.*parts="):
            OptimizerStep(optimizer)
        step = OptimizerStep(optimizer, max_norm=3.0, parts=Part([expert], sharded_over=grid["expert"]))
        (dense.sum() + expert.sum() * (2 if rank > 1 else 4)).backward()  # of experts half counts, of 4 ranks 2
        norm = step().grad_norm
        stepped = norm.item(), dense.unique().tolist(), expert.unique().tolist()

        (dense.sum() + expert.sum() * (math.nan if rank > 1 else 1)).backward()
        skipped = step().skipped.item()
        (dense.sum() + expert.sum() if rank != 3 else dense.sum()).backward()
        return stepped, skipped, step().skipped.item(), dense.unique().tolist()

    norm = (300 * (1 + 2**2 + 1)) ** 0.5
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ranks differed")
        results = on_ranks(4, check)
    for rank, ((seen, dense, expert), of_nan, of_difference, dense_in_the_end) in enumerate(results):
        assert seen == pytest.approx(norm)
        assert dense == dense_in_the_end == [pytest.approx(-3 / norm)]
        assert expert == [pytest.approx(-3 / norm * (1 if rank > 1 else 2))]
        assert (of_nan, of_difference) == (1, 1)


@pytest.mark.parametrize("with_scaler", [False, True], ids=["no scaler", "scaler"])
def test_experts_as_dtensors_step_as_one_with_a_part_and_are_refused_without(with_scaler):
    def check(rank):
        grid, line = expert_grid(), init_device_mesh("cpu", (4,))
        dense = torch.nn.Parameter(distribute_tensor(torch.ones(8), line, [Shard(0)]))
        expert = torch.nn.Parameter(DTensor.from_local(torch.ones(4), grid["data"], [Shard(0)]))
        scaler = GradScaler("cpu", init_scale=1.0) if with_scaler else None
        if scaler is not None:
            scaler.scale(torch.ones(()))
        optimizer = FusedAdamW([dense, expert], lr=0.1)
        parts = [Part([expert], sharded_over=grid["expert"])]
        step = OptimizerStep(optimizer, max_norm=1.0, scaler=scaler, parts=lambda: parts)
        results = []
        for value in (1.0, math.nan):
            for used in (OptimizerStep(optimizer), step):
                dense.grad = distribute_tensor(torch.ones(8), line, [Shard(0)])
                expert.grad = DTensor.from_local(torch.full((4,), value if rank > 1 else 2.0), grid["data"], [Shard(0)])
                if used is step:
                    results.append(used())
                    continue
                with pytest.raises(ValueError, match=rf"rank {rank}: a DTensor lies on the ranks.*Part"):
                    used()
        scale = 0.0 if scaler is None else scaler.get_scale()
        return (
            [(result.grad_norm.item(), result.skipped.item()) for result in results],
            scale,
            dense.to_local().tolist(),
        )

    results = on_ranks(4, check)
    for (first, second), scale, weights in results:
        assert first == (pytest.approx((8 + 8 * 4 + 8) ** 0.5), 0)
        assert second[1] == 1
        assert scale == 0.5 * with_scaler
        assert weights == results[0][2] != [1, 1]


def test_a_part_of_what_the_optimizer_does_not_have_is_refused():
    params, strange = parameters(), torch.nn.Parameter(torch.zeros(3, 2))
    for optimizer in (FusedAdamW(params), sharded(params)):
        with pytest.raises(
            ValueError, match=r"this process: a tensor of parts\[0\], of shape \(3, 2\), is no parameter"
        ):
            OptimizerStep(optimizer, parts=[Part([strange])])()
        with pytest.raises(TypeError, match=r"parts must be stepstack_gradnorm\.Parts, got Parameter"):
            OptimizerStep(optimizer, parts=params)


def test_a_negative_max_norm_is_refused_with_the_rank():
    with pytest.raises(RankError, match=r"rank 1: max_norm must be 0 or more.* got -1\.0"):
        on_ranks(2, lambda rank: OptimizerStep(sharded(parameters()), max_norm=-1.0))
