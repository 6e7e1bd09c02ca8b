"""FSDP2's parameters are stepped by their local tensors."""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stepstack_fused_adam import FusedAdamW
from stepstack_testing import HostSyncs, on_ranks


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))


def train(network, optimizer, rank):
    for seed in range(3):
        data = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).chunk(2)
        network(data[rank] if rank is not None else torch.cat(data)).square().mean().backward()
        with HostSyncs() as syncs:
            optimizer.step()
        assert syncs == [] or rank is None
        optimizer.zero_grad()


def sharded(rank):
    network = model()
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    optimizer = FusedAdamW(network.parameters(), lr=0.1)
    train(network, optimizer, rank)
    state = optimizer.state[next(network.parameters())]
    assert isinstance(state["exp_avg"], DTensor)
    saved = get_optimizer_state_dict(network, optimizer)
    set_optimizer_state_dict(network, optimizer, saved)
    full = [param.full_tensor().detach() for param in network.parameters()]
    return full, [optimizer.state[param]["exp_avg_sq"].full_tensor() for param in network.parameters()]


def test_fsdp2_is_adamw():
    network = model()
    reference = torch.optim.AdamW(network.parameters(), lr=0.1, foreach=False)
    train(network, reference, None)
    for params, exp_avg_sqs in on_ranks(2, sharded):
        torch.testing.assert_close(params, [param.detach() for param in network.parameters()], rtol=1e-5, atol=1e-6)
        expected = [reference.state[param]["exp_avg_sq"] for param in network.parameters()]
        torch.testing.assert_close(exp_avg_sqs, expected, rtol=1e-5, atol=1e-6)
