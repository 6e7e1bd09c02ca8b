"""Where numbers meet, told of devices that are not here."""

import torch

from stepstack_gradnorm._plan import home


def test_numbers_meet_where_no_copy_to_the_cpu_is_waited_for():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    assert home([cpu, cuda, cpu]) == cuda
    assert home([cpu]) == cpu


def test_a_rank_without_gradients_is_where_the_others_are(monkeypatch):
    assert home([]) == torch.device("cpu")
    accelerator = torch.device("cuda", 3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert home([]) == accelerator
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # it trains on the CPU of a machine with GPUs
    assert home([]) == torch.device("cpu")
