import pytest
import torch

from stepstack_gradnorm import _native, total_norm
from stepstack_testing import on_ranks


@pytest.mark.skipif(_native.missing(torch.device("cpu")) is not None, reason="no library here")
@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_may_be_forked_after_a_norm_was_measured_by_threads(monkeypatch, threads):
    monkeypatch.setattr(_native, "_WORTH_A_THREAD", 2**17)
    before = torch.get_num_threads()
    grad = torch.ones(2**20)

    def measured(*rank):
        torch.set_num_threads(threads)
        return total_norm(grad, backend="native").item()

    try:
        assert measured() == 1024
        assert on_ranks(2, measured, timeout=1.0) == [1024, 1024]
    finally:
        torch.set_num_threads(before)
