"""What is given twice counts once, as whatever view: by where it lies in memory, not by object."""

import math
import warnings

import pytest
import torch

from stepstack_gradnorm import local_runs, total_norm

TYPES = [0, 0.5, 1, 2, 3, 9, math.inf]


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def wide(tensor):
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense if dense.is_complex() else dense.double()


COMPLEX = torch.complex(random(4, 3), random(4, 3).flip(0))
SLICE = random(3, 4)[:, ::2]
SPARSE = random(4, 4).tril()
with warnings.catch_warnings():  # torch calls CSR a beta, once
    warnings.simplefilter("ignore")
    SPARSE.to_sparse_csr()
CASES = {
    "views of one shape and another": [random(6), lambda x: x.view(2, 3), lambda x: x.view(3, 2).t()],
    "a slice": [SLICE, lambda x: x.t(), lambda x: x.unsqueeze(0), lambda x: x[:, :]],
    "fp8": [random(5, 4, dtype=torch.float8_e4m3fn), lambda x: x.t(), lambda x: x.view(-1)],
    "fp64": [random(5, 4, dtype=torch.float64), lambda x: x.t(), lambda x: x.view(-1)],
    "a lazy negative": [random(5), torch._neg_view, lambda x: x.view(5, 1)],
    "a conjugate": [COMPLEX, torch.conj, lambda x: x.mT, lambda x: x.mH],
    "a slice of a conjugate": [COMPLEX.conj()[:, 1:], lambda x: x.conj(), lambda x: x.t()],
    "complex numbers as pairs": [COMPLEX, torch.view_as_real],
    "an expanded tensor": [random(3, 1).expand(3, 4), lambda x: x.t(), lambda x: x.unsqueeze(1)],
    "COO": [SPARSE.to_sparse(), torch.Tensor.detach, lambda x: x._values()],
    "CSR": [SPARSE.to_sparse_csr(), torch.Tensor.detach, torch.Tensor.values],
    "CSC": [SPARSE.to_sparse_csc(), torch.Tensor.detach],
    "BSR": [SPARSE.to_sparse_bsr((2, 2)), torch.Tensor.detach],
}


@pytest.mark.parametrize("norm_type", TYPES)
@pytest.mark.parametrize(("tensor", "views"), [(tensor, views) for tensor, *views in CASES.values()], ids=CASES)
def test_the_same_elements_count_once(tensor, views, norm_type):
    expected = torch.linalg.vector_norm(wide(tensor).flatten(), norm_type).item()
    for given in ([tensor], [tensor, tensor], [tensor, *(view(tensor) for view in views)]):
        assert total_norm(given, norm_type).item() == pytest.approx(expected, rel=1e-6, abs=0)
        assert len([run for runs in local_runs(given).values() for run in runs]) == 1


def test_an_expanded_tensor_and_what_it_expands_are_two():
    base = torch.tensor([3.0, 4.0])
    assert total_norm([base.expand(3, 2)]).item() == pytest.approx(75**0.5)
    assert total_norm([base.expand(3, 2), base]).item() == 10
    assert len([run for runs in local_runs([base.expand(3, 2), base]).values() for run in runs]) == 1


def test_views_that_overlap_in_part_are_two():
    number = torch.tensor([3 + 4j])
    assert total_norm([number, number.real]).item() == pytest.approx(34**0.5)
    assert total_norm([torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])[:1]]).item() == pytest.approx(34**0.5)


def test_a_layout_that_nobody_can_look_into_is_refused():
    with pytest.raises(TypeError, match=r"torch\._mkldnn.*to_dense"):
        total_norm([torch.ones(2, 2).to_mkldnn()])
