"""Weights keep their memory format, and what is computed does not depend on it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepstack_nemo import DistributedFusedAdam
from stepstack_testing import on_ranks

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class UNet(nn.Module):
    """Diffusion-style: down and up with a skip, group norms, a time embedding; 2-d or 3-d."""

    def __init__(self, dims):
        super().__init__()
        conv, transposed = ((nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))[dims - 2]
        self.time = nn.Linear(4, 8)
        self.enter = conv(3, 8, 3, padding=1)
        self.down = conv(8, 16, 3, stride=2, padding=1)
        self.up = transposed(16, 8, 2, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.leave = conv(16, 3, 1)

    def forward(self, x, t):
        x = self.enter(x) + self.time(t).view(len(x), 8, *[1] * (x.ndim - 2))
        y = F.silu(self.norm(self.up(F.silu(self.down(F.silu(x))))))
        return self.leave(torch.cat([x, y], 1))


def unet(dims, dtype, converted):
    torch.manual_seed(0)
    model = UNet(dims).to(dtype)
    return model.to(memory_format=FORMATS[dims + 2]) if converted else model


def train(rank, model, optimizer, steps, clip=1.0):
    losses = []
    dims = model.enter.weight.ndim - 2
    dtype = model.enter.weight.dtype
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        noise = torch.randn(2, 3, *[8] * dims, generator=generator).to(dtype)
        t = torch.rand(2, 4, generator=generator).to(dtype)
        if model.enter.weight.stride(1) == 1:
            noise = noise.to(memory_format=FORMATS[dims + 2])
        loss = (model(noise, t) - noise).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


WAYS = {
    "fp32": (torch.float32, {}),
    "bf16, remainders": (torch.bfloat16, {"store_params": False, "store_param_remainders": True}),
    "bf16, masters, captured": (torch.bfloat16, {"capturable": True, "grad_sync_dtype": "bf16"}),
}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_channels_last_unet_trains_saves_and_goes_on_as_a_contiguous_one(way, dims):
    dtype, arguments = WAYS[way]
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2e-2}

    def run(rank):
        results = []
        for converted in (False, True):
            model = unet(dims, dtype, converted)
            strides = [p.stride() for p in model.parameters()]
            optimizer = DistributedFusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01, **arguments)
            losses = train(rank, model, optimizer, range(4))
            assert [p.stride() for p in model.parameters()] == strides
            assert (model.enter.weight.stride(1) == 1) == converted
            weights, states = copy.deepcopy(model.state_dict()), optimizer.state_dict()
            losses += train(rank, model, optimizer, range(4, 7))
            results.append((losses, weights, states, [p.detach().contiguous() for p in model.parameters()]))
        return results

    def resume(rank, weights, states):
        results = []
        for converted in (False, True):
            model = unet(dims, dtype, converted)
            model.load_state_dict(weights)
            optimizer = DistributedFusedAdam(model.parameters(), **arguments)
            optimizer.load_state_dict(states)
            losses = train(rank, model, optimizer, range(4, 7))
            results.append((losses, [p.detach().contiguous() for p in model.parameters()]))
        return results

    contiguous, converted = on_ranks(2, run)[0]
    assert converted[0] == pytest.approx(contiguous[0], rel=close["rtol"], abs=close["atol"])
    assert converted[0][6] < converted[0][0]
    for losses, values in on_ranks(2, resume, converted[1], converted[2])[0]:
        assert losses == pytest.approx(converted[0][4:], rel=close["rtol"], abs=close["atol"])
        for ours, theirs in zip(values, converted[3], strict=True):
            torch.testing.assert_close(ours, theirs, **close)


LAYOUTS = {
    "transposed": lambda values: values.t().contiguous().t(),
    "expanded": lambda values: values[:1].expand(6, 10),
    "padded": lambda values: F.pad(values, (0, 3))[:, :10],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_strides_train_as_contiguous_ones_do(layout):
    def run(rank, lay_out):
        param = nn.Parameter(lay_out(torch.linspace(-1, 1, 10).expand(6, 10).clone()))
        optimizer = DistributedFusedAdam([param], lr=0.1)
        for step in range(3):
            (param * torch.arange(60.0).view(6, 10).roll(step + rank)).sum().backward()
            optimizer.step()
        return param.detach().contiguous()

    for ours, theirs in zip(on_ranks(2, run, LAYOUTS[layout]), on_ranks(2, run, torch.clone), strict=True):
        assert torch.equal(ours, theirs)


def test_a_contiguous_gradient_of_a_channels_last_weight_goes_where_it_belongs():
    weight = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = DistributedFusedAdam([weight], lr=1.0, betas=(0.0, 0.0), eps=1e6)
    weight.grad = torch.arange(48.0).view(4, 3, 2, 2)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -torch.arange(48.0).view(4, 3, 2, 2) / 1e6, rtol=1e-3, atol=0)
