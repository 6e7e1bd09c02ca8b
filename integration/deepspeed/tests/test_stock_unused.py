"""Parameters that have no gradient in some steps, or on one rank."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from stepstack_deepspeed import plug
from stepstack_testing import on_ranks

pytestmark = pytest.mark.engine
stock = pytest.importorskip("stock", reason="needs DeepSpeed: nox -s 'engines(deepspeed)'")

CASES = [stock.Case(stage, offload=offload, clip="loose") for stage in (1, 2, 3) for offload in (False, True)]
THREE = [stock.Case(stage, offload=offload, clip="loose", accumulation=3) for stage in (1, 2, 3) for offload in (0, 1)]
TWO = [stock.Case(stage, offload=True, clip="loose", accumulation=2) for stage in (1, 2, 3)]
UNMANAGED = [replace(case, more={"managed_gradient_accumulation": False}) for case in THREE if case.offload]
LOST_BY_STOCK = [case for case in THREE if case.stage == 3 or (case.stage == 2 and case.offload)]
SUMS_IN_FP32 = stock.Case(
    2, "bf16", True, "loose", 3, more={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
)
USED = {2: ["11", "10", "01", "00", "10"], 3: ["111", "100", "001", "010", "000", "110"]}  # by micro-batch of a window


class Heads(nn.Module):
    """Two heads, of which the second is used now and then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, x, both):
        x = torch.tanh(self.trunk(x))
        first = self.first(x).sum(1)
        return first + self.second(x).sum(1) if both else first


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)


@pytest.fixture(scope="module")
def distances():
    found = on_ranks(stock.RANKS, _train, timeout=stock.TIMEOUT)
    assert found[0] == found[1]
    return found[0]


@pytest.fixture(scope="module")
def windows():
    found = on_ranks(stock.RANKS, _train_windows, timeout=stock.TIMEOUT)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_parameter_without_a_gradient_has_one_of_zeros(distances, case):
    """As DeepSpeed's flat partitions have it: the moments fade and the weight decays."""
    norm, weights = distances[str(case)][1]
    assert norm < 1e-6
    assert weights < 3e-7


@pytest.mark.parametrize("case", [case for case in CASES if case.offload or case.stage == 3], ids=str)
def test_without_it_the_gradient_of_an_earlier_step_is_used_again(distances, case):
    _, weights = distances[str(case)][0]
    assert weights > 1e-3


@pytest.mark.parametrize("case", [*THREE, *TWO, *UNMANAGED], ids=str)
def test_a_parameter_that_some_micro_batches_use_has_the_sum_of_their_gradients(windows, case):
    norm, weights = windows[str(case)]
    assert norm < 1e-6
    assert weights < 3e-7


def test_a_sum_kept_in_fp32_beside_16_bits_is_not_lost_under_offload(windows):
    norm, weights = windows[str(SUMS_IN_FP32)]
    assert norm < 5e-3  # of bf16: gradients of micro-batches are rounded
    assert weights < 5e-4


@pytest.mark.parametrize("case", LOST_BY_STOCK, ids=str)
def test_without_it_sums_are_those_of_other_micro_batches(windows, case):
    norm, weights = windows[f"stock {case}"]
    assert norm > 1e-2
    assert weights > 1e-3


def test_in_stage_0_a_gradient_may_be_missing_on_one_rank():
    for norm, expected, distance in on_ranks(stock.RANKS, _on_one_rank, timeout=stock.TIMEOUT):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert distance < 3e-7


def _train(rank):
    stock.initialize(rank)
    return {str(case): (_distance(case, rank, lambda engine: None), _distance(case, rank, plug)) for case in CASES}


def _distance(case, rank, change):
    module = Heads()
    reference = _Zeros(copy.deepcopy(module))
    engine = stock.engine_of(case, optimizer=adamw, module=module)
    change(engine)
    norm = 0.0
    for step in range(4):
        engine.backward(engine(stock.batch(rank, step, 0), both=step % 2 == 0).square().mean())
        engine.step()
        expected = reference.step(step, lambda rank, step=step: step % 2 == 0)
        norm = max(norm, abs(float(engine.get_global_grad_norm()) / expected - 1))
    return norm, stock.distance(engine, reference.module.parameters())


def _train_windows(rank):
    stock.initialize(rank)
    return {str(case): _distance_of_windows(case, rank, plug) for case in [*THREE, *TWO, *UNMANAGED, SUMS_IN_FP32]} | {
        f"stock {case}": _distance_of_windows(case, rank, lambda engine: None) for case in LOST_BY_STOCK
    }


def _distance_of_windows(case, rank, change):
    module, dtype = Heads(), stock.DTYPES[case.dtype]
    reference = _Windows(copy.deepcopy(module).to(dtype))
    engine = stock.engine_of(case, optimizer=adamw, module=module)
    change(engine)
    norm = 0.0
    for step, used in enumerate(USED[case.accumulation]):
        for micro, both in enumerate(used):
            engine.backward(engine(stock.batch(rank, step, micro).to(dtype), both=both == "1").square().mean())
            if micro == len(used) - 1 or "managed_gradient_accumulation" not in case.more:
                engine.step()
        norm = max(norm, abs(float(engine.get_global_grad_norm()) / reference.step(step, used) - 1))
    return norm, stock.distance(engine, reference.weights)


class _Windows:
    """Torch on the micro-batches of all ranks, whose gradients are added in fp32."""

    def __init__(self, module):
        self.module = module
        self.weights = [nn.Parameter(param.detach().float()) for param in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.01, eps=1e-4)

    def step(self, step, used):
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        for micro, both in enumerate(used):
            for rank in range(stock.RANKS):
                self._add_grads(stock.batch(rank, step, micro), both == "1", stock.RANKS * len(used))
        norm = torch.nn.utils.get_total_norm([weight.grad.double() for weight in self.weights]).item()
        self.optimizer.step()
        for weight, param in zip(self.weights, self.module.parameters(), strict=True):
            param.data.copy_(weight.data)
        return norm

    def _add_grads(self, batch, both, count):
        self.module.zero_grad()
        output = self.module(batch.to(next(self.module.parameters()).dtype), both=both)
        (output.square().mean() / count).backward()
        for weight, param in zip(self.weights, self.module.parameters(), strict=True):
            if param.grad is not None:
                weight.grad += param.grad.float()


def _on_one_rank(rank):
    stock.initialize(rank)
    module = Heads()
    reference = _Zeros(copy.deepcopy(module))
    engine = stock.engine_of(stock.Case(0, clip="loose"), optimizer=adamw, module=module)
    with plug(engine):
        for step in range(3):
            engine.backward(engine(stock.batch(rank, step, 0), both=rank == 0).square().mean())
            engine.step()
            norm = reference.step(step, lambda rank: rank == 0)
    return float(engine.get_global_grad_norm()), norm, stock.distance(engine, reference.module.parameters())


class _Zeros:
    """Torch on the batches of all ranks, with zeros for gradients that are missing."""

    def __init__(self, module):
        self.module, self.optimizer = module, adamw(module)

    def step(self, step, both):
        self.optimizer.zero_grad(set_to_none=False)
        for rank in range(stock.RANKS):
            output = self.module(stock.batch(rank, step, 0), both=both(rank))
            (output.square().mean() / stock.RANKS).backward()
        for param in self.module.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        norm = torch.nn.utils.get_total_norm([param.grad.double() for param in self.module.parameters()]).item()
        self.optimizer.step()
        return norm
