"""Which backend does a step, and the contracts of the kernels that other libraries bring."""

import sys
import types

import pytest
import torch

from stepstack_fused_adam import FusedAdamW, _backends, _compiler, _multi_tensor, _native, backends
from stepstack_fused_adam._backends import assign
from stepstack_fused_adam._compiled import CompiledStep
from stepstack_fused_adam._definition import Scalars, States, update_
from stepstack_fused_adam._hyperparameters import Hyperparameters
from stepstack_fused_adam._native import NativeStep
from stepstack_fused_adam._run import Run, run_of
from stepstack_fused_adam._state import Precision, create, states_here
from stepstack_fused_adam._torch import TorchStep

LIBRARIES = {"apex": ["amp_C"], "transformer_engine": ["transformer_engine.pytorch", "transformer_engine_torch"]}


def case(numel, dtype=torch.bfloat16, precision=None, device="cpu", amsgrad=False):
    """A parameter and the run of its states, one step made."""
    param = torch.linspace(-1, 1, numel).to(device, dtype)
    (state,) = create([param], precision or Precision("fp32"), amsgrad)
    state["step"].fill_(1)
    return param, run_of(param, state["step"], states_here(state))


def run_like(numel, *arguments, **options):
    """One that has no memory, but says that it is on the CPU."""
    _, run = case(numel, *arguments, device="meta", **options)
    return Run(run.shape, torch.device("cpu"), run.step, run.states)


class Fake(types.ModuleType):
    """A library's kernels with their exact positional arguments, made of the definition."""

    def __init__(self):
        super().__init__("fake")
        self.calls = []

    def multi_tensor_adam_capturable(self, *arguments):
        self._adam(4, *arguments)

    def multi_tensor_adam_capturable_master(self, *arguments):
        self._adam(5, *arguments)

    def _adam(
        self,
        columns,
        chunk_size,
        flag,
        lists,
        lr,
        beta1,
        beta2,
        eps,
        step,
        mode,
        bias_correction,
        decay,
        inv_scale,
        /,
    ):
        assert chunk_size == 2048 * 32
        assert (flag.dtype, flag.shape) == (torch.int32, (1,))
        assert (lr.dtype, lr.shape) == (inv_scale.dtype, inv_scale.shape) == (torch.float32, (1,))
        assert (step.dtype, step.shape) == (torch.int32, (1,))
        assert all(isinstance(number, float) for number in (beta1, beta2, eps, decay))
        assert mode in (0, 1)
        assert bias_correction in (0, 1)
        assert len(lists) == columns
        for column in lists:
            assert len(column) == len(lists[0])
            assert len({tensor.dtype for tensor in column}) == 1
            assert all(tensor.is_contiguous() for tensor in column)
        self.calls.append([tensor.numel() for tensor in lists[0]])
        if flag.item() == 1:
            return
        numbers = (lr, torch.tensor(1 - beta1), torch.tensor(1 - beta2), torch.tensor(eps), torch.tensor(decay))
        by = Scalars(*(number.reshape(()) for number in (*numbers, 1 / inv_scale, torch.zeros(()))))
        t = step.float().reshape(()) if bias_correction else torch.tensor(torch.inf)
        for grad, param, exp_avg, exp_avg_sq, *master in zip(*lists, strict=True):
            update_(param, grad, States(exp_avg, exp_avg_sq, None, *master), t, by, bool(mode))
            grad.mul_(inv_scale)  # as the kernels do


@pytest.fixture
def fake(monkeypatch):
    fake = Fake()
    for names in LIBRARIES.values():
        for name in names:
            monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    _multi_tensor.kernels.cache_clear()
    yield fake
    _multi_tensor.kernels.cache_clear()


@pytest.fixture
def on_any_device(fake, monkeypatch):
    monkeypatch.setattr(_multi_tensor, "missing", lambda backend, device: None)
    return fake


def test_here_are_torch_and_a_compiler():
    found = backends("cpu")
    assert found["torch"] is None
    assert all(found[name] is None or "compiler" in found[name] for name in ("native", "compiled"))
    assert "cuda" in found["apex"]
    assert list(found) == ["torch", "native", "compiled", "transformer_engine", "apex"]
    assert set(backends()) == set(found)


def test_why_a_backend_is_not_here(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert backends("cpu")["compiled"] == "no C++ compiler is on the PATH"
    assert "mps" in backends("mps")["compiled"]
    _multi_tensor.kernels.cache_clear()
    assert backends("cuda")["apex"] == "ModuleNotFoundError: No module named 'amp_C'"


def test_a_library_may_fail_to_import_in_any_way(monkeypatch):
    def raising(name):
        raise RuntimeError("found an empty package")

    monkeypatch.setattr(_multi_tensor, "import_module", raising)
    _multi_tensor.kernels.cache_clear()
    assert backends("cuda")["transformer_engine"] == "RuntimeError: found an empty package"
    with pytest.raises(ValueError, match=r"backend 'apex' is not here: .*empty package"):
        FusedAdamW([torch.nn.Parameter(torch.ones(2))], backend="apex")
    _multi_tensor.kernels.cache_clear()


def test_a_library_without_the_kernel_is_not_here(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_C", types.ModuleType("amp_C"))
    assert "multi_tensor_adam_capturable" in backends("cuda")["apex"]
    assert backends("cuda")["transformer_engine"] is None


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(
    ("dtype", "master_weights"), [(torch.float32, None), (torch.bfloat16, "fp32"), (torch.float16, None)]
)
def test_their_kernels_are_the_torch_backend(on_any_device, backend, dtype, master_weights, bias_correction):
    def trained(backend):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, numel).to(dtype)) for numel in (5, 70, 3)]
        optimizer = FusedAdamW(
            params, lr=0.1, master_weights=master_weights, backend=backend, bias_correction=bias_correction
        )
        for seed in range(4):
            for place, param in enumerate(params):
                grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
                param.grad = None if (seed, place) == (2, 1) else (8 * grad).to(dtype)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(seed == 1))
            optimizer.step()
        return optimizer

    one, other = trained(backend), trained("torch")
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one.state[a], other.state[b], rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(a, b, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    # One call for all, but for the last step: then they have made different numbers of steps.
    assert on_any_device.calls == [[5, 70, 3], [5, 70, 3], [5, 3], [5, 3], [70]]


def test_their_kernels_decay_into_the_gradient_when_asked(on_any_device):
    by = Hyperparameters(0.1, 0.9, 0.999, 1e-8, 0.1, decoupled=False, maximize=True)
    masters = []
    for backend in (_backends._KERNELS["apex"], TorchStep):
        param, run = case(70)
        backend([run], torch.bfloat16)([param], [torch.linspace(1, 2, 70).bfloat16()], by)
        masters.append(run.states.master)
    torch.testing.assert_close(*masters, rtol=2e-6, atol=1e-7)


def test_numbers_that_their_kernels_cannot_read_go_to_torch(on_any_device):
    param, run = case(70)
    by = Hyperparameters(0.1, 0.9, 0.999, 1e-8, torch.tensor(0.1))
    _backends._KERNELS["apex"]([run], torch.bfloat16)([param], [torch.ones(70, dtype=torch.bfloat16)], by)
    assert on_any_device.calls == []
    assert run.states.exp_avg.count_nonzero() == 70


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"precision": Precision("remainder")}, "remainders"),
        ({"precision": Precision("fp32", torch.bfloat16, torch.bfloat16)}, "moments of torch.bfloat16"),
        ({"precision": Precision("fp32", "block8", "block8")}, "moments of torch.int8"),
        ({"dtype": torch.float64}, "parameters of torch.float64"),
        ({"amsgrad": True}, "amsgrad"),
    ],
)
def test_what_their_kernels_do_not_do_is_refused(on_any_device, options, reason):
    run = run_like(70, **options)
    with pytest.raises(ValueError, match=f"backend 'apex' does not do this step: .*{reason}"):
        assign("apex", [run], [run.dtype])


@pytest.fixture
def without_native(monkeypatch):
    """As on a GPU, or on a machine without a compiler."""
    monkeypatch.setattr(_native, "is_here", lambda: False)


def test_auto_takes_the_native_kernel_on_cpus_where_torchs_is_more_than_one_pass(monkeypatch):
    monkeypatch.setattr(_native, "is_here", lambda: True)
    runs = [run_like(10), run_like(2**20, torch.float32, Precision()), run_like(10, torch.float64, Precision())]
    assert assign("auto", runs, [run.dtype for run in runs]) == [NativeStep, TorchStep, TorchStep]
    assert assign("auto", runs[1:2], [torch.bfloat16]) == [NativeStep]


@pytest.mark.usefixtures("without_native")
def test_auto_takes_torchs_kernel_where_that_is_one_pass():
    large = run_like(2**20, torch.float32, Precision())
    assert assign("auto", [large] * 100, [torch.float32] * 100) == [TorchStep] * 100


@pytest.mark.usefixtures("without_native")
def test_auto_compiles_for_large_models_only(monkeypatch):
    def auto(*runs):
        return assign("auto", runs, [torch.bfloat16] * len(runs))

    monkeypatch.setattr(_compiler, "missing", lambda device: None)
    large, small = run_like(2**20), run_like(2**10)
    assert auto(large, small) == [TorchStep] * 2
    assert auto(small, *[large] * 16) == [TorchStep, *[CompiledStep] * 16]
    assert auto(*[small] * 2**15) == [TorchStep] * 2**15
    monkeypatch.setattr(_compiler, "missing", lambda device: "no compiler")
    assert auto(small, *[large] * 16) == [TorchStep] * 17


@pytest.mark.usefixtures("without_native")
def test_auto_takes_a_library_that_the_program_has_imported(on_any_device):
    assert assign("auto", [run_like(2**10)], [torch.bfloat16]) == [_backends._KERNELS["transformer_engine"]]
    odd = run_like(2**10, precision=Precision("remainder"))
    assert assign("auto", [odd], [torch.bfloat16]) == [TorchStep]


def test_names_are_checked():
    with pytest.raises(ValueError, match="one of auto, torch, native, compiled, transformer_engine, apex, not 'cuda'"):
        _backends.check_backend("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["compiled", *LIBRARIES])
def test_on_a_gpu_every_backend_that_is_here_is_torchs(backend):
    if reason := backends("cuda")[backend]:
        pytest.skip(reason)

    def trained(backend):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 1000).to("cuda", torch.bfloat16))
        optimizer = FusedAdamW([param], lr=0.1, master_weights="fp32", backend=backend)
        for seed in range(3):
            param.grad = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
            optimizer.grad_scale = torch.tensor(2.0, device="cuda")
            optimizer.found_inf = torch.tensor(float(seed == 1), device="cuda")
            optimizer.step()
        return optimizer.state[param]

    torch.testing.assert_close(trained(backend), trained("torch"), rtol=2e-6, atol=1e-7)


@pytest.mark.gpu
def test_a_step_can_be_captured_in_a_cuda_graph():
    param = torch.nn.Parameter(torch.linspace(-1, 1, 1000).to("cuda", torch.bfloat16))
    twin = torch.nn.Parameter(param.detach().clone())
    lr = torch.tensor(0.1, device="cuda")
    optimizer = FusedAdamW([param], lr=lr, master_weights="fp32")
    reference = FusedAdamW([twin], lr=0.1, master_weights="fp32")
    param.grad, twin.grad = torch.ones_like(param), torch.ones_like(twin)
    optimizer.step()
    reference.step()
    saved = optimizer.state_dict()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.load_state_dict(saved)
    for rate in (0.1, 0.2):
        lr.fill_(rate)
        reference.param_groups[0]["lr"] = rate
        graph.replay()
        reference.step()
    torch.testing.assert_close(optimizer.state[param], reference.state[twin], rtol=2e-6, atol=1e-7)
