"""The compiled backend: the definition's values, few compilations, and never an exception from a compiler."""

import pytest
import torch

from stepstack_fused_adam import FusedAdamW, _compiled
from stepstack_fused_adam._definition import update_
from stepstack_testing import HostSyncs, Operations


def trained(backend, *, sizes=(70,), dtype=torch.bfloat16, seeds=3, **numbers):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
    optimizer = FusedAdamW(params, lr=0.1, master_weights="fp32", backend=backend, **numbers)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.step()
    return optimizer


def test_it_is_the_torch_backend_to_a_few_ulps():
    one, other = (trained(backend, sizes=[(5, 14), (7,), (1,), ()]) for backend in ("compiled", "torch"))
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one.state[a], other.state[b], rtol=2e-6, atol=1e-7)


def test_a_skipped_step_changes_nothing():
    optimizer = trained("compiled")
    (param,) = optimizer.param_groups[0]["params"]
    before = optimizer.state_dict()["state"], param.detach().clone()
    param.grad.view(-1)[3] = torch.inf
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(torch.nan), torch.tensor(2.0)
    optimizer.step()
    torch.testing.assert_close((optimizer.state_dict()["state"], param.detach()), before, rtol=0, atol=0)


def test_fifty_sizes_and_offsets_are_compiled_at_most_three_times():
    torch._dynamo.utils.counters.clear()
    buffer, grads = torch.zeros(10_000, dtype=torch.bfloat16), torch.ones(10_000, dtype=torch.bfloat16)
    trained("compiled")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size in range(2, 52):
        param = torch.nn.Parameter(buffer[size % 7 : size % 7 + size])
        param.grad = grads[:size]
        FusedAdamW([param], lr=0.1 * size, master_weights="fp32", backend="compiled").step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


def test_a_compiler_that_fails_is_replaced_with_one_warning(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(_compiled, "_broken", set())
    monkeypatch.setattr(_compiled, "_function", lambda case: broken)
    with pytest.warns(RuntimeWarning, match="torch.compile failed on cpu.*no space left") as warned:
        optimizer = trained("compiled", sizes=[70, 80])
    assert len(warned) == 1
    reference = trained("torch", sizes=[70, 80])
    for a, b in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


def test_it_neither_waits_nor_depends_on_the_number_of_pieces(monkeypatch):
    monkeypatch.setattr(_compiled, "_function", lambda case: update_)  # torch.compile does nothing under a mode
    monkeypatch.setattr(_compiled, "_get_current_dispatch_mode", lambda: None)
    counts = []
    for numel, count in ((128, 10), (64, 20)):
        flat, grad = torch.ones(1280, dtype=torch.bfloat16), torch.ones(1280, dtype=torch.bfloat16)
        params = [torch.nn.Parameter(piece) for piece in flat.split(numel)]
        for param, piece in zip(params, grad.split(numel), strict=True):
            param.grad = piece
        optimizer = FusedAdamW(params, master_weights="fp32", backend="compiled")
        optimizer.step()
        with HostSyncs() as syncs, Operations() as operations:
            optimizer.step()
        assert syncs == []
        counts.append(dict(operations))
        assert len(params) == count
    assert counts[0] == counts[1]


def test_under_a_mode_it_is_the_torch_backend():
    with Operations() as operations:
        optimizer = trained("compiled", seeds=1)
    assert operations["aten._fused_adamw_"] == 1
    (param,) = optimizer.param_groups[0]["params"]
    assert torch.equal(param, trained("torch", seeds=1).param_groups[0]["params"][0])


def test_auto_never_compiles_a_small_model(monkeypatch):
    monkeypatch.setattr(_compiled, "_function", lambda case: pytest.fail("compiled"))
    trained("auto")
