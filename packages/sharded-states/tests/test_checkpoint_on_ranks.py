"""Checkpoints of torch.distributed.checkpoint: whatever wrote them, whoever reads them."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepstack_sharded_states import ShardedLoadPlanner, ShardedOptimizer
from stepstack_testing import on_ranks

MESHES = {"1": (1,), "2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2)}
FORMS = {
    "fp32": (torch.float32, {}),
    "bf16 under masters": (torch.bfloat16, {"inner_dtype": torch.float32}),
    "bf16": (torch.bfloat16, {}),
}
LAYOUTS = ("contiguous", "permuted")


class Model(nn.Module):
    """Weights of all numbers of dims, one of them transposed and some channels_last where that is asked for."""

    def __init__(self, layout="contiguous"):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv3d = nn.Conv3d(4, 4, (1, 2, 2))
        self.linear = nn.Linear(24, 17)
        self.scale = nn.Parameter(torch.tensor(2.0))
        if layout == "permuted":
            self.conv.to(memory_format=torch.channels_last)
            self.conv3d.to(memory_format=torch.channels_last_3d)
            self.linear.weight = nn.Parameter(self.linear.weight.detach().t().contiguous().t())

    def forward(self, x):
        x = self.conv(x).tanh().view(len(x), 4, 2, 4, 4)
        return self.linear(self.conv3d(x).tanh().flatten(1)[:, :24]) * self.scale


def make(mesh, form, layout, capacity=25.0, **options):
    dtype, of_form = FORMS[form]
    model = Model(layout).to(dtype)
    options = {"lr": 0.01, "fused": True, "mesh": mesh, "bucket_cap_mb": capacity} | of_form | options
    return model, ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, **options)


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = model.scale.dtype
    for _ in range(steps):
        model(torch.randn(4, 3, 6, 6, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model, optimizer, folder):
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)


def load(model, optimizer, folder, planner=ShardedLoadPlanner):
    state_dict = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    dcp.load(state_dict, checkpoint_id=folder, planner=planner and planner())
    optimizer.load_sharded_state_dict(state_dict["optimizer"])


def logical(of_ranks):
    """The states of all ranks' `state_dict`s put together, by the cut that is in them: {(parameter, state): tensor}."""
    names = [name for name, _ in Model().named_parameters()]
    buffers, whole = {}, {}
    for state_dict in of_ranks:
        for position, cut in enumerate(cut for group in state_dict["cut"] for cut in group):
            for state, values in state_dict["state"].get(position, {}).items():
                key, ndim = (names[position], state), (len(cut) - 2) // 2
                shape, stride, (start, stop) = cut[:ndim], cut[ndim:-2], cut[-2:]
                if state == "step":
                    whole[key] = values
                    continue
                buffer = buffers.setdefault(key, torch.full((10_000,), torch.nan, dtype=values.dtype))
                buffer[start:stop] = values
                whole[key] = buffer.as_strided(shape, stride)
    return {key: tensor.clone() for key, tensor in whole.items()}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints by all kinds of writers: {(mesh, form): (folder, model's state, states)}."""

    def write(rank, name, folder):
        results = {}
        for form in FORMS:
            model, optimizer = make(init_device_mesh("cpu", MESHES[name]), form, layout_of(name, form), capacity=0.002)
            train(model, optimizer, 2)
            results[name, form] = model.state_dict(), optimizer.local_state_dict()
            save(model, optimizer, f"{folder}/{name}-{form}")
        return results

    folder = tmp_path_factory.mktemp("written")
    checkpoints = {}
    for name in ("1", "3", "2x2"):
        of_ranks = on_ranks(torch.Size(MESHES[name]).numel(), write, name, folder)
        for key in of_ranks[0]:
            states = logical([of_rank[key][1] for of_rank in of_ranks])
            checkpoints[key] = f"{folder}/{'-'.join(key)}", of_ranks[0][key][0], states
    return checkpoints


def layout_of(mesh, form, turn=0):
    """Each form in each layout, by some writer and by some reader."""
    return LAYOUTS[(list(MESHES).index(mesh) + list(FORMS).index(form) + turn) % 2]


def form_of(mesh, form):
    """Each form reads each form, from some writer."""
    return list(FORMS)[(("1", "3", "2x2").index(mesh) + list(FORMS).index(form)) % 3]


@pytest.mark.parametrize("name", MESHES)
def test_whatever_wrote_it_is_read_exactly_or_rounded_once(written, name):
    def read(rank):
        results = {}
        for source, (folder, _, _) in written.items():
            form = form_of(*source)
            layout = layout_of(name, form, turn=len(results))
            model, optimizer = make(init_device_mesh("cpu", MESHES[name]), form, layout, capacity=0.01)
            load(model, optimizer, folder)
            results[source] = model.state_dict(), optimizer.local_state_dict()
        return results

    of_ranks = on_ranks(torch.Size(MESHES[name]).numel(), read)
    for source, (_, saved_model, saved) in written.items():
        states = logical([of_rank[source][1] for of_rank in of_ranks])
        model, masters = of_ranks[0][source][0], form_of(*source) == "bf16 under masters"
        for key, value in model.items():
            assert torch.equal(value, saved_model[key].to(value.dtype)), (source, key)
        for key in model:
            assert ((key, "master_weight") in states) == masters
        for key, value in states.items():
            expected = saved.get(key, model[key[0]])  # a master that nobody saved is the parameter
            assert torch.equal(value, expected.to(value.dtype)), (source, key)
        assert states.keys() >= {key for key in saved if key[1] != "master_weight"}


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    def run(rank, mesh, capacity, resumed, layout="permuted"):
        model, optimizer = make(init_device_mesh("cpu", MESHES[mesh]), "fp32", layout, capacity)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if resumed:
            load(model, optimizer, tmp_path)
        else:
            train(model, optimizer, 5)
            scheduler.step()
            save(model, optimizer, tmp_path)
        train(model, optimizer, 20, seed=1)
        return [p.detach().clone() for p in model.parameters()], optimizer.param_groups[0]["lr"]

    unbroken, lr = on_ranks(3, run, "3", 0.002, False)[0]
    same, same_lr = on_ranks(3, run, "3", 0.002, True)[0]
    assert lr == same_lr == 0.01 * 0.9
    assert all(torch.equal(a, b) for a, b in zip(unbroken, same, strict=True))
    for world, mesh in ((1, "1"), (2, "2"), (4, "2x2")):
        other, other_lr = on_ranks(world, run, mesh, 25.0, True, "contiguous")[-1]
        assert other_lr == lr
        torch.testing.assert_close(other, unbroken, rtol=0, atol=2e-6)
