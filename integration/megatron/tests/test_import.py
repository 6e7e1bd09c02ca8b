import pytest
import torch

from stepstack_megatron import plug


def test_what_is_no_megatron_optimizer_is_refused_by_name_where_there_is_no_engine():
    with pytest.raises(TypeError, match=r"torch\.optim\.adamw\.AdamW is not an optimizer that can be plugged"):
        plug(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))
