"""Groups that are not there: what the plan asks of a group, without ranks."""

import pytest
import torch
import torch.distributed as dist

from stepstack_gradnorm import Part, tensor_norms, total_norm


class Done(dist._Work):
    def wait(self, timeout=None):
        return True


class RefusesCpu(dist.ProcessGroup):
    """Of two ranks; communicates on the meta device alone, where numbers have a place but no value."""

    group_name = "refuses_cpu"

    def __init__(self, store, rank, size, timeout):
        super().__init__(0, 2)
        self.packed = []

    def allreduce(self, tensors, options=None):
        (tensor,) = tensors
        if tensor.device.type != "meta":
            raise RuntimeError(f"no backend for {tensor.device}")
        self.packed.append((tuple(tensor.shape), tensor.dtype))
        return Done()


@pytest.fixture
def group():
    if not hasattr(dist.Backend, "REFUSES_CPU"):
        dist.Backend.register_backend("refuses_cpu", RefusesCpu, devices=["meta"])
    dist.init_process_group("refuses_cpu", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("norm_type", [0, 1, 2, 9, float("inf")])
def test_numbers_of_gradients_on_the_cpu_travel_on_the_device_of_the_group(group, norm_type):
    norm = total_norm([Part([torch.ones(3), torch.ones(2)], group), torch.ones(4)], norm_type)
    assert norm.device.type == "meta"
    assert len(group.packed) == 1


def test_a_rank_without_gradients_sends_on_the_device_of_the_group(group):
    total_norm(Part([], group))
    assert group.packed == [((1, 3), torch.float64)]


def test_norms_are_agreed_on_the_device_of_the_group(group):
    assert total_norm(torch.ones(3), agree_over=group).device.type == "meta"
    assert len(group.packed) == 1


def test_one_number_for_each_tensor_travels_in_one_reduction(group):
    tensor_norms({index: Part([torch.ones(1)], group) for index in range(5)})
    assert group.packed == [((5, 3), torch.float64)]
