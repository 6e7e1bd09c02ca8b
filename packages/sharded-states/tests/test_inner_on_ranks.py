"""Optimizers that are sharded, in dtypes that mix: each ends where it ends on whole parameters."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepstack_sharded_states import ShardedOptimizer
from stepstack_testing import on_ranks


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675: the sign of a mean of gradients, and no flag of torch's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(momentum.lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                    momentum.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Lion": (Lion, {"lr": 0.01}),
}


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def test_elementwise_optimizers_end_where_they_end_on_whole_parameters(foreach):
    def train(ranks, name, wrap):
        optimizer_class, options = OPTIMIZERS[name]
        options = options if optimizer_class is Lion else options | {"foreach": foreach}
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3))
        optimizer = wrap(model.parameters(), optimizer_class, **options)
        for step in range(6):
            data = [torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
            model(torch.cat(data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    results = on_ranks(2, lambda rank: {name: train([rank], name, ShardedOptimizer) for name in OPTIMIZERS})
    for name in OPTIMIZERS:
        expected = train([0, 1], name, lambda params, optimizer_class, **options: optimizer_class(params, **options))
        for result in results:
            for ours, theirs in zip(result[name], expected, strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )


class Dtypes(TorchDispatchMode):
    """Those of the tensors that large collectives get, by collective."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [
                t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.numel() > 1
            ]
            self.seen.setdefault(func.overloadpacket.__name__, []).extend({t.dtype for t in tensors})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["their own", "float32"])
def test_each_dtype_of_parameters_is_reduced_and_gathered_in_its_own(grad_dtype):
    def check(rank):
        weight, gain = nn.Parameter(torch.ones(300).bfloat16()), nn.Parameter(torch.ones(70))
        optimizer = ShardedOptimizer([weight, gain], torch.optim.SGD, lr=0.1, grad_dtype=grad_dtype)
        with Dtypes() as dtypes:
            (weight.sum().float() + gain.sum()).backward()
            optimizer.step()
        return {name: sorted(map(str, seen)) for name, seen in dtypes.seen.items() if seen}

    both = ["torch.bfloat16", "torch.float32"]
    reduced = both if grad_dtype is None else ["torch.float32"] * 2
    assert on_ranks(2, check) == [{"alltoall_base_": reduced, "broadcast_": sorted(both * 2)}] * 2
