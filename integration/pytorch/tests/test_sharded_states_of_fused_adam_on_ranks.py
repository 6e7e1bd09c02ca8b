"""Checkpoints of a ShardedOptimizer around FusedAdamW: masters and moments in each form, each read by each."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepstack_fused_adam import FusedAdamW
from stepstack_sharded_states import ShardedLoadPlanner, ShardedOptimizer
from stepstack_testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MESHES = {"1": (1,), "3": (3,), "2x2": (2, 2)}
IN_8_BITS = {"exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8"}
FORMS = {
    "fp32": (torch.float32, {}),
    "no masters": (torch.bfloat16, {}),
    "masters of the wrapper": (torch.bfloat16, {"inner_dtype": torch.float32}),
    "masters": (torch.bfloat16, {"master_weights": "fp32", "exp_avg_sq_dtype": torch.bfloat16}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "8 bits": (torch.bfloat16, {"master_weights": "remainder", **IN_8_BITS}),
}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(8, 9, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(33, 17)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.to(dtype)


def make(mesh, form, capacity=25.0):
    dtype, options = FORMS[form]
    model = Model(dtype)
    mesh = init_device_mesh("cpu", MESHES[mesh])
    return model, ShardedOptimizer(
        model.named_parameters(), FusedAdamW, mesh=mesh, lr=0.01, bucket_cap_mb=capacity, **options
    )


def step(model, optimizer, times, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(times):
        sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model, optimizer, folder):
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)


def load(model, optimizer, folder):
    state_dict = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    dcp.load(state_dict, checkpoint_id=folder, planner=ShardedLoadPlanner())
    optimizer.load_sharded_state_dict(state_dict["optimizer"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{form: (folder, the model's state, whole states)}, each from other ranks."""

    def write(rank, mesh, forms):
        results = {}
        for form in forms:
            model, optimizer = make(mesh, form, capacity=0.001)
            step(model, optimizer, 3)
            save(model, optimizer, folder / form)
            results[form] = folder / form, model.state_dict(), optimizer.full_state_dict(rank0_only=False)
        return results

    folder = tmp_path_factory.mktemp("written")
    checkpoints = {}
    for mesh, forms in {"1": ("masters",), "3": ("fp32", "remainders", "8 bits"), "2x2": list(FORMS)[1:3]}.items():
        checkpoints |= on_ranks(torch.Size(MESHES[mesh]).numel(), write, mesh, forms)[-1]
    return checkpoints


def read_by_one_process(form, saved_model, whole):
    """What FusedAdamW makes of whole states without any sharding; the masters of a wrapper are like its own in fp32."""
    dtype, options = FORMS[form]
    model = Model(dtype)
    model.load_state_dict(saved_model)
    optimizer = FusedAdamW(model.parameters(), **({"master_weights": "fp32"} if "inner_dtype" in options else options))
    optimizer.load_state_dict(whole)
    return model.state_dict(), optimizer.state_dict()["state"]


def readers(mesh):
    """(source, form) for all sources, two forms each: on some mesh or other, each form reads each."""
    turn = 2 * list(MESHES).index(mesh)
    forms = list(FORMS)
    return [(source, forms[(turn + number + more) % 6]) for number, source in enumerate(FORMS) for more in (0, 1)]


@pytest.mark.parametrize("mesh", MESHES)
def test_each_form_reads_each_as_one_process_does(written, mesh):
    def read(rank):
        results = []
        for source, form in readers(mesh):
            model, optimizer = make(mesh, form)
            load(model, optimizer, written[source][0])
            results.append((model.state_dict(), optimizer.full_state_dict(rank0_only=False)["state"]))
        return results

    of_ranks = on_ranks(torch.Size(MESHES[mesh]).numel(), read)
    for number, (source, form) in enumerate(readers(mesh)):
        expected = read_by_one_process(form, *written[source][1:])
        for of_rank in of_ranks:
            torch.testing.assert_close(of_rank[number], expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["masters", "8 bits"])
def test_the_same_ranks_go_on_bit_for_bit(tmp_path, form):
    def run(rank):
        model, optimizer = make("3", form, capacity=0.001)
        step(model, optimizer, 3)
        save(model, optimizer, tmp_path / form)
        step(model, optimizer, 20, seed=1)
        other, resumed = make("3", form, capacity=0.001)
        step(other, resumed, 1)  # a running optimizer, whose states keep their addresses
        addresses = [state["exp_avg"].data_ptr() for state in resumed.state.values()]
        load(other, resumed, tmp_path / form)
        assert [state["exp_avg"].data_ptr() for state in resumed.state.values()] == addresses
        step(other, resumed, 20, seed=1)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))

    on_ranks(3, run)
