"""An interval of memory as boxes of a tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stepstack_sharded_states._boxes import boxes


@st.composite
def intervals(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    order = draw(st.permutations(range(len(shape))))
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel))
    return shape, order, (start, draw(st.integers(start, numel)))


def lying(shape, order):
    """A tensor whose elements are their places in memory."""
    numbers = torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order])
    return numbers.permute([order.index(dim) for dim in range(len(shape))])


def part(tensor, box):
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@given(intervals())
def test_boxes_are_the_interval_in_order(case):
    shape, order, interval = case
    tensor = lying(shape, order)
    covered = []
    for box in boxes(interval, shape, tensor.stride()):
        elements = part(tensor, box).flatten().sort().values.tolist()
        assert elements == list(range(box.start, box.stop))
        covered += elements
    assert covered == list(range(*interval))


@given(intervals())
def test_there_are_few(case):
    shape, order, interval = case
    assert len(boxes(interval, shape, lying(shape, order).stride())) <= max(1, 2 * len(shape) - 1)


@given(intervals(), st.integers(1, 20))
def test_a_limit_holds_and_changes_nothing_else(case, limit):
    shape, order, interval = case
    tensor = lying(shape, order)
    found = boxes(interval, shape, tensor.stride(), limit)
    assert all(box.stop - box.start <= limit for box in found)
    covered = [element for box in found for element in part(tensor, box).flatten().sort().values.tolist()]
    assert covered == list(range(*interval))


def test_dims_of_length_one_may_have_any_stride():
    tensor = torch.zeros(4, 1, 3).as_strided((4, 1, 3), (3, 1, 1))
    assert [box.sizes for box in boxes((3, 9), tensor.shape, tensor.stride())] == [(2, 1, 3)]


def test_a_number_is_one_box():
    assert [(box.offsets, box.sizes) for box in boxes((0, 1), (), ())] == [((), ())]
