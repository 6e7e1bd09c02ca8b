import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from stepstack_gradnorm import Part, _sums, grads_of, tensor_norms, total_norm
from stepstack_testing import HostSyncs, Operations, RankError, on_ranks

TYPES = [0, 0.5, 1, 2, 3, 9, math.inf]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def norm_of(tensors, norm_type=2.0):
    whole = torch.cat([tensor.double().flatten() for tensor in tensors])
    return torch.linalg.vector_norm(whole, norm_type).item()


def measured(*arguments, **options):
    """The norm, what it communicated, and what it waited for."""
    with Operations() as operations, HostSyncs() as syncs:
        norm = total_norm(*arguments, **options)
    assert syncs == []
    return norm, operations.collectives()


def each_type(*arguments):
    """For each norm type, the norm and what it communicated."""
    results = [measured(*arguments, norm_type) for norm_type in TYPES]
    return [(norm.item(), collectives) for norm, collectives in results]


def norms_of(tensors, collectives):
    return [(pytest.approx(norm_of(tensors, norm_type), rel=1e-6, abs=0), collectives) for norm_type in TYPES]


def all_reduces(count):
    return {"c10d.allreduce_": count} if count else {}


def test_experts_on_two_ranks_add_up():
    def run(rank):
        experts = [[[2.0, 0], [4.0, 0]], [[6.0, 0], [0, 8.0]]][rank]
        grads = [torch.tensor(values) for values in experts]
        norm, collectives = measured([Part(grads, sharded_over=dist.group.WORLD)])
        return norm.item(), collectives

    assert on_ranks(2, run) == [(pytest.approx(math.sqrt(120), rel=1e-6, abs=0), all_reduces(1))] * 2


def test_a_tied_weight_counts_once_if_one_stage_owns_it_and_twice_as_two_weights():
    def run(rank):
        grad = torch.full((4,), 10.0)
        owned, _ = measured(Part([grad] if rank == 0 else [], sharded_over=dist.group.WORLD))
        two, _ = measured(Part([grad], sharded_over=dist.group.WORLD))
        return owned.item(), two.item()

    assert on_ranks(2, run) == [(20.0, pytest.approx(math.sqrt(800), rel=1e-6, abs=0))] * 2


def test_a_rank_without_gradients_takes_part():
    def run(rank):
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
        if rank == 0:
            parameters[0].grad, parameters[1].grad = random(3), random(2, seed=1)
        no_gradients = each_type(Part(grads_of(parameters), sharded_over=dist.group.WORLD))
        if rank == 1:
            parameters = []
        no_parameters = each_type(Part(grads_of(parameters), sharded_over=dist.group.WORLD))
        return no_gradients, no_parameters

    expected = norms_of([random(3), random(2, seed=1)], collectives=all_reduces(1))
    assert on_ranks(2, run) == [(expected, expected)] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_bf16_gradients_have_the_same_norm_however_many_ranks_hold_them(world_size):
    grads = [random(17, 3, dtype=torch.bfloat16), random(64, seed=1, dtype=torch.bfloat16)]

    def run(rank):
        pieces = [grad.flatten().tensor_split(world_size)[rank] for grad in grads]
        mesh = init_device_mesh("cpu", (world_size,))
        sharded = [distribute_tensor(grad, mesh, [Shard(0)]) for grad in grads]
        return total_norm(Part(pieces, sharded_over=dist.group.WORLD)).item(), total_norm(sharded).item()

    expected = pytest.approx(norm_of(grads), rel=1e-6, abs=0)
    assert total_norm(grads).item() == expected
    assert on_ranks(world_size, run) == [(expected, expected)] * world_size


def test_dtensors_of_any_placements_and_plain_tensors_in_one_call():
    shard, replicate, plain, uneven = random(6, 3), random(5, seed=1), random(4, seed=2), random(3, 2, seed=3)

    def run(rank):
        square = init_device_mesh("cpu", (2, 2))
        line = init_device_mesh("cpu", (4,))
        grads = [
            distribute_tensor(shard, square, [Shard(0), Shard(1)]),
            distribute_tensor(replicate, line, [Replicate()]),
            plain,
            distribute_tensor(uneven, line, [Shard(0)]),  # rank 3 holds no rows
        ]
        return each_type(grads)

    assert on_ranks(4, run) == [norms_of([shard, replicate, plain, uneven], all_reduces(3))] * 4


def test_a_dtensor_that_leaves_out_ranks_of_others_says_by_a_part_what_those_hold():
    def run(rank):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
        line = init_device_mesh("cpu", (4,))
        dense = distribute_tensor(torch.full((4,), 3.0), line, [Shard(0)])
        expert = DTensor.from_local(torch.full((1,), 2.0 + rank // 2), grid["data"], [Shard(0)], run_check=False)
        plain, empty = torch.ones(4), DTensor.from_local(torch.empty(0), grid["data"], [Shard(0)], run_check=False)
        for mix in ([dense, expert], [expert, plain], [dense, empty], [Part(dense, grid["expert"]), expert]):
            with pytest.raises(ValueError, match=rf"rank {rank}: a DTensor lies on the ranks \[.*other pieces.*Part"):
                total_norm(mix)
        experts = Part([expert, empty], sharded_over=grid["expert"])
        return [
            total_norm([experts, dense, plain]).item(),
            total_norm([experts, expert, empty, dense]).item(),  # what a Part has may be listed after it
            total_norm([Part(DTensor.from_local(plain[:2], grid["data"], [Shard(0)])), dense]).item(),
            total_norm([dense, expert], agree_over=dist.group.WORLD).item(),
            total_norm([DTensor.from_local(plain[:2], grid["data"], [Shard(0)])]).item(),  # nothing says of others
        ]

    squares = [36 + 2 * (4 + 9) + 4, 36 + 2 * (4 + 9), 36 + 4, 36 + 2 * 9, 4]
    assert on_ranks(4, run) == [pytest.approx([math.sqrt(square) for square in squares], rel=1e-6, abs=0)] * 4


def test_zero_rows_on_one_rank():
    grad = random(1, 4)

    def run(rank):
        return each_type([distribute_tensor(grad, init_device_mesh("cpu", (2,)), [Shard(0)])])

    assert on_ranks(2, run) == [norms_of([grad], all_reduces(1))] * 2


def test_norm_type_zero_counts_the_elements_of_shards_that_are_not_zero():
    grad = torch.tensor([[0.0, -0.0, 2.0], [0.0, 1e-30, 0.0], [-3.0, 0.0, 0.0]])

    def run(rank):
        sharded = distribute_tensor(grad, init_device_mesh("cpu", (2,)), [Shard(0)])
        norm, collectives = measured([sharded], 0)
        return norm.item(), collectives

    assert on_ranks(2, run) == [(3.0, all_reduces(1))] * 2


def test_a_partial_gradient_is_what_its_terms_add_up_to():
    terms = [random(3, 4, seed=seed) for seed in range(4)]

    def run(rank):
        line = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2))
        whole = DTensor.from_local(terms[rank], line, [Partial()], run_check=False)
        rows = terms[rank // 2].tensor_split(2)[rank % 2].contiguous()
        half = DTensor.from_local(rows, square, [Partial("avg"), Shard(0)], run_check=False)
        return total_norm([whole]).item(), total_norm([half]).item(), total_norm([half, whole, half]).item()

    whole, half = sum(terms), (terms[0] + terms[1]) / 2
    expected = tuple(pytest.approx(norm_of(grads), rel=1e-6, abs=0) for grads in ([whole], [half], [whole, half]))
    assert on_ranks(4, run) == [expected] * 4


def test_a_dtensor_parameter_without_gradient_keeps_its_place():
    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])) for _ in range(2)]
        if rank == 0:
            parameters[1].grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
        norm, collectives = measured(grads_of(parameters))
        return norm.item(), collectives

    assert on_ranks(2, run) == [(2.0, all_reduces(1))] * 2


def test_model_parallel_shards_and_their_replicas():
    """Tensor parallel pairs (0, 1), (2, 3); pipeline stages (0, 2), (1, 3): layer norms are held by both of a pair."""
    weight, bias = random(4, 8), random(8, seed=1)

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
        stage, column = rank // 2, rank % 2
        parts = [
            Part([weight[2 * stage : 2 * stage + 2, 4 * column : 4 * column + 4]], sharded_over=mesh),
            Part([bias[4 * stage : 4 * stage + 4]], sharded_over=mesh["stage"]),
        ]
        (norm, norms), collectives = measured(parts, part_norms=True)
        return norm.item(), norms.tolist(), collectives

    expected = (
        pytest.approx(norm_of([weight, bias]), rel=1e-6, abs=0),
        pytest.approx([norm_of([weight]), norm_of([bias])], rel=1e-6, abs=0),
        all_reduces(2),
    )
    assert on_ranks(4, run) == [expected] * 4


def test_stages_of_dtensors_may_be_empty():
    """A Part is one number when its groups meet, whatever meshes its DTensors have on some ranks only."""
    grads = [random(4, 3), random(5, seed=1)]

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        mine = [distribute_tensor(grad, mesh["data"], [Shard(0)]) for grad in grads] if rank < 2 else []
        norm, collectives = measured(Part(mine, sharded_over=mesh["stage"]))
        return norm.item(), collectives

    expected = pytest.approx(norm_of(grads), rel=1e-6, abs=0)
    assert on_ranks(4, run) == [(expected, all_reduces(2))] * 2 + [(expected, all_reduces(1))] * 2


def test_parts_may_name_their_groups_in_different_orders():
    def run(rank):
        one, other, third = (dist.new_group([0, 1, 2]) for _ in range(3))
        parts = [Part([torch.ones(1)], (other, one)), Part([torch.full((1,), 2.0)], (third, one))]
        return total_norm(parts).item()

    assert on_ranks(3, run) == [pytest.approx(math.sqrt(9 + 9 * 4), rel=1e-6, abs=0)] * 3


@pytest.mark.parametrize("made_before", range(6, 9))
def test_ranks_of_a_grid_reduce_the_same_axis_whatever_its_groups_are_called(made_before):
    def run(rank):
        for _ in range(made_before):  # so that names run over from 9 to 10, which sorts before it
            dist.new_group([0, 1, 2, 3])
        mesh = init_device_mesh("cpu", (2, 2))
        grad = DTensor.from_local(torch.full((1,), 10.0**rank), mesh, [Shard(0), Shard(0)], run_check=False)
        part = Part([torch.full((1,), 10.0**rank)], sharded_over=mesh.get_all_groups())
        return total_norm([grad], 1).item(), total_norm([part], 1).item()

    assert on_ranks(4, run) == [(1111.0, 1111.0)] * 4


def test_a_group_given_twice_counts_once():
    def run(rank):
        norm, collectives = measured(Part([torch.ones(2)], [dist.group.WORLD, dist.group.WORLD]))
        return norm.item(), collectives

    assert on_ranks(2, run) == [(2.0, all_reduces(1))] * 2


def test_a_group_of_one_rank_needs_no_reduction():
    def run(rank):
        groups = [dist.new_group([member]) for member in range(2)]
        norm, collectives = measured(Part([torch.ones(4)], groups[rank]))
        return norm.item(), collectives

    assert on_ranks(2, run) == [(2.0, {})] * 2


def test_parts_that_end_in_different_groups_agree():
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        part = Part([torch.full((1,), rank + 1.0)], groups[rank // 2])
        alone = total_norm(part)
        agreed, collectives = measured(part, agree_over=dist.group.WORLD)
        return alone.item(), agreed.item(), collectives

    results = on_ranks(4, run)
    assert [alone for alone, _, _ in results] == pytest.approx([math.sqrt(5)] * 2 + [5.0] * 2)
    assert [agreed for _, agreed, _ in results] == [5.0] * 4
    assert all(collectives == all_reduces(2) for _, _, collectives in results)


def test_a_rank_outside_of_a_group_learns_the_norm_by_agreement():
    def run(rank):
        pair = dist.new_group([0, 1])
        mesh = DeviceMesh("cpu", [0, 1])
        part = Part([torch.ones(2)] if rank < 2 else [], pair)
        same = Part([torch.ones(5)] if rank < 2 else [], mesh)
        sharded = DTensor.from_local(torch.ones(6 if rank < 2 else 0), mesh, [Shard(0)], run_check=False)
        if rank == 2:
            for alone in (part, same, sharded):
                with pytest.raises(ValueError, match=r"rank 2 is outside.*agree_over"):
                    total_norm([alone])
            with pytest.raises(ValueError, match="rank 2 is outside"):
                Part([torch.ones(2)], pair)
        return total_norm([part, same, sharded], agree_over=dist.group.WORLD).item()

    assert on_ranks(3, run) == [pytest.approx(math.sqrt(2 * (2 + 5 + 6)), rel=1e-6, abs=0)] * 3


@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_element_on_one_rank_shows_on_all(where):
    def run(rank):
        norms = []
        for bad in (math.nan, math.inf):
            part = Part([torch.tensor([1.0, bad if rank == where else 2.0])], dist.group.WORLD)
            norms += [total_norm(part, norm_type, agree_over=dist.group.WORLD).item() for norm_type in TYPES[1:]]
        return norms

    for norms in on_ranks(2, run):
        assert [math.isnan(norm) for norm in norms] == [True] * 6 + [False] * 6
        assert not any(math.isfinite(norm) for norm in norms)


def test_the_range_is_kept_over_ranks():
    cases = [(value, norm_type) for value in (1e20, 1e-30) for norm_type in (2, 9)]

    def run(rank):
        return [total_norm(Part([torch.tensor([value])], dist.group.WORLD), p).item() for value, p in cases]

    assert on_ranks(3, run) == [pytest.approx([value * 3 ** (1 / p) for value, p in cases], rel=1e-6, abs=0)] * 3


def test_fp64_keeps_range_and_digits_where_one_rank_has_it_and_all_agree():
    def run(rank):
        grad = torch.tensor([2e200 / 3 if rank == 0 else 1.0], dtype=torch.float64 if rank == 0 else torch.float32)
        norms = [total_norm(Part([grad], dist.group.WORLD), p, agree_over=dist.group.WORLD) for p in TYPES]
        narrow = total_norm(Part([grad.float() if rank else grad[:0]], dist.group.WORLD))
        return [norm.item() for norm in norms], [norm.dtype for norm in norms], narrow

    first, other = on_ranks(2, run)
    wide = torch.tensor([2e200 / 3, 1.0], dtype=torch.float64)
    scaled = [torch.linalg.vector_norm(wide / wide[0], p).item() * wide[0].item() for p in TYPES[1:]]
    assert first[:2] == ([2, *(pytest.approx(norm, rel=1e-14) for norm in scaled)], [torch.float64] * len(TYPES))
    assert other[:2] == ([2, *([math.inf] * len(scaled))], [torch.float32] * len(TYPES))  # it has no fp64 gradient
    assert (first[2].dtype, other[2].dtype, first[2], other[2]) == (torch.float64, torch.float32, 1, 1)


def test_ranks_get_the_same_bits():
    def run(rank):
        parts = [
            Part([random(1000, seed=rank)], dist.group.WORLD),
            Part([random(999, seed=rank + 9)], dist.group.WORLD),
        ]
        return [total_norm(parts, norm_type).view(torch.int32).item() for norm_type in TYPES]

    results = on_ranks(3, run)
    assert results == [results[0]] * 3


def test_tensor_norms_come_out_of_one_reduction():
    sharded, other, own = random(5, 2), random(3, seed=1), random(4, seed=2)

    def run(rank):
        grads = {
            "sharded": distribute_tensor(sharded, init_device_mesh("cpu", (2,)), [Shard(0)]),
            "part": Part([other] if rank == 1 else [], dist.group.WORLD),
            "own": own,
            "missing": None,
        }
        results = []
        for norm_type in TYPES:
            with Operations() as operations, HostSyncs() as syncs:
                norms = tensor_norms(grads, norm_type)
            assert list(norms) == list(grads)
            assert syncs == []
            results.append(([norm.item() for norm in norms.values()], operations.collectives()))
        return results

    expected = []
    for norm_type in TYPES:
        norms = [norm_of([grad], norm_type) for grad in (sharded, other, own)]
        expected.append((pytest.approx([*norms, 0.0], rel=1e-6, abs=0), all_reduces(1)))
    assert on_ranks(2, run) == [expected] * 2


@pytest.mark.parametrize("ndim", [1, 2])
def test_shards_of_a_bucket_cost_the_same_however_many(ndim):
    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2)[:ndim])
        placements = ([Replicate()] if ndim == 2 else []) + [Shard(0)]
        counts = []
        for count in (100, 1000):
            bucket = random(6000)
            pieces = [
                DTensor.from_local(piece, mesh, placements, run_check=False, shape=(2 * len(piece),), stride=(1,))
                for piece in [*bucket.split(6000 // count), bucket[:0]]
            ]
            with Operations() as operations:
                norm = total_norm(pieces)
            counts.append((dict(operations), norm.item()))
        return counts

    for few, many in on_ranks(2 * ndim, run):
        assert few == many
        assert few[1] == pytest.approx(norm_of([random(6000)] * 2), rel=1e-6, abs=0)


def test_a_gradient_that_is_still_travelling_is_waited_for():
    def run(rank):
        grad = all_reduce(torch.full((3,), float(rank)), "sum", dist.group.WORLD)
        assert isinstance(grad, AsyncCollectiveTensor)
        sharded = DTensor.from_local(grad, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        return total_norm([sharded, sharded]).item()

    assert on_ranks(2, run) == [pytest.approx(math.sqrt(6), rel=1e-6, abs=0)] * 2


def test_ranks_without_fp64_send_scaled_pairs(monkeypatch):
    monkeypatch.setattr(_sums, "has_float64", lambda: False)
    cases = [(value, norm_type) for value in (1e20, 1e-30, 1.0, 0.0) for norm_type in TYPES]

    def run(rank):
        norms = []
        for value, norm_type in cases:
            grad = torch.tensor([value, -value]) if rank else torch.empty(0)
            norm, collectives = measured(Part([grad], dist.group.WORLD), norm_type)
            assert collectives == all_reduces(1)
            norms.append(norm.item())
        return norms

    expected = [norm_of([torch.tensor([value, -value] * 2)], norm_type) for value, norm_type in cases]
    assert on_ranks(3, run)[2] == pytest.approx(expected, rel=1e-6, abs=0)


def test_a_missing_rank_ends_in_an_error():
    def run(rank):
        if rank == 0:
            total_norm(Part([torch.ones(1)], dist.group.WORLD))

    with pytest.raises(RankError, match="rank 0"):
        on_ranks(2, run, timeout=1.0)
