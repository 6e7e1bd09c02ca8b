"""The numbers of a step: scale, norm, divisor; and that norms are compared once."""

from types import SimpleNamespace

import pytest
import torch

from stepstack_deepspeed._plug_seam import Seam, divide_, joined
from stepstack_testing import HostSyncs


@pytest.fixture
def seam():
    optimizer = SimpleNamespace(custom_loss_scaler=False, loss_scaler=SimpleNamespace(cur_scale=8.0))
    return Seam(SimpleNamespace(optimizer=optimizer), norm=True, clip=True, inner=None)


def test_the_scale_of_backward_divides_though_it_has_grown_since(seam):
    assert seam.remember_scale() == 8.0
    seam.optimizer.loss_scaler.cur_scale = 16.0
    seam.begin()
    with HostSyncs() as syncs:
        norm = seam.unscaled(torch.tensor(32.0))
        divisor = seam.divisor(1.0)
    assert syncs == []
    assert norm == 4
    assert divisor.item() == pytest.approx(8 * 4, rel=1e-6)
    assert seam.divisor(1.0) is divisor
    seam.end()
    assert seam.optimizer._global_grad_norm is norm
    assert seam.remember_scale() == 16.0


@pytest.mark.parametrize(("max_norm", "expected"), [(0.0, 8.0), (100.0, 8.0), (2.0, 16.0)])
def test_the_divisor_is_scale_by_clip_coefficient(seam, max_norm, expected):
    seam.begin()
    seam.unscaled(torch.tensor(32.0))
    assert float(seam.divisor(max_norm)) == pytest.approx(expected, rel=1e-6)


def test_a_norm_of_deepspeed_divides_as_well(seam):
    seam.begin()
    assert float(seam.divisor(2.0, torch.tensor(32.0, dtype=torch.float64))) == pytest.approx(16.0, rel=1e-6)
    seam.end()
    assert not hasattr(seam.optimizer, "_global_grad_norm")


def test_norms_are_compared_once(seam):
    asked = []
    seam.begin()
    for theirs in (float("inf"), -1.0, 32.001):
        seam.check(torch.tensor(32.0), lambda theirs=theirs: asked.append(theirs) or theirs)
    with HostSyncs() as syncs:
        seam.check(torch.tensor(32.0), lambda: asked.append("again"))
    assert syncs == []
    assert asked == [float("inf"), -1.0, 32.001]


@pytest.mark.parametrize("ours", [31.0, float("inf"), float("nan")])
def test_norms_that_differ_are_an_error(seam, ours):
    seam.begin()
    with pytest.raises(RuntimeError, match=r"DeepSpeed measures a gradient norm of 32\.0, we of .*norm=False"):
        seam.check(torch.tensor(ours), lambda: torch.tensor(32.0))


def test_nothing_is_touched_where_there_is_nothing_to_divide_by():
    grad = torch.tensor([3.0])
    divide_([grad], 1.0)
    assert grad._version == 0
    divide_([grad], torch.tensor(2.0))
    assert grad == 1.5


def test_neighbours_are_joined_without_a_copy():
    buffer = torch.arange(6.0)
    flat = joined([buffer[:2], buffer[2:3], buffer[3:]])
    assert flat.data_ptr() == buffer.data_ptr()
    assert torch.equal(flat, buffer)


@pytest.mark.parametrize("order", [[slice(2, 4), slice(0, 2)], [slice(0, 1), slice(2, 4)]], ids=str)
def test_others_are_joined_in_their_order(order):
    buffer = torch.arange(4.0)
    assert torch.equal(joined(buffer[piece] for piece in order), torch.cat([buffer[piece] for piece in order]))
