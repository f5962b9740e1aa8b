"""Blockwise quantisation of differences: symmetric, `bits` per value and one bfloat16 scale per block.

    scale = max |x| / (2**(bits-1) - 1),   q = round(x / scale),   x^ = q scale
    |x - x^| <= scale / 2 + 2**-8 max |x|                                          (the second term rounds the scale)

`restore` is arithmetic that every device and thread count does alike: both ends of the link hold the same bits.
Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), section 2.1, with a linear
code in place of theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 64
SCALE_BYTES = 2
CODE_BITS = (8, 4)


def code_bytes(num_blocks: int, bits: int) -> int:
    """Bytes of so many blocks, scales included."""
    return num_blocks * (BLOCK_SIZE * bits // 8 + SCALE_BYTES)


def quantise(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes finite values.

    Args:
        values: (blocks, BLOCK_SIZE) float32.
        bits: one of `CODE_BITS`.

    Returns:
        codes uint8 (blocks, BLOCK_SIZE * bits / 8), scales bfloat16 (blocks,).
    """
    top = 2 ** (bits - 1) - 1
    scales = (values.abs().amax(1) / top).to(torch.bfloat16)
    divisors = scales.float().masked_fill_(scales == 0, 1.0).unsqueeze(1)
    levels = (values / divisors).round_().clamp_(-top, top).masked_fill_((scales == 0).unsqueeze(1), 0.0)
    codes = (levels + top).to(torch.uint8)
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes, scales


def restore(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """What `quantise` coded: float32 (blocks, BLOCK_SIZE)."""
    top = 2 ** (bits - 1) - 1
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    return (codes.float() - top) * scales.float().unsqueeze(1)
