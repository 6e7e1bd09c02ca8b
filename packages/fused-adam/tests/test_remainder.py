"""bf16 parameters whose missing 16 bits are kept apart."""

import pytest
import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_fused_adam._remainder import join, split


def of_bits(*bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def halves(master):
    param, high, low = split(master)
    return param.to(torch.bfloat16), high.to(torch.int8), low.to(torch.uint8)


def test_every_number_is_rebuilt():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2_000_000,), generator=generator).to(torch.int32)
    master = bits.view(torch.float32)
    rebuilt = join(*halves(master))
    numbers = ~master.isnan()
    assert torch.equal(rebuilt.view(torch.int32)[numbers], bits[numbers])
    assert rebuilt[~numbers].isnan().all()
    assert halves(master)[0][~numbers].isnan().all()


@pytest.mark.parametrize(
    ("bits", "rounded", "remainder"),
    [
        (0x3F808000, 0x3F81, -0x8000),  # a tie goes away from zero
        (0xBF808000, 0xBF81, -0x8000),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x7F7FFFFF, 0x7F80, -1),  # the largest number rounds to infinity, and comes back
        (0x7F800000, 0x7F80, 0),
        (0x00000001, 0x0000, 1),  # subnormal
        (0x00008000, 0x0001, -0x8000),
        (0x80000000, 0x8000, 0),  # minus zero
        (0xFF7FFFFF, 0xFF80, -1),
    ],
)
def test_the_halves_are_these(bits, rounded, remainder):
    param, high, low = halves(of_bits(bits))
    assert param.view(torch.int16).item() & 0xFFFF == rounded
    assert (high.int() * 256 + low.int()).item() == remainder
    assert join(param, high, low).view(torch.int32).item() & 0xFFFFFFFF == bits


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FC00000])
def test_nan_never_becomes_a_number(bits):
    param, high, low = halves(of_bits(bits))
    assert param.isnan()
    assert join(param, high, low).isnan()


def train(params, optimizer, seeds):
    for seed in seeds:
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()


def model():
    return [torch.nn.Parameter(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).bfloat16())]


def test_it_trains_as_an_fp32_master_does():
    ours, theirs = model(), model()
    optimizer = FusedAdamW(ours, lr=0.1, master_weights="remainder")
    reference = FusedAdamW(theirs, lr=0.1, master_weights="fp32")
    train(ours, optimizer, range(5))
    train(theirs, reference, range(5))
    master = optimizer.state_dict()["state"][0]["master_weight"]
    torch.testing.assert_close(master, reference.state[theirs[0]]["master_weight"], rtol=1e-6, atol=1e-6)
    assert {tensor.element_size() for name, tensor in optimizer.state[ours[0]].items() if "remainder" in name} == {1}


def test_small_changes_are_kept():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedAdamW([param], lr=1e-4, weight_decay=0.0, master_weights="remainder")
    for _ in range(50):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state_dict()["state"][0]["master_weight"]
    torch.testing.assert_close(master, torch.full((3,), 0.995), rtol=0, atol=1e-6)
    assert param.tolist() == [0.99609375] * 3


@pytest.mark.parametrize("before", [None, "fp32", "remainder"])
def test_checkpoints_hold_whole_masters(before):
    ours = model()
    optimizer = FusedAdamW(ours, lr=0.1, master_weights=before)
    train(ours, optimizer, range(3))
    saved = optimizer.state_dict()
    theirs = model()
    theirs[0].data.copy_(ours[0])
    twin = FusedAdamW(theirs, lr=0.1, master_weights="remainder")
    twin.load_state_dict(saved)
    again = twin.state_dict()["state"][0]["master_weight"]
    assert torch.equal(again, saved["state"][0].get("master_weight", ours[0].float()))
    assert torch.equal(theirs[0], halves(again)[0])


def test_a_changed_parameter_keeps_its_old_remainder_until_refreshed():
    (param,) = params = model()
    optimizer = FusedAdamW(params, lr=0.1, master_weights="remainder")
    train(params, optimizer, range(2))
    param.data.fill_(2.0)
    difference = optimizer.state_dict()["state"][0]["master_weight"] - 2
    assert difference.count_nonzero()
    assert difference.abs().max() <= 2**-7  # half a unit in the last place of bf16
    optimizer.refresh_master_weights()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"], param.float())


def test_refreshing_also_sets_fp32_masters():
    (param,) = params = model()
    optimizer = FusedAdamW(params, lr=0.0, weight_decay=0.0, master_weights="fp32")
    optimizer.refresh_master_weights()  # nothing is there yet
    train(params, optimizer, range(1))
    param.data.fill_(2.0)
    optimizer.refresh_master_weights()
    train(params, optimizer, range(1))
    assert (param == 2).all()
