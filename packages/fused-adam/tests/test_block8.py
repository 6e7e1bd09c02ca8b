"""Moments in 8 bits."""

import pytest
import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_fused_adam._block8 import decode_first, decode_second, encode_first, encode_second


def moments(numel, spread=2.0):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randn(numel, generator=generator) * spread
    return torch.randn(numel, generator=generator) * torch.exp(exponents)


def stored(codes, scale, dtype):
    assert torch.equal(codes.to(dtype).float(), codes)
    return codes.to(dtype), scale


def first(m):
    return decode_first(*stored(*encode_first(m), torch.int8))


def second(v):
    return decode_second(*stored(*encode_second(v), torch.uint8))


@pytest.mark.parametrize("numel", [1, 7, 64, 65, 6400])
@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_quantising_again_changes_nothing(numel, factor):
    m = first(moments(numel) * factor)
    assert torch.equal(first(m), m)
    v = second(moments(numel).abs() * factor)
    assert torch.equal(second(v), v)


def test_numbers_are_near():
    m = moments(6400, spread=0.5)
    largest = m.view(-1, 64).abs().amax(1).repeat_interleave(64)
    assert ((first(m) - m).abs() <= (m.abs() / largest).sqrt() / 127 * largest + 2e-5 * largest).all()
    v = m.square()
    assert (second(v).sqrt() / v.sqrt() - 1)[v > 1e-4 * largest.square()].abs().max() < 0.1


def test_small_second_moments_are_not_flushed():
    v = torch.full((64,), 1e-14)
    v[0] = 1.0
    assert (second(v) > 0).all()
    assert second(v)[0] == 1.0
    assert second(torch.zeros(64)).count_nonzero() == 0


def test_blocks_do_not_depend_on_the_cut():
    m = moments(640)
    assert torch.equal(torch.cat([first(m[:192]), first(m[192:])]), first(m))
    assert torch.equal(torch.cat([second(m[:192].abs()), second(m[192:].abs())]), second(m.abs()))


def test_a_second_moment_follows_its_average():
    """Rounded to the nearest code it would stand still: it moves by less than a code each step."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.ones(6400)
    exact, coded = torch.zeros(6400), torch.zeros(6400)
    for step in range(3000):
        if step == 1000:
            deviation[::2] /= 10
        g = torch.randn(6400, generator=generator) * deviation
        exact = 0.999 * exact + 0.001 * g * g
        coded = second(0.999 * coded + 0.001 * g * g)
    assert abs((coded / exact).sqrt().mean() - 1) < 0.02


def test_it_trains_nearly_as_fp32_does():
    def loss_after(**options):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(256, 32, generator=generator)
        labels = (inputs @ torch.randn(32, 1, generator=generator)).sign()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        optimizer = FusedAdamW(model.parameters(), lr=0.003, **options)
        for _ in range(60):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), labels)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert loss_after(exp_avg_dtype="block8", exp_avg_sq_dtype="block8") == pytest.approx(loss_after(), rel=0.05)


def test_state_dicts_hold_numbers_and_load_into_any_adamw():
    param = torch.nn.Parameter(torch.ones(3, 30))
    optimizer = FusedAdamW([param], exp_avg_dtype="block8", exp_avg_sq_dtype="block8")
    param.grad = moments(90).view(3, 30)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.int8
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    twin = torch.nn.Parameter(param.detach().clone())
    again = FusedAdamW([twin], exp_avg_dtype="block8", exp_avg_sq_dtype="block8")
    again.load_state_dict(saved)
    torch.testing.assert_close(again.state_dict()["state"], saved["state"], rtol=0, atol=0)
    wide = torch.optim.AdamW([twin], foreach=False)
    wide.load_state_dict(saved)
    twin.grad = param.grad.clone()
    wide.step()


def test_pieces_of_whole_blocks_are_one_run():
    flat, grad = torch.ones(256), moments(256)
    params = [torch.nn.Parameter(piece) for piece in flat.split([64, 128, 64])]
    whole = torch.nn.Parameter(torch.ones(256))
    whole.grad = grad.clone()
    for param, piece in zip(params, grad.split([64, 128, 64]), strict=True):
        param.grad = piece
    options = {"exp_avg_dtype": "block8", "exp_avg_sq_dtype": "block8"}
    FusedAdamW([whole], **options).step()
    optimizer = FusedAdamW(params, **options)
    optimizer.step()
    assert torch.equal(flat, whole)
    first_scale, second_scale, _ = (optimizer.state[param]["exp_avg_scale"] for param in params)
    assert first_scale.data_ptr() + 4 == second_scale.data_ptr()


def test_a_skipped_step_changes_nothing():
    param = torch.nn.Parameter(torch.ones(90))
    optimizer = FusedAdamW([param], exp_avg_dtype="block8", exp_avg_sq_dtype="block8")
    param.grad = moments(90)
    optimizer.step()
    before = [value.clone() for value in optimizer.state[param].values()]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, before, optimizer.state[param].values()))
