"""Optimizer offload in part: sub-groups on the device and on the host are one model."""

import pytest
import torch

from stepstack_clip import clip_coefficient
from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

PARTLY = {"offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.3}, "sub_group_size": 8}
STEPS = 4
FACTORS = (1.0, 0.5, 0.0, 2.0)  # of the learning rate, by step


@pytest.mark.parametrize("clip", ["binding", "loose"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "l2"])
def test_both_halves_obey_the_same_numbers_at_every_step(clip, dtype, decoupled):
    case = stock.Case(3, dtype, True, clip, zero=PARTLY)
    for steps, halves, distance, without in on_ranks(stock.RANKS, _train, case, decoupled, timeout=stock.TIMEOUT):
        assert halves == {"cpu", "device"}
        for norm, expected, divisor, coefficient in steps:
            scale = 2.0**stock.SCALE_POWER if dtype == "fp16" else 1.0
            assert norm == pytest.approx(expected, rel=1e-6)
            assert scale / divisor == pytest.approx(coefficient, rel=1e-6)
            assert (coefficient < 1) == (clip == "binding")
        assert distance < 3e-7
        assert (
            without > 1e-3
        )  # the optimizer that DeepSpeed has for the device's half goes by the first group's first lr


def _train(rank, case, decoupled):
    stock.initialize(rank)

    def adam(module):
        return stock.deepspeed.ops.adam.DeepSpeedCPUAdam(stock.groups(module), eps=1e-4, adamw_mode=decoupled)

    steps = []
    for plugged in (False, True):
        engine, reference = stock.engine_of(case, optimizer=adam), stock.Reference(case, decoupled=decoupled)
        devices = engine.optimizer.subgroup_to_device
        for number in list(devices)[: int(0.7 * len(devices))]:
            devices[number] = "device"  # what its name would be if it were not the CPU's
        plug_ = plug(engine) if plugged else None
        for step in range(STEPS):
            for optimizer in (engine.optimizer.optimizer, reference.optimizer):
                for group, lr in zip(optimizer.param_groups, (stock.LR, stock.LR / 2), strict=True):
                    group["lr"] = lr * FACTORS[step]
            stock.backwards(engine, case, rank, step)
            divisors = _divisors(plug_, engine)
            engine.step()
            norm = reference.step(step)
            if plugged:
                coefficient = clip_coefficient(torch.tensor(norm), case.max_norm).item()
                assert len(divisors) == len(devices)
                assert {str(divisor.device) for divisor in divisors} == {"cpu"}
                assert len({float(divisor) for divisor in divisors}) == 1
                steps.append((float(engine.get_global_grad_norm()), norm, float(divisors[0]), coefficient))
        if not plugged:
            without = stock.distance(engine, reference.weights)
    return steps, set(devices.values()), stock.distance(engine, reference.weights), without


def _divisors(plug_, engine):
    """What each sub-group's gradient is divided by, in the step that comes."""
    divisors = []
    if plug_ is None:
        return divisors
    inner = plug_._seam.inner
    step_ = type(inner).step_

    def noting(key, params, group, owner, grad_scale):
        divisors.append(grad_scale)
        step_(inner, key, params, group, owner, grad_scale)

    inner.step_ = noting
    return divisors
