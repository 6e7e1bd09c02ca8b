from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepstack_gradnorm import Part, local_runs, total_norm

CPU = torch.device("cpu")


@st.composite
def pieces(draw):
    """A buffer, and pieces of it in some order: as they are, as matrices, transposed, twice, some left out."""
    buffer = torch.arange(1.0, draw(st.integers(1, 60)) + 1)
    cuts = sorted(draw(st.sets(st.integers(0, len(buffer)))) | {0, len(buffer)})
    pieces = [buffer[start:end] for start, end in pairwise(cuts)]
    shapes = [lambda x: x, lambda x: x.view(-1, 1), lambda x: x.view(1, -1).t()]
    if len(buffer) % 6 == 0:
        shapes.append(lambda x: x.view(-1, 2).t() if len(x) % 2 == 0 else x)
    chosen = draw(st.lists(st.sampled_from(pieces), max_size=12))
    return buffer, [draw(st.sampled_from(shapes))(piece) for piece in chosen]


@settings(derandomize=True, deadline=None)
@given(pieces())
def test_runs_have_every_element_once(drawn):
    buffer, tensors = drawn
    covered = {int(x) for tensor in tensors for x in tensor.flatten()}
    runs = local_runs(tensors).get((CPU, torch.float32), [])
    assert total_norm(tensors).item() == pytest.approx(sum(x * x for x in covered) ** 0.5, rel=1e-6)
    for run in runs:
        run.neg_()
    assert {-int(x) for x in buffer if x < 0} == covered


def test_neighbours_are_joined_in_any_order():
    buffer = torch.zeros(12)
    (run,) = local_runs([buffer[8:], buffer[:3], buffer[3:8].view(5, 1)])[CPU, torch.float32]
    assert (run.data_ptr(), run.shape) == (buffer.data_ptr(), (12,))


def test_buffers_that_touch_in_memory_are_joined_each_by_itself():
    memory = torch.zeros(40)
    buffers = [torch.from_dlpack(part) for part in memory.split(20)]  # two storages, one behind the other
    tensors = [part for buffer in buffers for part in buffer.split(2)]
    assert [run.numel() for run in local_runs(tensors)[CPU, torch.float32]] == [20, 20]


MANY = 12  # enough to be asked all at once


@pytest.mark.parametrize(
    "change", ["data", "set_", "resize_", "transpose", "died", "dtype", "repeated", "empty", "sparse"]
)
def test_what_has_changed_between_two_calls_is_measured_as_it_is(change):
    buffer = torch.arange(1.0, 4 * MANY + 1)
    tensors = [*buffer.split(4)]
    assert total_norm(tensors).item() == pytest.approx(buffer.norm().item())
    if change == "data":
        tensors[3].data = torch.full((4,), 7.0)
    elif change == "set_":
        tensors[3].set_(torch.full((2,), 7.0))
    elif change == "resize_":
        tensors[3].resize_(2)
    elif change == "transpose":
        tensors[3].as_strided_((2,), (2,))
    elif change == "died":
        tensors.pop(3)
        tensors.insert(3, torch.full((4,), 7.0))
    elif change == "dtype":
        tensors[3] = tensors[3].view(torch.bfloat16)
    elif change == "repeated":
        tensors[3] = tensors[4].view(2, 2)
    elif change == "empty":
        tensors[3] = tensors[3][:0]
    else:
        tensors[3] = tensors[3].to_sparse()
    distinct = [tensor for tensor in tensors if change != "repeated" or tensor is not tensors[3]]
    flat = torch.cat([tensor.to_dense().double().flatten() for tensor in distinct])
    assert total_norm(tensors).item() == pytest.approx(flat.norm().item(), rel=1e-6)
    runs = local_runs(tensors)
    assert sum(run.numel() for several in runs.values() for run in several) == len(flat)


def test_many_tensors_twice_count_once():
    buffer = torch.ones(4 * MANY)
    tensors = [*buffer.split(4)]
    assert total_norm([*tensors, *tensors]).item() == pytest.approx(buffer.norm().item())
    assert total_norm([Part(tensors), Part(tensors), *tensors]).item() == pytest.approx(buffer.norm().item())
    assert total_norm([buffer[:4].view(2, 2), *tensors]).item() == pytest.approx(buffer.norm().item())


def test_of_many_lazy_negatives_the_memory_is_given():
    number = torch.ones(4 * MANY, dtype=torch.complex64)
    tensors = [*number.conj().imag.split(4)]
    assert all(map(torch.Tensor.is_neg, tensors))
    assert not any(map(torch.Tensor.is_neg, local_runs(tensors)[CPU, torch.float32]))


def test_a_gap_another_storage_device_or_dtype_ends_a_run():
    one, other = torch.zeros(10), torch.zeros(10)
    tensors = [one[4:7], one[:4], one[8:], other[:5], other[5:].view(5, 1)]
    places = local_runs([*tensors, torch.zeros(3, dtype=torch.float16), torch.zeros(2, device="meta")])
    assert sorted(run.numel() for run in places[CPU, torch.float32]) == [2, 7, 10]
    assert [run.numel() for run in places[CPU, torch.float16]] == [3]
    assert [run.numel() for run in places[torch.device("meta"), torch.float32]] == [2]


def test_what_is_not_dense_is_not_joined():
    buffer = torch.zeros(12)
    runs = local_runs([buffer[:6].view(2, 3)[:, :2], buffer[6:]])[CPU, torch.float32]
    assert sorted(run.numel() for run in runs) == [4, 6]


def test_a_storage_that_knows_only_of_a_part_is_not_exceeded():
    buffer = torch.zeros(8)
    front = torch.from_dlpack(buffer[:4])  # its storage ends where the tensor does
    behind = torch.from_dlpack(buffer)[4:]
    runs = local_runs([front, behind])[CPU, torch.float32]
    assert sum(run.numel() for run in runs) == 8


def test_runs_are_views_of_every_kind_of_tensor():
    buffer = torch.zeros(10)
    sparse = torch.sparse_coo_tensor([[0, 0]], torch.zeros(2), (3,), check_invariants=True)
    grads = [buffer[:3], Part([buffer[3:6].view(3, 1)]), buffer.view(2, 5)[1:, 1:].expand(1, 4), None, sparse]
    for runs in local_runs(grads).values():
        torch._foreach_add_(runs, 1)
    assert buffer.tolist() == [1] * 10
    assert sparse.to_dense().tolist() == [2, 0, 0]


def test_tensors_without_memory_are_counted_by_what_they_are():
    one, other = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert [len(runs) for runs in local_runs([one, other, one]).values()] == [2]


def test_views_that_start_at_one_place_are_different_tensors():
    buffer = torch.ones(8)
    grads = [buffer, buffer[::2], buffer[:4], buffer[::2], buffer[:4]]
    assert total_norm(grads).item() == 4  # 8 and 4 and 4 ones


def test_memory_that_holds_the_conjugate_counts_as_the_number():
    number = torch.tensor([3 + 4j])
    assert total_norm([number.conj()]).item() == 5
    assert total_norm([number.conj().imag]).item() == 4
