"""Packs small unsigned integers of different widths into bytes: pure tensor functions, same bytes on every device."""

from __future__ import annotations

import torch
from torch import Tensor

# (bits per value, number of values), in the order of the columns; widths 1 to 16.
Groups = tuple[tuple[int, int], ...]


def packed_bytes(groups: Groups) -> int:
    """Bytes of one packed row."""
    return -(-sum(bits * count for bits, count in groups) // 8)


def pack(values: Tensor, groups: Groups) -> Tensor:
    """Packs integers, row by row.

    Args:
        values: int64 (N, columns), column values in [0, 2**bits) of their group.
        groups: widths of the columns.

    Returns:
        uint8 (N, `packed_bytes(groups)`), least significant bit first, the last byte padded with zeros.
    """
    planes, start = [], 0
    for bits, count in groups:
        shifts = torch.arange(bits, device=values.device)
        planes.append(((values[:, start : start + count, None] >> shifts) & 1).flatten(1).to(torch.uint8))
        start += count
    stream = torch.cat(planes, dim=1) if planes else values.new_zeros((len(values), 0), dtype=torch.uint8)
    row_bytes = packed_bytes(groups)
    stream = torch.nn.functional.pad(stream, (0, row_bytes * 8 - stream.shape[1]))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=values.device)
    return (stream.view(len(values), row_bytes, 8) * weights).sum(2, dtype=torch.uint8)


def unpack(packed: Tensor, groups: Groups) -> Tensor:
    """The integers that `pack` was given: int64 (N, columns)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = ((packed.unsqueeze(2) >> shifts) & 1).flatten(1)
    columns, start = [], 0
    for bits, count in groups:
        weights = 1 << torch.arange(bits, device=packed.device)
        plane = stream[:, start : start + bits * count].view(len(packed), count, bits)
        columns.append((plane * weights).sum(2))
        start += bits * count
    return torch.cat(columns, dim=1) if columns else packed.new_zeros((len(packed), 0), dtype=torch.int64)


def read_bfloat16(packed: Tensor, start: int, count: int) -> Tensor:
    """The bfloat16 numbers whose bytes stand from byte `start` on in each row of uint8 packed: (N, count) float32."""
    # A copy: one row of a larger buffer may be neither aligned nor strided for two bytes.
    part = packed[:, start : start + 2 * count].clone(memory_format=torch.contiguous_format)
    return part.flatten().view(torch.bfloat16).view(len(packed), count).float()
