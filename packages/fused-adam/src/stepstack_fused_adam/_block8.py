"""Moments in 8 bits: one code for each element, one fp32 scale for each block of 64.

The scale is the largest magnitude of the block. A first moment is stored as the square root of its share of the scale,
signed; a second moment as the fourth root, and never as zero unless it is zero. So the smallest first moment that is
not zero is 6e-5 of the largest in its block, the smallest second moment 2e-10 of it.

A second moment moves by a thousandth a step, less than a code: rounded to the nearest one it would stand still. It is
rounded up or down instead, in proportion, by a number made of its own low bits. That needs no random state, and does
not depend on how the parameter is cut. Both codes leave what they have decoded as it is.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
_LARGEST_SIGNED = 127
_LARGEST = 255
_NEAR = 2e-3  # how far rounding errors can take a decoded number from its code


def blocks(numel: int) -> int:
    """How many scales belong to so many elements."""
    return -(-numel // BLOCK)


def encode_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """[n] to fp32 ([n] exact in int8, [blocks(n)])."""
    share, scale = _shares(m.float())
    codes = (share.abs().sqrt() * _LARGEST_SIGNED).round() * share.sign()
    return _flat(codes, m), scale


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    """The other way."""
    root = _blocked(codes.to(scale.dtype)) / _LARGEST_SIGNED
    return _flat(root * root.abs() * scale[:, None], codes)


def encode_second(v: Tensor) -> tuple[Tensor, Tensor]:
    """[n], none negative, to fp32 ([n] exact in uint8, [blocks(n)])."""
    v = v.float()
    share, scale = _shares(v)
    exact = _flat(share.sqrt().sqrt() * _LARGEST, v)
    nearest = exact.round()
    codes = torch.where((exact - nearest).abs() < _NEAR, nearest, (exact + _dither(v)).floor())
    return torch.where(v > 0, codes.clamp(1, _LARGEST), 0), scale


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    """The other way."""
    root = _blocked(codes.to(scale.dtype)) / _LARGEST
    square = root * root
    return _flat(square * square * scale[:, None], codes)


def _shares(x: Tensor) -> tuple[Tensor, Tensor]:
    blocked = _blocked(x)
    scale = blocked.abs().amax(1)
    return blocked / torch.where(scale == 0, 1, scale)[:, None], scale


def _blocked(x: Tensor) -> Tensor:
    if x.numel() % BLOCK:
        x = pad(x, (0, -x.numel() % BLOCK))
    return x.view(-1, BLOCK)


def _flat(blocked: Tensor, like: Tensor) -> Tensor:
    return blocked.view(-1)[: like.numel()]


def _dither(v: Tensor) -> Tensor:
    """Numbers in [0, 1) from the bits of fp32 ones: the high half of a product with 2^32 / golden ratio."""
    return ((v.view(torch.int32) * -1640531527) >> 9 & 0x7FFF).to(v.dtype) / 0x8000
