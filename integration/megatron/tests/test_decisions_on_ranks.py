"""What happens to a step whose gradient is not finite, and who decides; what `remove` gives back."""

import pytest
import torch

from stepstack_fused_adam import FusedAdamW
from stepstack_megatron import plug
from stepstack_testing import HostSyncs, on_ranks

pytestmark = pytest.mark.engine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [(False, FP32), (False, BF16), (False, FP16), (True, FP32), (True, BF16), (True, FP16)]

SKIP_ABOVE = "grad_norm_skip_threshold"  # of Megatron's config, from 0.18 on


def made(megatron, distributed, dtype, *, experts=False, **options):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.LayerNorm(9))
    if experts:
        module[0].weight.allreduce = False
    chunk = megatron.wrapped(module, dtype=dtype, distributed=distributed)
    return module, chunk, megatron.optimizer(chunk, dtype=dtype, distributed=distributed, **options)


def backward(megatron, module, chunk, optimizer, number, before_reduction=None):
    generator = torch.Generator().manual_seed(number)
    grads = {name: torch.randn(param.shape, generator=generator) for name, param in module.named_parameters()}
    megatron.backward(chunk, optimizer, grads, before_reduction=before_reduction)


def everything(module, optimizer):
    """Weights, main weights and all states, in copies."""
    tensors = [*module.parameters()]
    for member in optimizer.chained_optimizers:
        tensors += member.get_parameters()
        tensors += [tensor for state in member.optimizer.state.values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in tensors]


def spoil(value, name="0.weight"):
    def before_reduction(params):
        params[name].main_grad[0] = value

    return before_reduction


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_in_any_precision(engine, value):
    def run(rank):
        with engine() as megatron:
            for distributed, dtype in KINDS:
                module, chunk, optimizer = made(megatron, distributed, dtype, clip_grad=0.0)
                plug(optimizer)
                backward(megatron, module, chunk, optimizer, 1)
                assert optimizer.step()[0]
                before = everything(module, optimizer)
                backward(megatron, module, chunk, optimizer, 2, spoil(value) if rank == 1 else None)
                success, norm, _ = optimizer.step()
                assert not success
                assert not norm.isfinite()
                assert all(map(torch.equal, before, everything(module, optimizer)))
                backward(megatron, module, chunk, optimizer, 3)
                assert optimizer.step()[0]
                assert not any(map(torch.equal, before, everything(module, optimizer)))

    on_ranks(2, run, timeout=60)


def test_an_overflow_of_experts_lets_the_dense_layers_skip_too_and_both_scales_stay_one(engine):
    def run(rank):
        with engine(ep=2) as megatron:
            scales = {True: [], False: []}
            for distributed, plugged in ((False, True), (True, True), (True, False)):
                module, chunk, optimizer = made(megatron, distributed, FP16, experts=True, hysteresis=1)
                assert len(optimizer.chained_optimizers) == 2
                if plugged:
                    plug(optimizer)
                backward(megatron, module, chunk, optimizer, 1)
                assert optimizer.step()[0]
                before = everything(module, optimizer)
                backward(megatron, module, chunk, optimizer, 2, spoil(torch.inf) if rank == 1 else None)
                assert not optimizer.step()[0]
                assert all(map(torch.equal, before, everything(module, optimizer)))
                scales[plugged] += [float(member.get_loss_scale()) for member in optimizer.chained_optimizers]
            return scales

    for scales in on_ranks(2, run, timeout=60):
        assert scales[True] == [2048.0] * 4
        assert scales[False] == [4096.0, 2048.0]  # Megatron's own part ways


def test_results_on_the_host_are_megatrons_own_for_one_wait(engine):
    def run(rank):
        with engine() as megatron:
            module, chunk, optimizer = made(megatron, True, FP16)
            plug(optimizer, results_on_host=True)
            seen = []
            for number in (1, 2):
                backward(megatron, module, chunk, optimizer, number, spoil(torch.nan) if number == 2 else None)
                with HostSyncs() as syncs:
                    seen.append((optimizer.step(), {*syncs}))
            return seen

    ((success, norm, zeros), waits), skipped = on_ranks(1, run, timeout=60)[0]
    assert (success, zeros, waits) == (True, 0.0, {"Tensor.tolist"})
    generator = torch.Generator().manual_seed(1)
    expected = torch.cat([torch.randn(shape, generator=generator).flatten() for shape in ((9, 16), 9, 9, 9)]).norm()
    assert norm == pytest.approx(expected.item(), rel=1e-3)  # the gradients are in fp16
    assert skipped == ((False, None, None), {"Tensor.tolist"})


def test_a_norm_above_the_skip_threshold_skips_the_update_and_not_the_loss_scale(engine):
    def run(rank):
        with engine() as megatron:
            seen = []
            has_threshold = hasattr(megatron.core.optimizer.OptimizerConfig(optimizer="adam"), SKIP_ABOVE)
            for plugged in (True, False) if has_threshold else (True,):
                module, chunk, optimizer = made(megatron, True, FP16, hysteresis=1)
                (member,) = optimizer.chained_optimizers
                setattr(member.config, SKIP_ABOVE, 1e-3)
                if plugged:
                    plug(optimizer, results_on_host=True)
                before = everything(module, optimizer)
                backward(megatron, module, chunk, optimizer, 1)
                success, norm, zeros = optimizer.step()
                assert success is False
                assert all(map(torch.equal, before, everything(module, optimizer)))
                setattr(member.config, SKIP_ABOVE, 2 * norm)
                seen.append((norm, zeros, float(optimizer.get_loss_scale())))
            return seen

    for plugged, *stock in on_ranks(2, run, timeout=60):
        assert plugged[1:] == (0.0, 4096.0)
        assert plugged[0] > 1e-3
        for own in stock:
            assert plugged == pytest.approx(own, rel=1e-6)


def test_without_zeros_to_log_there_is_none_and_without_clipping_still_a_norm(engine):
    def run(rank):
        with engine() as megatron:
            norms = []
            for clip_grad in (0.0, 1.0):
                module, chunk, optimizer = made(megatron, False, FP32, clip_grad=clip_grad, log_num_zeros_in_grad=False)
                plug(optimizer)
                backward(megatron, module, chunk, optimizer, 1)
                _, norm, zeros = optimizer.step()
                assert zeros is None
                norms.append(float(norm))
            return norms

    without, clipped = on_ranks(1, run, timeout=60)[0]
    assert without == clipped > 1


def test_a_constant_loss_scale_stays_and_is_divided_out(engine):
    def run(rank):
        with engine() as megatron:
            seen = []
            for options in ({}, {"loss_scale": 128.0}):
                module, chunk, optimizer = made(megatron, True, BF16, **options)
                plug(optimizer)
                for number in (1, 2, 3):
                    backward(megatron, module, chunk, optimizer, number, spoil(torch.inf) if number == 2 else None)
                    success, norm, _ = optimizer.step()
                    assert bool(success) == (number != 2)
                seen.append((float(norm), float(optimizer.get_loss_scale()), everything(module, optimizer)))
            return seen

    for (norm, one, weights), (scaled_norm, scale, scaled_weights) in on_ranks(2, run, timeout=60):
        assert (one, scale) == (1, 128)
        assert scaled_norm == norm > 1
        torch.testing.assert_close(scaled_weights, weights, rtol=1e-6, atol=1e-9)


def test_removed_it_is_megatrons_own_optimizer_again_and_goes_on_as_if_it_always_had_been(engine):
    def attributes(optimizer):
        caches = {"_has_grad_norm_group_cache", "grad_norms_by_group"}  # which a step of Megatron's own fills
        things = (optimizer, *optimizer.chained_optimizers)
        return [{key: value for key, value in vars(thing).items() if key not in caches} for thing in things]

    def keys(optimizer):
        return [list(group) for group in optimizer.param_groups]

    def run(rank):
        with engine() as megatron:
            for distributed, dtype in KINDS:
                module, chunk, optimizer = made(megatron, distributed, dtype)
                other, other_chunk, other_optimizer = made(megatron, distributed, dtype)
                own, own_groups, own_keys = attributes(optimizer), optimizer.param_groups, keys(optimizer)
                for number in range(4):
                    plugged = plug(optimizer) if number in (1, 2) else None
                    assert isinstance(optimizer.optimizer, FusedAdamW) == (plugged is not None)
                    for pair in ((module, chunk, optimizer), (other, other_chunk, other_optimizer)):
                        backward(megatron, *pair, number)
                        assert pair[2].step()[0]
                    assert all(one is group for one, group in zip(optimizer.param_groups, own_groups, strict=True))
                    if plugged is not None:
                        plugged.remove()
                        plugged.remove()
                    assert attributes(optimizer) == own
                    assert keys(optimizer) == own_keys
                for one, another in zip(everything(module, optimizer), everything(other, other_optimizer), strict=True):
                    torch.testing.assert_close(one, another, rtol=torch.finfo(one.dtype).eps, atol=1e-6)
                assert float(optimizer.get_loss_scale()) == float(other_optimizer.get_loss_scale())
            with plug(optimizer):
                assert isinstance(optimizer.optimizer, FusedAdamW)
            assert attributes(optimizer) == own

    on_ranks(2, run, timeout=60)
