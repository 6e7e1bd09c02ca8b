"""Who may write a checkpoint and who may read it: other optimizers, plain and sharded parameters, groups, experts."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small import load, make, params_of, step
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stepstack_sharded_states import ShardedLoadPlanner, ShardedOptimizer
from stepstack_testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


@pytest.mark.parametrize("planner", [None, ShardedLoadPlanner])
def test_plain_adamw_reads_and_is_read(tmp_path, planner):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = params_of(w=(9, 20), b=(20,)).values()
            self.w.data = self.w.data.t().contiguous().t()

    def plain(state_dict=None):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        if state_dict is None:
            return net, optimizer, get_optimizer_state_dict(net, optimizer, options=options)
        set_optimizer_state_dict(net, optimizer, state_dict, options=options)
        return net, optimizer

    def write(rank):
        net = Net()
        optimizer = make(dict(net.named_parameters()), weight_decay=0.5)
        step(dict(net.named_parameters()), optimizer, 2)
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "sharded")
        return [p.detach().clone() for p in net.parameters()]

    def read(rank):
        net = Net()
        optimizer = make(dict(net.named_parameters()))
        state_dict = optimizer.sharded_state_dict()
        dcp.load(state_dict, checkpoint_id=tmp_path / "plain", planner=planner and planner())
        optimizer.load_sharded_state_dict(state_dict)
        with torch.no_grad():
            for p, value in zip(net.parameters(), weights, strict=True):
                p.copy_(value)
        step(dict(net.named_parameters()), optimizer, 2)
        assert optimizer.param_groups[0]["weight_decay"] == 0.5
        return [p.detach().clone() for p in net.parameters()]

    weights = on_ranks(2, write)[0]
    _, _, state_dict = plain()
    dcp.load(state_dict, checkpoint_id=tmp_path / "sharded")
    net, optimizer = plain(state_dict)
    dcp.save(
        get_optimizer_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)),
        checkpoint_id=tmp_path / "plain",
    )
    with torch.no_grad():
        for p, value in zip(net.parameters(), weights, strict=True):
            p.copy_(value)
    step(dict(net.named_parameters()), optimizer, 2)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    for result in on_ranks(3, read):
        torch.testing.assert_close(result, [p.detach() for p in net.parameters()], rtol=0, atol=1e-6)


def test_fsdp_reads_and_is_read(tmp_path):
    def check(rank):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 20), nn.Linear(20, 3))
        params = dict(copy.deepcopy(net).named_parameters())
        fully_shard(net)
        fsdp = torch.optim.AdamW(net.parameters(), lr=0.1)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        net(torch.ones(2, 9)).sum().backward()
        fsdp.step()
        saved = get_optimizer_state_dict(net, fsdp, options=options)
        dcp.save(saved, checkpoint_id=tmp_path / "fsdp")
        optimizer = make(params)
        load(optimizer, tmp_path / "fsdp")
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "sharded")
        whole = {key: value.full_tensor() for key, value in saved.items() if hasattr(value, "full_tensor")}
        zeros = {key: torch.zeros_like(value) for key, value in saved.items() if key in whole}
        dcp.load(zeros, checkpoint_id=tmp_path / "sharded")
        assert len(whole) == 8
        assert equal({key: value.full_tensor() for key, value in zeros.items()}, whole)

    on_ranks(2, check)


def test_groups_are_known_by_their_parameters(tmp_path):
    def groups(params, lr=0.1, apart=True):
        named = list(params.items())
        if not apart:
            return named
        return [{"params": named[:1], "lr": lr, "weight_decay": 0.3}, {"params": named[1:], "weight_decay": 0.0}]

    def check(rank):
        params = params_of(b=(20,), w=(9, 20), frozen=(3,))
        params["frozen"].requires_grad_(False)
        trained = {name: p for name, p in params.items() if p.requires_grad}
        optimizer = ShardedOptimizer(groups(params), torch.optim.AdamW, lr=torch.tensor(0.2), fused=True)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        step(trained, optimizer)
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
        saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
        assert {"param_groups.frozen.lr", "param_groups.b.initial_lr"} <= saved.keys()
        assert not any(key.startswith("state.frozen") for key in saved)

        live = torch.tensor(7.0)
        other = ShardedOptimizer(reversed(groups(params, lr=live)), torch.optim.AdamW, lr=0.9, foreach=False)
        load(other, tmp_path)
        second, first = other.param_groups
        assert (first["lr"] is live, live.item(), second["lr"]) == (True, pytest.approx(0.05), pytest.approx(0.1))
        assert (first["weight_decay"], first["initial_lr"], first["foreach"]) == (0.3, pytest.approx(0.1), False)

        one_group = ShardedOptimizer(groups(params, apart=False), torch.optim.AdamW, lr=0.1)
        state_dict = one_group.sharded_state_dict()
        dcp.load(state_dict, checkpoint_id=tmp_path, planner=ShardedLoadPlanner())
        with pytest.raises(
            ValueError, match="parameters 'b' and 'w' share a group here, but in the checkpoint they have"
        ):
            one_group.load_sharded_state_dict(state_dict)

    on_ranks(2, check)


def test_a_tied_parameter_has_one_name(tmp_path):
    net = nn.ModuleDict({"embed": nn.Embedding(9, 20), "head": nn.Linear(20, 9, bias=False)})
    net.head.weight = net.embed.weight
    optimizer = make(dict(net.named_parameters()))
    step(dict(net.named_parameters()), optimizer)
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
    saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {key for key in saved if key.startswith("state.")} == {
        f"state.embed.weight.{state}" for state in ("exp_avg", "exp_avg_sq", "step")
    }


class Unforeseeable(torch.optim.SGD):
    """Can't make a step on just anything."""

    def step(self, closure=None):
        if not self.param_groups[0]["params"][0].any():
            raise RuntimeError("not with this parameter")
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, Unforeseeable])
def test_any_elementwise_optimizer_goes_on(tmp_path, kind):
    def run(rank, resumed):
        params = params_of(w=(9, 21), b=(65,))
        options = {"momentum": 0.9, "dampening": 0.3} if issubclass(kind, torch.optim.SGD) else {}
        optimizer = make(params, kind, **options)
        if resumed:
            load(optimizer, tmp_path)
            with torch.no_grad():
                for p, value in zip(params.values(), resumed, strict=True):
                    p.copy_(value)
        else:
            step(params, optimizer, 2)
            dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)
        saved = [p.detach().clone() for p in params.values()]
        step(params, optimizer, 2)
        return saved, [p.detach() for p in params.values()]

    saved, unbroken = on_ranks(2, run, None)[0]
    for _, result in on_ranks(3, run, saved):
        torch.testing.assert_close(result, unbroken, rtol=0, atol=1e-6)


def test_what_is_written_is_no_copy():
    params = params_of(w=(3, 40, 7))
    params["w"].data = params["w"].data.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    optimizer = make(params)
    step(params, optimizer)
    state = optimizer.local_state_dict()["state"][0]["exp_avg"]
    chunks = optimizer.sharded_state_dict()["state.w.exp_avg"]
    (item,) = chunks.__create_write_items__("state.w.exp_avg", chunks)
    part = chunks.__get_tensor_shard__(item.index)
    assert torch.equal(part, state[:840].view(7, 3, 40).permute(1, 2, 0))
    assert part.untyped_storage().nbytes() == part.nbytes == 4 * 840
    assert part.data_ptr() == next(iter(optimizer.state.values()))["exp_avg"].data_ptr()


def test_copies_are_what_there_was(tmp_path):
    params = params_of(w=(9, 20), scale=())
    optimizer = make(params)
    step(params, optimizer)
    before = optimizer.local_state_dict()["state"]
    copied = copy.deepcopy(optimizer.sharded_state_dict())
    step(params, optimizer)
    dcp.save(pickle.loads(pickle.dumps(copied)), checkpoint_id=tmp_path)
    load(optimizer, tmp_path)
    assert equal(optimizer.local_state_dict()["state"], before)
    with pytest.raises(TypeError, match="it is not here as a whole"):
        optimizer.sharded_state_dict()["state.w.exp_avg"].abs()


def test_replicas_write_once_and_boxes_are_small(tmp_path):
    def check(rank):
        params = params_of(w=(1000, 1000))
        optimizer = make(params, mesh=init_device_mesh("cpu", (2, 2)))
        step(params, optimizer)
        dcp.save(optimizer.sharded_state_dict(), checkpoint_id=tmp_path)

    on_ranks(4, check)
    chunks = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["state.w.exp_avg"].chunks
    assert sum(chunk.sizes.numel() for chunk in chunks) == 1_000_000
    assert max(chunk.sizes.numel() for chunk in chunks) <= 2**16
    written = [sum(file.stat().st_size for file in tmp_path.glob(f"__{rank}_*")) for rank in range(4)]
    assert sum(written) < 8.3e6
    assert min(written) > 1.8e6


def test_experts_are_known_by_some_ranks_only(tmp_path):
    def run(rank, folder):
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "expert"))
        expert = mesh.get_local_rank("expert")
        params = params_of(dense=(9, 20)) | {f"experts.{expert}": params_of(w=(50, 3))["w"]}
        (dense, expert_weight), of_expert = params.items(), {"mesh": mesh["data"]}
        groups = [{"params": [dense]}, {"params": [expert_weight], **of_expert}]
        optimizer = ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1, fused=True, inner_dtype=torch.float64)
        if folder is None:
            load(optimizer, tmp_path)
        else:
            ((expert + 1) * params[f"experts.{expert}"].pow(2).sum() + params["dense"].sum()).backward()
            optimizer.step()
            dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
        return optimizer.full_state_dict(rank0_only=False)["state"]

    written = on_ranks(4, run, tmp_path)
    for rank, read in enumerate(on_ranks(2, run, None)):
        assert equal(read, written[rank])
