"""Copies between devices."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. Waits for a copy to the CPU only, which could be read there before it has arrived."""
    return tensor.to(device, non_blocking=device.type != "cpu")
