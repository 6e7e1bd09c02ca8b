"""An fp32 number as a bf16 number and 16 more bits.

The bf16 number is the fp32 one rounded half away from zero; the remainder is the signed low half of its bits. That is
exact both ways for everything but NaN, infinities, ties and subnormals included. (Rounding half to even could not be
undone: after a tie, 16 bits do not tell from which side it came.)
"""

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to (bf16, int16 remainder). Every NaN becomes the same one, whose remainder is 0."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), _NAN, bits)
    remainder = bits.to(torch.int16)  # its low half, signed
    high = (bits - remainder) >> 16
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 number of which `split` gave these halves."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)
