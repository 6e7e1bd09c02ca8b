"""The scaler's own calls: what they change, what they leave alone, and that none of them waits."""

import pytest
import torch

from stepstack_grad_scaler import GradScaler
from stepstack_testing import HostSyncs, Operations

INF = float("inf")


class Flagged(torch.optim.SGD):
    """Keeps the contract, and nothing else."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
                    moved = parameter - group["lr"] * gradient
                    parameter.copy_(torch.where(self.found_inf != 0, parameter, moved))


def model_and_optimizer(kind=Flagged):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    return weight, kind([weight], lr=0.125)


def fused_adam(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def unfused_adam(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr)


def backward(scaler, weight, factor=1.0):
    scaler.scale((weight * factor).sum()).backward()


def test_the_scale_is_there_before_anything_is_scaled():
    scaler = GradScaler("cpu", init_scale=1024.0)
    scale = scaler.scale_tensor
    assert scale == 1024
    assert (scale.shape, scale.dtype) == ((), torch.float32)
    assert scaler.scale(torch.ones(())) == 1024
    assert scaler.scale_tensor is scale


def test_a_rank_that_scales_no_loss_may_step():
    weight, optimizer = model_and_optimizer()
    weight.grad = torch.full((3,), 8.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.step(optimizer)
    assert weight.tolist() == [0.875, -2.125, 2.875]


@pytest.mark.parametrize("kind", [fused_adam, unfused_adam, Flagged])
def test_it_steps_as_torchs_scaler_does(kind):
    results = []
    for scaler in (
        GradScaler("cpu", 1024.0, growth_interval=2),
        torch.amp.GradScaler("cpu", 1024.0, growth_interval=2),
    ):
        weight, optimizer = model_and_optimizer(kind)
        for factor in (1.0, INF, 2.0, 3.0, 4.0):
            backward(scaler, weight, factor)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((weight.tolist(), scaler.get_scale(), scaler._get_growth_tracker()))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", [fused_adam, Flagged])
@pytest.mark.parametrize("unscale", [False, True], ids=["fused", "unscaled"])
@pytest.mark.parametrize("deferred", [False, True], ids=["not clipped", "clipped"])
def test_no_call_waits_with_an_optimizer_that_has_the_flag(kind, unscale, deferred):
    weight, optimizer = model_and_optimizer(kind)
    scaler = GradScaler("cpu", hysteresis=2, groups=())
    with HostSyncs() as syncs:
        for factor in (1.0, INF, 1.0):
            backward(scaler, weight, factor)
            if unscale:
                scaler.unscale_(optimizer)
            if deferred:
                optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert syncs == []


def test_a_step_composed_by_hand_waits_for_nothing():
    weight, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu", init_scale=1024.0)
    with HostSyncs() as syncs:
        for factor in (1.0, INF):
            backward(scaler, weight, factor)
            norm = weight.grad.norm() / scaler.scale_tensor
            optimizer.grad_scale = scaler.scale_tensor / torch.where(norm > 1, 1 / norm, 1.0)
            optimizer.found_inf = found_inf = (~norm.isfinite()).float()
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            scaler.update(found_inf=found_inf)
            optimizer.zero_grad()
    assert syncs == []
    assert torch.allclose(weight, torch.tensor([1.0, -2.0, 3.0]) - 0.125 / 3**0.5)
    assert scaler.scale_tensor == 512


def test_an_optimizer_without_the_flag_costs_one_read():
    weight, optimizer = model_and_optimizer(torch.optim.SGD)
    scaler = GradScaler("cpu")
    with HostSyncs() as syncs:
        backward(scaler, weight)
        scaler.step(optimizer)
        scaler.update()
    assert syncs == ["aten._local_scalar_dense"]


def test_operations_do_not_grow_with_the_parameters():
    counts = []
    for size in (2, 200):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3)) for _ in range(size)], fused=True)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(3)
        scaler = GradScaler("cpu")
        with Operations() as operations:
            scaler.step(optimizer)
            scaler.update()
        counts.append(operations.total())
    assert counts[0] == counts[1] < 60


def test_skipped_steps_are_counted_on_the_device():
    scaler = GradScaler("cpu")
    assert (scaler.last_step_skipped.dtype, scaler.skipped_steps.dtype) == (torch.bool, torch.int64)
    seen = []
    for overflow in (0, 1, 1, 0):
        scaler.update(found_inf=torch.tensor(float(overflow)))
        seen.append((scaler.last_step_skipped.item(), scaler.skipped_steps.item()))
    assert seen == [(False, 0), (True, 1), (True, 2), (False, 2)]


@pytest.mark.parametrize(
    "found_inf",
    [torch.tensor(1.0), torch.tensor([2.0]), torch.tensor(float("nan")), torch.tensor(True), torch.tensor(1), True],
    ids=str,
)
def test_any_flag_but_zero_is_an_overflow(found_inf):
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.update(found_inf=found_inf)
    assert scaler.scale_tensor == 512


@pytest.mark.parametrize("found_inf", [torch.tensor(0.0), torch.tensor([False]), False], ids=str)
def test_a_flag_of_zero_is_a_clean_step(found_inf):
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.update(found_inf=found_inf)
    assert scaler.scale_tensor == 2048


def test_a_flag_of_many_elements_is_refused():
    with pytest.raises(ValueError, match=r"got one of shape \(2,\)"):
        GradScaler("cpu").update(found_inf=torch.zeros(2))


@pytest.mark.parametrize("new_scale", [64, 64.0, torch.tensor(64.0), torch.tensor([64.0])], ids=str)
def test_a_new_scale_replaces_the_old_one_and_leaves_the_trackers(new_scale):
    scaler = GradScaler("cpu", growth_interval=2)
    scaler.update(found_inf=False)
    scaler.update(new_scale)
    assert scaler.get_scale() == 64
    scaler.update(found_inf=False)
    assert scaler.get_scale() == 128


def test_a_new_scale_stays_within_the_bounds():
    scaler = GradScaler("cpu", min_scale=2.0, max_scale=2.0**20)
    for new_scale, expected in ((1.0, 2.0), (torch.tensor(2.0**30), 2.0**20)):
        scaler.update(new_scale)
        assert scaler.get_scale() == expected


def test_a_step_is_counted_also_if_the_scale_is_set_by_hand():
    weight, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu")
    backward(scaler, weight, INF)
    scaler.step(optimizer)
    scaler.update(8.0)
    assert (scaler.get_scale(), scaler.skipped_steps.item()) == (8, 1)
    scaler.update(4.0)  # no step, so nothing is known of one
    assert scaler.last_step_skipped


@pytest.mark.parametrize("new_scale", [0, -1.0, INF, float("nan")])
def test_a_new_scale_that_is_no_scale_is_refused(new_scale):
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="it must be finite and above 0"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 65536


@pytest.mark.parametrize("new_scale", [0.0, -1.0, INF, float("nan")])
def test_a_tensor_that_is_no_scale_leaves_the_scale_as_it_is(new_scale):
    scaler = GradScaler("cpu")
    with HostSyncs() as syncs:
        scaler.update(torch.tensor(new_scale))
    assert syncs == []
    assert scaler.get_scale() == 65536


@pytest.mark.parametrize("flag", [True, torch.tensor(False)], ids=str)
def test_a_flag_that_is_given_as_the_scale_is_refused(flag):
    with pytest.raises(ValueError, match=r"a flag is given by its name: update\(found_inf=…\)"):
        GradScaler("cpu").update(flag)


def test_calls_out_of_order_are_refused_as_torch_does():
    weight, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu")
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    backward(scaler, weight)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=None)


def test_a_disabled_scaler_has_scale_1_and_never_changes():
    weight, optimizer = model_and_optimizer(torch.optim.SGD)
    scaler = GradScaler("cpu", enabled=False)
    assert scaler.scale_tensor == 1
    assert scaler.scale_tensor is scaler.scale_tensor
    backward(scaler, weight)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(found_inf=torch.tensor(1.0))
    scaler.update()
    assert weight.tolist() == [0.875, -2.125, 2.875]
    assert (scaler.get_scale(), scaler.skipped_steps.item()) == (1, 0)
    assert scaler.scale_tensor == 1
    assert not scaler.last_step_skipped
    assert scaler.state_dict() == {}


def test_without_a_gpu_the_default_is_disabled_as_torchs_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler()
    assert scaler.scale_tensor == 1
    assert scaler.scale_tensor.device.type == "cpu"


@pytest.mark.gpu
def test_a_captured_step_goes_on_being_right():
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True, capturable=True)
    scaler = GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    factor = torch.ones((), device="cuda")

    def step():
        optimizer.zero_grad()
        backward(scaler, weight, factor)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # makes what is kept
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    scales = []
    for value in (INF, 1.0, 1.0):
        factor.fill_(value)
        graph.replay()
        scales.append(scaler.get_scale())
    assert scales == [512, 512, 1024]
    assert scaler.skipped_steps == 1
    assert optimizer.state[weight]["step"] == 3
