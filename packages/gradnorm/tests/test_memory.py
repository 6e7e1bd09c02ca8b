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
