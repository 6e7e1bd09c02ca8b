"""A CUDA graph may capture `zero_grad`, backward, clipping, unscaling and step: constant addresses, no wait."""

import pytest
import torch
from torch import nn

import stepstack_nemo
from stepstack_nemo import DistributedFusedAdam, configure_gradient_clipping
from stepstack_testing import HostSyncs, Operations


def model_and_optimizer(device="cpu", dtype=torch.float32, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3)).to(device, dtype)
    model = model.to(memory_format=torch.channels_last)
    return model, DistributedFusedAdam(model.parameters(), lr=0.01, capturable=True, **arguments)


def addresses(model, optimizer):
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    tensors += [group["lr"] for group in optimizer.param_groups]
    tensors += [shard.grad for group in optimizer.param_groups for shard in group["params"] if shard.grad is not None]
    return [tensor.data_ptr() for tensor in tensors]


def iteration(model, optimizer, x, scaler=None):
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).float().square().mean()
    if scaler is None:
        loss.backward()
        configure_gradient_clipping(model, optimizer, 1.0)
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        configure_gradient_clipping(model, optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss


WAYS = {
    "fp32": {},
    "bf16, masters": {"dtype": torch.bfloat16},
    "bf16, remainders": {"dtype": torch.bfloat16, "store_param_remainders": True},
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_addresses_stay_and_nothing_waits(way, scaled):
    model, optimizer = model_and_optimizer(**WAYS[way])
    scaler = stepstack_nemo.GradScaler(1024.0, device="cpu") if scaled else None
    x = torch.randn(2, 3, 8, 8, dtype=next(model.parameters()).dtype)
    for _ in range(2):
        iteration(model, optimizer, x, scaler)
    before, counts = addresses(model, optimizer), []
    for _ in range(3):
        with HostSyncs() as syncs, Operations() as operations:
            iteration(model, optimizer, x, scaler)
        assert syncs == []
        counts.append(operations.total())
    assert len(set(counts)) == 1  # nothing that Python would do at one replay and not at another
    assert addresses(model, optimizer) == before
    optimizer.load_state_dict(optimizer.state_dict())
    assert addresses(model, optimizer) == before


def test_zero_grad_is_one_fill_a_bucket_whatever_the_number_of_parameters():
    totals = set()
    for number in (5, 50):
        params = [nn.Parameter(torch.zeros(10)) for _ in range(number)]
        optimizer = DistributedFusedAdam(params, capturable=True)
        sum(p.sum() for p in params).backward()
        with Operations() as operations:
            optimizer.zero_grad()
        totals.add(sum(count for name, count in operations.items() if "zero_" in name or "fill_" in name))
        assert all(torch.equal(p.grad, torch.zeros(10)) for p in params)
    assert len(totals) == 1


def test_a_scheduler_may_write_numbers_or_fill_tensors():
    model, optimizer = model_and_optimizer()
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    iteration(model, optimizer, torch.randn(2, 3, 8, 8))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == pytest.approx(0.005)
    optimizer.param_groups[0]["lr"] = 0.5
    iteration(model, optimizer, torch.randn(2, 3, 8, 8))
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.5


def test_a_skipped_step_leaves_nothing_behind_for_the_next():
    param = nn.Parameter(torch.zeros(64))
    optimizer = DistributedFusedAdam([param], lr=0.1, betas=(0.0, 0.0), capturable=True)
    seen = []
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        (param * factor).sum().backward()
        optimizer.clip_grad_norm(4.0)
        optimizer.step()
        seen.append(param[0].item())
    assert seen == [pytest.approx(-0.1), pytest.approx(-0.1), pytest.approx(-0.2)]


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_captured_iteration_is_the_eager_one(way, scaled):
    xs = [torch.randn(2, 3, 8, 8, device="cuda", dtype=WAYS[way].get("dtype", torch.float32)) for _ in range(6)]
    if scaled:
        xs[4] = xs[4] * torch.inf
    results = []
    for captured in (False, True):
        model, optimizer = model_and_optimizer("cuda", **WAYS[way])
        scaler = stepstack_nemo.GradScaler(1024.0, device="cuda") if scaled else None
        static, side = xs[0].clone(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for x in xs[:3]:
                static.copy_(x)
                iteration(model, optimizer, static, scaler)
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                iteration(model, optimizer, static, scaler)
        for step, x in enumerate(xs[3:]):
            static.copy_(x)
            optimizer.param_groups[0]["lr"].fill_(0.01 / (step + 1))
            graph.replay() if captured else iteration(model, optimizer, static, scaler)
        results.append([p.detach().clone() for p in model.parameters()])
    for eager, replayed in zip(*results, strict=True):
        torch.testing.assert_close(replayed, eager)
