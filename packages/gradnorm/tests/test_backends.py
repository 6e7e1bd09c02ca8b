import math
import sys
import types

import pytest
import torch

from stepstack_gradnorm import (
    Part,
    _backends,
    _multi_tensor,
    _native,
    _torch,
    backends,
    kernels,
    tensor_norms,
    total_norm,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_the_library = pytest.mark.skipif(_native.missing(CPU) is not None, reason=str(_native.missing(CPU)))


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def norm_of(*tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors]).norm().item()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_torch_measures_large_tensors_by_chunks(dtype):
    grads = [random(2**21 + 3, dtype=dtype), random(2**16, dtype=dtype, seed=1), random(5, dtype=dtype, seed=2)]
    assert total_norm(grads, backend="torch").item() == pytest.approx(norm_of(*grads), rel=1e-6, abs=0)


@needs_the_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1023, 1024, 1025, 5000, 200_001])
def test_native_agrees_with_torch(dtype, size):
    grads = [random(size, dtype=dtype), random(7, 5, dtype=dtype, seed=1).t(), random(9, 9, dtype=dtype)[::2, 1:]]
    norm = total_norm(grads, backend="native")
    assert norm.item() == pytest.approx(norm_of(*grads), rel=1e-6, abs=0)
    assert norm.item() == pytest.approx(total_norm(grads, backend="torch").item(), rel=1e-6, abs=0)


@needs_the_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1e20, 1e-30, 6e-8, 0.1, 6e4, 0.0])
def test_native_keeps_the_range(dtype, value):
    grad = torch.full((5000,), value).to(dtype)
    grad = grad.where(grad.isfinite(), 0)  # 1e20 is no fp16
    assert total_norm(grad, backend="native").item() == pytest.approx(norm_of(grad), rel=1e-6, abs=0)


@needs_the_library
def test_native_does_not_lose_small_numbers_beside_large_ones():
    grad = torch.cat([torch.full((3000,), 1e-25), torch.full((3000,), 1e25), torch.full((3000,), 1.0)])
    assert total_norm(grad, backend="native").item() == pytest.approx(norm_of(grad), rel=1e-6, abs=0)


@needs_the_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1500, 2999])
def test_native_shows_what_is_not_finite(dtype, bad, where):
    grad = random(3000, dtype=dtype)
    grad[where] = bad
    norm = total_norm(grad, backend="native")
    assert norm.isnan() if math.isnan(bad) else norm == math.inf


@needs_the_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_work_and_change_no_bit(threads, dtype, monkeypatch):
    monkeypatch.setattr(_native, "_WORTH_A_THREAD", 2**17)
    monkeypatch.setattr(_native, "_CHUNK", 2**16)
    grads = [random(300_001, dtype=dtype), random(1000, dtype=dtype, seed=1), random(2**17, dtype=dtype, seed=2)]
    norms = []
    for count in (1, 2, 3):
        threads(count)
        norms.append(total_norm(grads, backend="native"))
    assert norms[0].item() == pytest.approx(norm_of(*grads), rel=1e-6, abs=0)
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])


@needs_the_library
def test_large_gradients_on_the_cpu_are_measured_by_the_native_backend(monkeypatch):
    used = []
    native = _native.sums_of_squares
    monkeypatch.setattr(_native, "sums_of_squares", lambda lists: used.append(len(lists)) or native(lists))
    total_norm(random(1000))
    total_norm(random(2**20, dtype=torch.float64))
    assert used == []
    grads = {"a": random(2**19), "b": random(2**19, seed=1)}
    norms = tensor_norms(grads)
    assert used == [2]
    assert [norm.item() for norm in norms.values()] == pytest.approx([norm_of(grad) for grad in grads.values()])


@pytest.fixture
def unloaded():
    """As in a process that has not looked for the library yet."""
    for found in (_native._loaded, _native.is_here):
        found.cache_clear()
    yield
    for found in (_native._loaded, _native.is_here):
        found.cache_clear()


def test_with_a_broken_compiler_torch_measures_large_gradients_with_one_warning(monkeypatch, unloaded):
    monkeypatch.setattr(_native._library, "load", lambda source: "cc1: out of memory")
    monkeypatch.setattr(_native._library, "missing", lambda source: None)
    with pytest.warns(RuntimeWarning, match=r"stepstack_gradnorm: squares.c can't be used.*cc1: out of memory"):
        norm = total_norm(random(2**20))
    assert torch.equal(norm, total_norm(random(2**20)))
    assert torch.equal(norm, total_norm(random(2**20), backend="torch"))
    assert backends("cpu")["native"] == "cc1: out of memory"


def test_with_a_broken_compiler_native_is_refused_who_asks_for_it(monkeypatch, unloaded):
    monkeypatch.setattr(_native._library, "load", lambda source: "cc1: out of memory")
    monkeypatch.setattr(_native._library, "missing", lambda source: None)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"backend 'native' does not measure these gradients: cc1: out of memory"):
            total_norm(random(3), backend="native")


def test_without_a_compiler_large_gradients_are_measured_by_torch_in_silence(monkeypatch, tmp_path, unloaded):
    monkeypatch.setattr(_native, "_SOURCE", tmp_path / "squares.c")  # without a library beside it
    monkeypatch.setattr(_native._library, "compiler", lambda: None)
    assert "no C compiler" in backends("cpu")["native"]
    assert total_norm(random(2**20)).item() == pytest.approx(norm_of(random(2**20)), rel=1e-6, abs=0)
    with pytest.raises(ValueError, match=r"backend 'native' does not measure these gradients: .*no C compiler"):
        total_norm(random(3), backend="native")


def test_backends_say_why_they_are_not_here():
    assert set(backends()) == {"torch", "native", "apex", "transformer_engine"}
    assert backends("cpu")["torch"] is None
    assert "cuda" in backends("cpu")["apex"]
    assert "cpu" in backends("cuda")["native"].lower()


@pytest.mark.parametrize(
    ("backend", "norm_type", "dtype", "words"),
    [
        ("fastest", 2, torch.float32, "fastest"),
        ("native", 3, torch.float32, "norm_type=2"),
        ("native", 2, torch.float64, "float64"),
    ],
)
def test_a_backend_that_can_not_is_refused(backend, norm_type, dtype, words):
    with pytest.raises(ValueError, match=words):
        total_norm(random(3, dtype=dtype), norm_type, backend=backend)


class FakeKernels(types.ModuleType):
    """The contract of multi_tensor_l2norm in amp_C and transformer_engine_torch, on tensors of any device."""

    def __init__(self):
        super().__init__("fake_kernels")
        self.calls = []

    def multi_tensor_l2norm(self, chunk_size, noop_flag, tensor_lists, per_tensor=False, /):
        (tensors,) = tensor_lists
        assert chunk_size == 65536
        assert (noop_flag.dtype, noop_flag.tolist()) == (torch.int32, [0])
        assert tensors[0].dtype in DTYPES
        assert all(tensor.dtype == tensors[0].dtype and tensor.device == noop_flag.device for tensor in tensors)
        assert all(tensor.numel() and tensor.is_contiguous() for tensor in tensors)
        self.calls.append([tensor.dtype for tensor in tensors])
        norms = torch.stack([tensor.float().norm() for tensor in tensors])
        return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


@pytest.fixture(params=["apex", "transformer_engine"])
def fake(request, monkeypatch):
    """A backend whose kernels are a fake that works on the CPU."""
    fake = FakeKernels()
    for name in _multi_tensor._MODULES[request.param]:
        monkeypatch.setitem(sys.modules, name, fake)
    missing = _multi_tensor.missing
    monkeypatch.setattr(
        _multi_tensor, "missing", lambda name, device, load=True: missing(name, torch.device("cuda"), load=load)
    )
    _multi_tensor._imported.cache_clear()
    yield types.SimpleNamespace(name=request.param, calls=fake.calls, module=fake)
    _multi_tensor._imported.cache_clear()


def test_kernels_get_lists_of_one_dtype_without_empty_ones(fake):
    grads = [random(5), random(0), random(6, 4, seed=1).t(), random(3, dtype=torch.bfloat16), None, random(2, seed=2)]
    norm = total_norm(grads, backend=fake.name)
    assert norm.item() == pytest.approx(norm_of(*[grad for grad in grads if grad is not None]), rel=1e-6, abs=0)
    assert sorted(map(len, fake.calls)) == [1, 3]


def test_kernels_measure_parts_and_tensors_apart(fake):
    parts = [Part([random(5)]), Part([]), Part([random(4, seed=1), random(3, seed=2)])]
    _, norms = total_norm(parts, part_norms=True, backend=fake.name)
    expected = [norm_of(random(5)), 0, norm_of(random(4, seed=1), random(3, seed=2))]
    assert norms.tolist() == pytest.approx(expected, rel=1e-6, abs=0)
    assert len(fake.calls) == 1


def test_kernels_are_never_called_without_tensors(fake):
    assert total_norm([random(0)], backend=fake.name).item() == 0
    assert fake.calls == []


@pytest.mark.parametrize("grad", [random(3, dtype=torch.float64), random(3).to(torch.complex128)])
def test_kernels_refuse_what_they_do_not_take(fake, grad):
    with pytest.raises(ValueError, match=r"torch.float64.*auto"):
        total_norm(grad, backend=fake.name)


def test_kernels_take_fp16_by_themselves_since_there_they_are_exact(fake):
    cuda = torch.device("cuda")
    assert _backends._automatic([], cuda, torch.float16).args == (fake.name,)
    for dtype in (torch.float32, torch.bfloat16):
        assert _backends._automatic([], cuda, dtype) is _torch.sums_of_squares


def test_kernels_that_the_program_has_not_loaded_are_not_loaded_for_it(fake, monkeypatch):
    assert kernels(fake.name, load=False) is fake.module
    monkeypatch.delitem(sys.modules, _multi_tensor._MODULES[fake.name][0])
    assert "not imported" in kernels(fake.name, load=False)


@pytest.mark.parametrize("error", [ImportError, RuntimeError])  # half an installation raises the latter
def test_an_import_that_fails_is_a_reason(monkeypatch, error):
    def fail(name):
        raise error(f"{name} is broken")

    monkeypatch.setattr(_multi_tensor, "import_module", fail)
    _multi_tensor._imported.cache_clear()
    try:
        assert "amp_C is broken" in backends("cuda")["apex"]
        with pytest.raises(ValueError, match="amp_C is broken"):
            total_norm(random(3), backend="apex")
    finally:
        _multi_tensor._imported.cache_clear()


def test_a_library_without_the_kernel_is_not_here(fake, monkeypatch):
    monkeypatch.delattr(FakeKernels, "multi_tensor_l2norm")
    assert "no multi_tensor_l2norm" in backends("cuda")[fake.name]
    with pytest.raises(ValueError, match="no multi_tensor_l2norm"):
        total_norm(random(3), backend=fake.name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("backend", ["auto", "torch", "apex", "transformer_engine"])
def test_on_a_gpu(backend, dtype):
    if reason := backends("cuda").get(backend):
        pytest.skip(reason)
    if dtype == torch.float64 and backend not in ("auto", "torch"):
        pytest.skip("not a dtype of the kernels")
    grads = [random(1000, dtype=dtype).cuda(), random(7, 5, dtype=dtype, seed=1).cuda().t()]
    norm = total_norm(grads, backend=backend)
    assert norm.device == grads[0].device
    assert norm.item() == pytest.approx(norm_of(*grads), rel=1e-6, abs=0)
