import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from stepstack_testing import HostSyncs, Operations, on_ranks

READS = {
    "item": lambda x: x.item(),
    "float": float,
    "bool": bool,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "array": np.asarray,
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_tripwire_sees(read):
    x = torch.ones(())
    with HostSyncs() as syncs:
        read(x)
    assert syncs
    assert "test_operations.py" in syncs.where[0]


def test_the_tripwire_is_quiet_where_nothing_waits():
    x = torch.ones(3)
    with HostSyncs() as syncs:
        torch.where(x.sum() > 1, x, 0).add_(1)
    assert syncs == []


def test_the_tripwire_is_gone_afterwards():
    with HostSyncs() as syncs:
        pass
    torch.ones(()).tolist()
    assert syncs == []


def test_operations_and_collectives_are_counted_below_dtensors_too():
    def count(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        with Operations() as operations, HostSyncs() as syncs:
            dist.all_reduce((x + 1).to_local())
            x.sum().full_tensor().item()
        return dict(operations), operations.collectives(), list(syncs)

    for operations, collectives, syncs in on_ranks(2, count):
        assert operations["aten.add"] == 1
        assert collectives["c10d.allreduce_"] == 1
        assert "aten._local_scalar_dense" in syncs
