import sys
import types

import pytest
import torch

from stepstack_clip import _scale, multiply_
from stepstack_gradnorm import _multi_tensor

FACTOR = torch.tensor(1 / 3)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class FakeKernels(types.ModuleType):
    """The contract of Apex's and Transformer Engine's scale kernels, on tensors of any device."""

    def __init__(self):
        super().__init__("fake_kernels")
        self.calls = []

    def multi_tensor_scale(self, chunk_size, noop_flag, tensor_lists, scale, /):
        assert type(scale) is float
        self._scale(chunk_size, noop_flag, tensor_lists, scale)

    def multi_tensor_scale_tensor(self, chunk_size, noop_flag, tensor_lists, scale, /):
        assert (scale.dtype, scale.shape) == (torch.float32, (1,))
        self._scale(chunk_size, noop_flag, tensor_lists, scale)

    def _scale(self, chunk_size, noop_flag, tensor_lists, scale):
        sources, targets = tensor_lists
        assert chunk_size == 65536
        assert (noop_flag.dtype, noop_flag.tolist()) == (torch.int32, [0])
        assert all(tensor.dtype == sources[0].dtype in DTYPES for tensor in sources)
        assert all(tensor.numel() and tensor.is_contiguous() for tensor in sources)
        self.calls.append(len(sources))
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.float() * scale)


@pytest.fixture(params=["apex", "transformer_engine"])
def fake(request, monkeypatch):
    """A backend whose kernels are a fake that works on the CPU."""
    module = FakeKernels()
    for name in _multi_tensor._MODULES[request.param]:
        monkeypatch.setitem(sys.modules, name, module)
    kernel = _scale._kernel
    monkeypatch.setattr(
        _scale, "_kernel", lambda name, device, *rest, load: kernel(name, torch.device("cuda"), *rest, load=load)
    )
    if request.param == "apex":
        monkeypatch.delattr(FakeKernels, "multi_tensor_scale_tensor")
    _multi_tensor._imported.cache_clear()
    yield types.SimpleNamespace(name=request.param, calls=module.calls)
    _multi_tensor._imported.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "forced"])
def test_kernels_multiply_by_a_number(fake, backend):
    grads = [random(5), random(6, 4, seed=1)[:, 1:], random(0), random(3, dtype=torch.bfloat16)]
    expected = [(grad.double() * 0.3).to(grad.dtype) for grad in grads]
    multiply_(grads, 0.3, backend=fake.name if backend == "forced" else "auto")
    for grad, value in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, value)
    assert fake.calls == [1, 1]


def test_kernels_multiply_by_a_tensor_if_they_read_it_on_the_device(fake):
    grad = random(5)
    if fake.name == "apex":
        with pytest.raises(ValueError, match=r"no multi_tensor_scale_tensor.*auto"):
            multiply_([grad], FACTOR, backend="apex")
    else:
        multiply_([grad], FACTOR, backend=fake.name)
        assert fake.calls == [1]
        torch.testing.assert_close(grad, random(5) * FACTOR)


def test_a_backend_that_can_not_touches_nothing(fake):
    grads = [random(5), random(3, dtype=torch.float64)]
    with pytest.raises(ValueError, match="float64"):
        multiply_(grads, 0.5, backend=fake.name)
    assert torch.equal(grads[0], random(5))


def test_dtypes_that_kernels_do_not_take_are_multiplied_by_torch(fake):
    grads = [random(5, dtype=torch.float64), random(3, dtype=torch.complex64)]
    multiply_(grads, 0.5)
    assert fake.calls == []
    assert torch.equal(grads[0], random(5, dtype=torch.float64) * 0.5)


@pytest.mark.parametrize("backend", ["apex", "transformer_engine"])
def test_kernels_that_are_not_here_are_refused(backend):
    with pytest.raises(ValueError, match="cuda"):
        multiply_([random(3)], 0.5, backend=backend)


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ValueError, match="fastest"):
        multiply_([], 0.5, backend="fastest")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("factor", [FACTOR, 1 / 3])
def test_on_a_gpu(dtype, factor):
    grads = [random(1000).to(dtype), random(7, 5, seed=1).to(dtype).t()]
    on_gpu = [grad.cuda() for grad in grads]
    multiply_(grads, factor)
    multiply_(on_gpu, factor)
    assert all(torch.equal(grad.cpu().double(), other.double()) for grad, other in zip(on_gpu, grads, strict=True))
