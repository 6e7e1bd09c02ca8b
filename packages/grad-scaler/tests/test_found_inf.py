"""What counts as a gradient that is not finite, and what becomes of it, on one process."""

import pytest
import torch

from stepstack_grad_scaler import GradScaler

INF, NAN = float("inf"), float("nan")


class ReadsFlag(torch.optim.SGD):
    """Keeps the flag it was stepped with, and may raise it itself."""

    _step_supports_amp_scaling = True
    raises_it = False

    def step(self):
        if self.raises_it:
            self.found_inf.fill_(1)
        self.flag = self.found_inf.item()


def flag_for(*gradients, unscale=False):
    """The flag that an optimizer sees which has these gradients; None for a parameter without."""
    optimizer = ReadsFlag([torch.nn.Parameter(torch.zeros(2)) for _ in gradients])
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        if gradient is not None:
            parameter.data = torch.zeros(gradient.shape, dtype=gradient.dtype)
        parameter.grad = gradient
    scaler = GradScaler("cpu")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step_skipped == bool(optimizer.flag)
    return optimizer.flag


@pytest.mark.parametrize("unscale", [False, True], ids=["fused", "unscaled"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_one_bad_element_anywhere_sets_the_flag_to_exactly_1(unscale, bad, dtype):
    good = torch.ones(3, dtype=dtype)
    assert flag_for(good.clone(), torch.ones(2, 2), unscale=unscale) == 0
    bad = torch.tensor([1, 1, bad], dtype=dtype)
    assert flag_for(good, torch.ones(2, 2), bad, None, bad.clone(), torch.tensor([NAN]), unscale=unscale) == 1


def test_fp16_gradients_are_checked_but_not_unscaled():
    gradient = torch.tensor([6e4, 6e4], dtype=torch.float16)
    assert flag_for(gradient) == 0
    assert flag_for(gradient * 2) == 1
    with pytest.raises(ValueError, match=r"FP16 gradients: parameter 1 of the optimizer, of shape \(2,\)"):
        flag_for(torch.ones(2), gradient, unscale=True)


def test_sparse_gradients_are_unscaled_and_checked_where_they_are():
    def sparse(*values, dtype=torch.float32):
        indices = torch.zeros(1, len(values), dtype=torch.int64)
        return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (2,), check_invariants=True)

    finite = sparse(1.0, 2.0)
    assert flag_for(finite, unscale=True) == 0
    assert finite.to_dense()[0] == 3 / 65536
    assert flag_for(sparse(1.0, NAN)) == 1
    # Duplicates add up to what fp16 cannot hold.
    assert flag_for(sparse(6e4, 6e4, dtype=torch.float16)) == 1


def test_lazy_views_are_unscaled_and_checked_where_they_are():
    base = torch.tensor([8 + 16j, 8 - 8j])
    assert base.conj().is_conj()
    assert base.conj().imag.is_neg()
    for gradient, unscaled in ((base.conj(), [1 - 2j, 1 + 1j]), (base.conj().imag, [-2, 1])):
        weight = torch.nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        GradScaler("cpu", init_scale=8.0).unscale_(torch.optim.SGD([weight]))
        assert weight.grad.tolist() == unscaled
        base.mul_(8)
    assert flag_for(torch.tensor([complex(1, INF)]).conj()) == 1


def test_empty_gradients_are_fine():
    assert flag_for(torch.zeros(0), torch.zeros(2, 0), torch.ones(2)) == 0


def test_a_gradient_that_lives_beside_the_parameter_is_checked_and_unscaled():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.decoupled_grad = torch.tensor([8.0, INF])
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizer = ReadsFlag([weight])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.flag == 1
    assert weight.decoupled_grad.tolist() == [1, INF]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_without_any_gradient_nothing_happens(fused):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2, hysteresis=2, refill_hysteresis="on_clean_step")
    scaler.update(found_inf=False)
    scaler.update(found_inf=True)
    before = scaler.state_dict()
    for _ in range(3):
        assert scaler.step(optimizer) is None
        scaler.update()
    assert scaler.state_dict() == before | {"last_step_skipped": False}
    assert not optimizer.state
    assert weight.tolist() == [1, 1]


def test_a_flag_of_two_skips_the_step_and_no_step_is_counted():
    """As the sum over two devices is, if each found one."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = GradScaler("cpu", init_scale=1.0)

    def step(flags):
        weight.grad = torch.ones(2)
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        scaler.step(optimizer)
        scaler.update()

    step({torch.device("cpu"): torch.tensor(0.0)})
    before = weight.tolist()
    devices = torch.device("cpu"), torch.device("cpu", 0)
    for flags in (torch.tensor(1.0), torch.tensor([1.0])), (torch.tensor(2.0), torch.tensor(0.0)):
        step(dict(zip(devices, flags, strict=True)))
        assert weight.tolist() == before
        assert optimizer.state[weight]["step"] == 1
        assert scaler.last_step_skipped


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("given", [torch.tensor(1.0), torch.tensor([2.0]), torch.tensor(NAN)], ids=str)
def test_a_flag_that_is_set_already_counts_too(fused, given):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    weight.grad = torch.ones(2)
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizer.found_inf = given
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 4
    assert "found_inf" not in vars(optimizer)


def test_a_flag_that_the_optimizer_raises_in_its_step_counts_too():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = ReadsFlag([weight])
    optimizer.raises_it = True
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4


def test_of_two_optimizers_only_the_one_with_the_bad_gradient_skips():
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.AdamW([weight], fused=True) for weight in (good, bad)]
    good.grad, bad.grad = torch.ones(2), torch.tensor([1.0, INF])
    scaler = GradScaler("cpu", init_scale=8.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert good.tolist() != [1, 1]
    assert bad.tolist() == [1, 1]
    assert (scaler.get_scale(), scaler.skipped_steps.item()) == (4, 1)


def test_of_two_optimizers_one_with_gradients_makes_a_clean_step():
    weight, idle = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizers = [torch.optim.AdamW([parameter], fused=True) for parameter in (idle, weight)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16


def test_an_optimizer_that_takes_the_scaler_itself_gets_it():
    class TakesScaler(torch.optim.SGD):
        """As older fused optimizers do: finds out alone."""

        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            flag = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
            self.seen = flag.item(), grad_scaler._get_scale_async().item()

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, INF])
    optimizer = TakesScaler([weight])
    scaler = GradScaler("cpu", init_scale=8.0)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(optimizer)
    scaler.update()
    assert optimizer.seen == (1, 8)
    assert scaler.get_scale() == 4


@pytest.mark.gpu
def test_gradients_on_two_devices_decide_together():
    on_cpu, on_gpu = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.AdamW([on_cpu, on_gpu], fused=True)
    scaler = GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    for bad in (on_cpu, on_gpu):
        on_cpu.grad, on_gpu.grad = torch.ones_like(on_cpu), torch.ones_like(on_gpu)
        bad.grad[0] = INF
        scaler.step(optimizer)
        scaler.update()
        assert on_cpu.tolist() == on_gpu.tolist() == [1, 1]
    assert scaler.get_scale() == 2
