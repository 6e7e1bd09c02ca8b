"""However a trainer orders unscaling, clipping and stepping, Adam sees the gradient: unscaled, clipped, averaged."""

import pytest
import torch
from torch import nn

import stepstack_clip
import stepstack_nemo
from stepstack_nemo import DistributedFusedAdam, configure_gradient_clipping
from stepstack_testing import HostSyncs, on_ranks

SCALE = 65536.0  # a large one, by which everything would be off
SCALERS = {
    "torch's": lambda: torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2),
    "ours": lambda: stepstack_nemo.GradScaler(SCALE, growth_interval=2, device="cpu"),
}


def torchs_recipe(optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm(max_norm)
    scaler.step(optimizer)
    return norm


def apexs_recipe(optimizer, scaler, max_norm):
    optimizer.unscale_grads(grad_scaler=scaler)
    norm = optimizer.clip_grad_norm(max_norm)
    scaler.step(optimizer)
    return norm


def a_trainers_own_clipping(optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(shards, max_norm)
    scaler.step(optimizer)
    return norm.full_tensor()


def our_clipping_of_the_model(optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = stepstack_clip.clip_grad_norm_(optimizer.parameters(), max_norm)
    scaler.step(optimizer)
    return norm


def our_hook(optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = configure_gradient_clipping(None, optimizer, max_norm, "norm")
    scaler.step(optimizer)
    return norm


ORDERS = [torchs_recipe, apexs_recipe, a_trainers_own_clipping, our_clipping_of_the_model, our_hook]


def train(rank, order, make_scaler, bad_steps=(), **arguments):
    """Four steps whose gradient has norm 10; by step, what was measured, what Adam saw of it, the scale after it."""
    params = [nn.Parameter(torch.zeros(25)) for _ in range(4)]
    optimizer = DistributedFusedAdam(params, lr=0.1, betas=(0.0, 0.0), **arguments)
    scaler, seen = make_scaler(), []
    for step in range(4):
        loss = sum(p.sum() for p in params) * (2 * rank)  # on two ranks a mean of 1
        if step in bad_steps and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        norm = order(optimizer, scaler, 5.0)
        scaler.update()
        optimizer.zero_grad()
        moments = [value["exp_avg"].flatten()[:1] for value in optimizer.state.values()]
        seen.append((norm.item(), moments[0].item() if moments else 0.0, scaler.get_scale()))
    return seen, torch.cat([p.detach() for p in params])


@pytest.mark.parametrize("make_scaler", SCALERS.values(), ids=SCALERS)
def test_the_norm_is_10_where_it_is_10_and_adam_sees_one_half(make_scaler):
    def check(rank):
        for order in ORDERS:
            seen, _ = train(rank, order, make_scaler)
            assert seen == [
                (pytest.approx(10), pytest.approx(0.5), scale) for scale in (SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE)
            ], order
        return True

    assert on_ranks(2, check) == [True, True]


@pytest.mark.parametrize("make_scaler", SCALERS.values(), ids=SCALERS)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(make_scaler):
    def check(rank):
        results = [train(rank, order, make_scaler, bad_steps=(1,)) for order in ORDERS]
        for seen, values in results:
            assert [scale for *_, scale in seen] == [SCALE, SCALE / 2, SCALE / 2, SCALE]
            assert [moment for _, moment, _ in seen] == pytest.approx([0.5] * 4)
            torch.testing.assert_close(values, torch.full((100,), -0.3), rtol=1e-3, atol=0)
        return torch.stack([values for _, values in results])

    first, second = on_ranks(2, check)
    assert torch.equal(first, second)


def test_fp16_gradients_are_unscaled_in_the_step_where_they_lose_nothing():
    def check(rank, order):
        param = nn.Parameter(torch.zeros(64, dtype=torch.float16))
        optimizer = DistributedFusedAdam([param], betas=(0.0, 0.0), grad_sync_dtype="fp16")
        scaler = stepstack_nemo.GradScaler(2.0**16, device="cpu")
        tiny = 2.0**-26  # below what fp16 holds, but not when scaled
        scaler.scale((param.float() * tiny).sum()).backward()
        norm = order(optimizer, scaler, 1.0)
        scaler.update()
        return norm.item(), next(iter(optimizer.state.values()))["exp_avg"][0].item()

    for order in (torchs_recipe, apexs_recipe, our_hook):
        assert on_ranks(1, check, order) == [(pytest.approx(8 * 2.0**-26), pytest.approx(2.0**-26))]


def test_nemos_scaler_can_have_it_unscaled_by_its_three_arguments():
    param = nn.Parameter(torch.zeros(4))
    optimizer = DistributedFusedAdam([param])
    (param.sum() * 8).backward()
    inv_scale, found_inf = torch.tensor([0.125]), torch.tensor([0.0])
    assert optimizer._custom_amp_unscale_grads
    found = optimizer.unscale_grads(inv_scale, found_inf, False)
    assert list(found.values()) == [0]
    assert optimizer.grad_norm() == pytest.approx(2)
    assert list(optimizer.unscale_grads(inv_scale, torch.tensor([1.0]), False).values()) == [1]


def test_our_scaler_never_waits_for_the_device():
    param = nn.Parameter(torch.zeros(100))
    optimizer = DistributedFusedAdam([param])
    scaler = stepstack_nemo.GradScaler(SCALE, device="cpu")
    for order in (torchs_recipe, our_hook):
        scaler.scale(param.sum()).backward()
        with HostSyncs() as syncs:
            order(optimizer, scaler, 1.0)
            scaler.update()
            optimizer.zero_grad()
        assert syncs == []


def test_unscaling_twice_is_refused_as_torch_refuses_it():
    param = nn.Parameter(torch.zeros(4))
    optimizer, scaler = DistributedFusedAdam([param]), torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="scaled a loss"):
        optimizer.unscale_grads(grad_scaler=scaler)
    scaler.scale(param.sum()).backward()
    optimizer.unscale_grads(grad_scaler=scaler)
    with pytest.raises(RuntimeError, match="already been called"):
        optimizer.unscale_grads(grad_scaler=scaler)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_a_value_is_clipped_after_the_mean():
    def check(rank):
        param = nn.Parameter(torch.zeros(4))
        optimizer = DistributedFusedAdam([param], betas=(0.0, 0.0))
        (param.sum() * 10 * rank).backward()
        configure_gradient_clipping(None, optimizer, 3.0, "value")
        optimizer.step()
        return next((state["exp_avg"][0].item() for state in optimizer.state.values()), None)

    assert on_ranks(2, check) == [3.0, None]
