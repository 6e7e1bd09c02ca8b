"""An fp32 number as a bf16 number and two more bytes.

The bf16 number is the fp32 one rounded half away from zero; the remainder is what is missing in units of the last fp32
place: the low half of the bits, signed. That is exact both ways for everything but NaN, infinities, ties and subnormals
included. (Rounding half to even could not be undone: after a tie, 16 bits do not tell from which side it came.)

The bytes of the remainder are apart, the high one signed: compilers vectorise bytes, but not 16-bit integers.
"""

import torch
from torch import Tensor


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 to fp32 numbers that are exact in (bf16, int8, uint8). NaN stays NaN, with a remainder of 0."""
    bits = torch.where(master != master, torch.nan, master).view(torch.int32)  # one NaN for all, its low half is 0
    rounded = (bits + 0x8000) & -0x10000
    remainder = bits - rounded
    return rounded.view(torch.float32), (remainder >> 8).to(torch.float32), (remainder & 0xFF).to(torch.float32)


def join(param: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """The fp32 number of which `split` gave these parts."""
    remainder = (high.to(torch.int32) << 8) + low.to(torch.int32)
    return (param.to(torch.float32).view(torch.int32) + remainder).view(torch.float32)
