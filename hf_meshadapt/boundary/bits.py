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
        values: integers (N, columns), column values in [0, 2**bits) of their group.
        groups: widths of the columns.

    Returns:
        uint8 (N, `packed_bytes(groups)`), least significant bit first, the last byte padded with zeros.
    """
    if whole_bytes(groups):
        ((bits, count),) = groups
        parts = values.to(torch.uint8).reshape(len(values), count * bits // 8, 8 // bits)
        packed = parts[:, :, 0].clone()
        for place in range(1, 8 // bits):
            packed |= parts[:, :, place] << (place * bits)
        return packed
    stream = torch.zeros(len(values), packed_bytes(groups) * 8, dtype=torch.uint8, device=values.device)
    column = start = 0
    for bits, count in groups:
        part = values[:, column : column + count].to(_narrow(bits))
        plane = stream[:, start : start + bits * count].view(len(values), count, bits)
        for bit in range(bits):
            plane[:, :, bit] = (part >> bit) & 1
        column, start = column + count, start + bits * count
    bytes_of_bits = stream.view(len(values), packed_bytes(groups), 8)
    packed = bytes_of_bits[:, :, 0].clone()
    for bit in range(1, 8):
        packed |= bytes_of_bits[:, :, bit] << bit
    return packed


def unpack(packed: Tensor, groups: Groups) -> Tensor:
    """The integers that `pack` was given: int64 (N, columns)."""
    if whole_bytes(groups):
        ((bits, count),) = groups
        places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed[:, :, None] >> places) & (2**bits - 1)).view(len(packed), count).long()
    stream = torch.empty(*packed.shape, 8, dtype=torch.uint8, device=packed.device)
    for bit in range(8):
        stream[:, :, bit] = (packed >> bit) & 1
    stream = stream.flatten(1)
    columns, start = [], 0
    for bits, count in groups:
        plane = stream[:, start : start + bits * count].view(len(packed), count, bits)
        part = plane[:, :, 0].to(_narrow(bits))
        for bit in range(1, bits):
            part = part | (plane[:, :, bit].to(part.dtype) << bit)
        columns.append(part.long())
        start += bits * count
    return torch.cat(columns, dim=1) if columns else packed.new_zeros((len(packed), 0), dtype=torch.int64)


def whole_bytes(groups: Groups) -> bool:
    """Whether all values are equally wide and every byte holds a whole number of them: bits need not be looked at one
    by one."""
    return len(groups) == 1 and 8 % groups[0][0] == 0 and groups[0][0] * groups[0][1] % 8 == 0


def _narrow(bits: int) -> torch.dtype:
    """A small integer type for values of so many bits: shifts are bound by memory traffic."""
    return torch.uint8 if bits <= 8 else torch.int32


def read_bfloat16(packed: Tensor, start: int, count: int) -> Tensor:
    """The bfloat16 numbers whose bytes stand from byte `start` on in each row of uint8 packed: (N, count) float32."""
    # A copy: one row of a larger buffer may be neither aligned nor strided for two bytes.
    part = packed[:, start : start + 2 * count].clone(memory_format=torch.contiguous_format)
    return part.flatten().view(torch.bfloat16).view(len(packed), count).float()
