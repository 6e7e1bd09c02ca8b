"""Norms of random mixes of dtypes, shapes, views and layouts, beside a reference in fp64."""

import math
import random

import pytest
import torch

from stepstack_gradnorm import Part, total_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
TYPES = [0, 0.5, 1, 2, 2.5, 6, 9, math.inf]
VIEWS = [
    lambda x: x,
    lambda x: x.t() if x.dim() == 2 else x,
    lambda x: x[::2],
    lambda x: x[..., 1:],
    lambda x: x.unsqueeze(-1).expand(*x.shape, 3),
    lambda x: x.conj(),
    torch._neg_view,
    lambda x: x[:0],
    lambda x: x.to_sparse(),
]


def gradient(chance, generator):
    shape = [chance.randint(1, 9) for _ in range(chance.randint(1, 3))]
    dtype, size = chance.choice(DTYPES), 10.0 ** chance.randint(-3, 3)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * size
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
    return chance.choice(VIEWS)(values.to(dtype))


def reference(grads, norm_type):
    dense = [grad.to_dense() if grad.layout is not torch.strided else grad for grad in grads]
    magnitudes = [grad.to(torch.complex128).flatten().abs() for grad in dense]
    return torch.linalg.vector_norm(torch.cat(magnitudes), norm_type).item() if magnitudes else 0.0


@pytest.mark.parametrize("seed", range(60))
def test_a_random_mix_has_the_norm_of_one_vector(seed):
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    grads = [gradient(chance, generator) for _ in range(chance.randint(0, 8))]
    norm_type = chance.choice(TYPES)
    is_wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    given = [*grads, *chance.sample(grads, len(grads) // 2), Part(grads[:2]), None]
    norm = total_norm(given, norm_type)
    assert norm.dtype == (torch.float64 if is_wide else torch.float32)
    assert norm.item() == pytest.approx(reference(grads, norm_type), rel=1e-12 if is_wide else 1e-6, abs=0)
