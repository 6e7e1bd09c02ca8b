"""One decision on all ranks, whoever found the gradient that is not finite."""

import pytest
import torch
import torch._dynamo  # by DTensor, later: here once, instead of in every forked rank
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stepstack_grad_scaler import GradScaler
from stepstack_testing import HostSyncs, Operations, RankError, on_ranks

INF = float("inf")


class Local(torch.optim.SGD):
    """Keeps the contract on the local tensors, be they of DTensors or plain."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                local(parameter).sub_(torch.where(self.found_inf != 0, 0.0, 1.0))


def adam(parameters):
    return torch.optim.AdamW(parameters)


def fused_adam(parameters):
    return torch.optim.AdamW(parameters, fused=True)


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sharing(mesh, placements, *, size=2, bad=False, gradient=True):
    """A parameter of `size` ones on this rank, with a gradient of ones that this rank may spoil."""

    def dtensor(tensor):
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=(64,), stride=(1,))

    parameter = torch.nn.Parameter(dtensor(torch.ones(size)))
    if gradient:
        parameter.grad = dtensor(torch.full((size,), INF if bad else 1.0))
    return parameter


def plain(*, bad=False, gradient=True):
    parameter = torch.nn.Parameter(torch.ones(2))
    if gradient:
        parameter.grad = torch.full((2,), INF if bad else 1.0)
    return parameter


def decision(parameters, *, optimizer=Local, unscale=False, groups=(), scaler=GradScaler):
    """Did the step move the parameters, and what became of a scale of 8 that grows at each clean step?"""
    optimizer = optimizer(parameters)
    chosen = {"groups": groups} if groups else {}
    scaler = scaler("cpu", init_scale=8.0, growth_interval=1, **chosen)
    scaler.scale(torch.ones(()))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    moved = {bool((local(parameter) != 1).all()) for parameter in parameters if local(parameter).numel()}
    return moved, scaler.get_scale()


SKIPPED, STEPPED = ({False}, 4.0), ({True}, 16.0)
each_way = pytest.mark.parametrize("unscale", [False, True], ids=["fused", "unscaled"])


@each_way
@pytest.mark.parametrize("optimizer", [fused_adam, adam, Local])
def test_inf_on_one_rank_of_sharded_gradients_skips_on_both(unscale, optimizer):
    def on_rank(rank, bad_rank):
        mesh = init_device_mesh("cpu", (2,))
        parameters = [sharing(mesh, [Shard(0)]), sharing(mesh, [Shard(0)], bad=rank == bad_rank)]
        return decision(parameters, unscale=unscale, optimizer=optimizer)

    assert on_ranks(2, on_rank, 0) == [SKIPPED] * 2
    assert on_ranks(2, on_rank, None) == [STEPPED] * 2


@each_way
@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_replicated_gradients_that_come_first_hide_nothing(unscale, scaler):
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        parameters = [sharing(mesh, [Replicate()]), sharing(mesh, [Shard(0)], bad=rank == 0)]
        return decision(parameters, unscale=unscale, optimizer=fused_adam, scaler=scaler)

    # torch looks at the first gradient's placements only: its ranks part ways.
    assert on_ranks(2, on_rank) == ([SKIPPED] * 2 if scaler is GradScaler else [SKIPPED, STEPPED])


@each_way
def test_pieces_of_an_uneven_cut_decide_together(unscale):
    """Replicated over one axis, cut over the other, and nothing of it on some ranks."""

    def on_rank(rank, bad_rank):
        mesh = init_device_mesh("cpu", (2, 2))
        cut = [Replicate(), Shard(0)]
        pieces = [sharing(mesh, cut, size=3 * (rank % 2), bad=rank == bad_rank), sharing(mesh, cut, size=1 + rank % 2)]
        return decision(pieces, unscale=unscale)

    assert on_ranks(4, on_rank, 3) == [SKIPPED] * 4
    assert on_ranks(4, on_rank, None) == [STEPPED] * 4


def test_meshes_plain_tensors_and_groups_decide_together():
    def on_rank(rank, culprit):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
        parameters = [
            plain(bad=culprit == (rank, 0)),
            sharing(grid, [Shard(0), Replicate()], bad=culprit == (rank, 1)),
            sharing(grid["row"], [Shard(0)], bad=culprit == (rank, 2)),
            sharing(grid["column"], [Partial()], bad=culprit == (rank, 3)),
        ]
        return decision(parameters, groups=(dist.group.WORLD,))

    for culprit in ((2, 0), (1, 1), (3, 2), (0, 3)):
        assert on_ranks(4, on_rank, culprit) == [SKIPPED] * 4
    assert on_ranks(4, on_rank, None) == [STEPPED] * 4


def test_ranks_outside_a_mesh_decide_with_it_if_a_group_spans_both():
    def on_rank(rank, spanning):
        mesh = DeviceMesh("cpu", [0, 1])
        parameters = [plain(), sharing(mesh, [Shard(0)], size=2 if rank < 2 else 0, bad=rank == 0)]
        return decision(parameters, groups=(dist.group.WORLD,) if spanning else ())

    assert on_ranks(3, on_rank, True) == [SKIPPED] * 3
    with pytest.raises(RankError, match=r"rank 0: .* mesh of 2 of the 3 ranks and plain parameters.*groups="):
        on_ranks(3, on_rank, False)


def test_meshes_of_which_none_has_all_ranks_are_refused_without_groups():
    def on_rank(rank):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
        rows, columns = sharing(grid["expert"], [Shard(0)]), sharing(grid["data"], [Shard(0)], bad=rank == 0)
        with pytest.raises(ValueError, match=rf"rank {rank}: .* no mesh has all of these: .*groups="):
            decision([rows, columns])
        frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)  # says nothing of other ranks
        alone = [sharing(grid["data"], [Shard(0)]), frozen]
        of_all = sharing(grid, [Shard(0), Replicate()])
        return decision(alone)[1], decision([rows, columns, of_all, plain()], unscale=True)

    assert on_ranks(4, on_rank) == [(16.0, SKIPPED)] * 4


def test_groups_that_connect_as_a_grid_decide_together():
    def on_rank(rank, bad_rank):
        rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        groups = [dist.new_group(ranks) for ranks in rows + columns]
        own = [group for group, ranks in zip(groups, rows + columns, strict=True) if rank in ranks]
        return decision([plain(bad=rank == bad_rank)], groups=own)

    assert [on_ranks(4, on_rank, bad_rank) for bad_rank in range(4)] == [[SKIPPED] * 4] * 4


def test_ranks_that_list_their_parameters_in_another_order_do_not_hang():
    def on_rank(rank):
        meshes = [DeviceMesh("cpu", [0, 1, last], mesh_dim_names=(f"with {last}",)) for last in (2, 3)]
        mine = [mesh for mesh in meshes if rank in mesh.mesh]
        parameters = [sharing(mesh, [Shard(0)], bad=rank == 1) for mesh in (mine if rank else mine[::-1])]
        pair = dist.new_group([0, 1])
        return decision(parameters, groups=(pair,) if rank < 2 else ())

    assert on_ranks(4, on_rank) == [SKIPPED] * 4


@each_way
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_a_rank_without_gradients_takes_part(unscale, sharded):
    def on_rank(rank, bad):
        if sharded:
            mesh, groups = init_device_mesh("cpu", (2,)), ()
            parameters = [sharing(mesh, [Shard(0)], bad=bad, gradient=rank == 0)]
        else:
            parameters, groups = [plain(bad=bad, gradient=rank == 0)], (dist.group.WORLD,)
        return decision(parameters, unscale=unscale, groups=groups)

    assert on_ranks(2, on_rank, True) == [SKIPPED] * 2
    assert on_ranks(2, on_rank, False) == [STEPPED, ({False}, 16.0)]


@each_way
def test_without_gradients_on_any_rank_nothing_happens(unscale):
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        parameters = [sharing(mesh, [Shard(0)], gradient=False), plain(gradient=False)]
        return decision(parameters, unscale=unscale, groups=(dist.group.WORLD,))

    assert on_ranks(2, on_rank) == [({False}, 8.0)] * 2


@each_way
@pytest.mark.parametrize("optimizer", [fused_adam, adam, Local])
@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
def test_what_one_rank_sets_before_the_step_skips_on_both(unscale, optimizer, name):
    def on_rank(rank, bad_rank):
        mesh = init_device_mesh("cpu", (2,))

        def with_attribute(parameters):
            made = optimizer(parameters)
            good, bad = {"found_inf": (0.0, 1.0), "grad_scale": (1.0, INF)}[name]
            setattr(made, name, torch.tensor(bad if rank == bad_rank else good))
            return made

        return decision([sharing(mesh, [Shard(0)])], unscale=unscale, optimizer=with_attribute)

    assert on_ranks(2, on_rank, 1) == [SKIPPED] * 2
    assert on_ranks(2, on_rank, None) == [STEPPED] * 2


def test_a_flag_that_is_handed_in_is_agreed_over_the_groups():
    def on_rank(rank):
        scaler = GradScaler("cpu", init_scale=8.0, groups=(dist.group.WORLD,))
        scaler.update(found_inf=torch.tensor(float("nan") if rank == 1 else 0.0))
        return scaler.get_scale(), scaler.skipped_steps.item()

    assert on_ranks(2, on_rank) == [(4, 1)] * 2


def test_a_flag_may_be_a_dtensor():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        gradient = DTensor.from_local(torch.tensor([INF if rank == 0 else 1.0]), mesh, [Shard(0)])
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.update(found_inf=(~gradient.norm().isfinite()).float())
        return scaler.get_scale()

    assert on_ranks(2, on_rank) == [4, 4]


def test_it_costs_one_small_reduction_for_each_axis_and_no_wait():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        other = init_device_mesh("cpu", (4,))
        counts = []
        for meshes in ([mesh], [mesh] * 9, [mesh, other], []):
            parameters = [sharing(mesh, [Shard(0)] * mesh.ndim) for mesh in meshes]
            scaler = GradScaler("cpu", groups=() if meshes else (other.get_group(), dist.group.WORLD))
            optimizer = Local(parameters or [plain()])
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())  # which cost no more
            with HostSyncs() as syncs, Operations() as operations:
                scaler.step(optimizer)
                scaler.update()
            counts.append((syncs, operations.collectives()))
        return counts

    # A group that lies within another one is not asked.
    expected = [([], {"c10d.allreduce_": count}) for count in (2, 2, 1, 1)]
    assert on_ranks(4, on_rank) == [expected] * 4


def test_at_the_floor_all_ranks_raise():
    def on_rank(rank):
        chosen = {"min_scale": 8.0, "at_min_scale": "raise", "groups": (dist.group.WORLD,)}
        GradScaler("cpu", init_scale=8.0, **chosen).update(found_inf=rank == 1)

    with pytest.raises(RankError) as raised:
        on_ranks(2, on_rank)
    assert [type(error) for error in raised.value.errors.values()] == [OverflowError] * 2


def test_a_group_that_the_rank_is_not_in_is_refused():
    def on_rank(rank):
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(
                ValueError, match=r"groups\[1\] is .* on rank 1, not a process group that the rank is in"
            ):
                GradScaler("cpu", groups=(dist.group.WORLD, group))

    on_ranks(2, on_rank)
    with pytest.raises(ValueError, match=r"groups\[0\] is None on rank 0"):
        GradScaler("cpu", groups=(None,))


def test_groups_may_come_from_a_generator_but_not_alone():
    def on_rank(rank):
        scaler = GradScaler("cpu", init_scale=8.0, groups=(group for group in (dist.group.WORLD,)))
        scaler.update(found_inf=rank == 1)
        with pytest.raises(ValueError, match="it must be a sequence of process groups"):
            GradScaler("cpu", groups=dist.group.WORLD)
        return scaler.get_scale()

    assert on_ranks(2, on_rank) == [4, 4]


def test_a_scaler_with_groups_is_not_copied():
    def on_rank(rank):
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            GradScaler("cpu", groups=(dist.group.WORLD,)).__getstate__()

    on_ranks(1, on_rank)
