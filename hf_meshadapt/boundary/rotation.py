"""A fixed rotation that spreads every entry of a token over all of them: orthogonal, cheap, the same on all devices.

    R = (C_m ⊗ W_n) diag(s) / sqrt(H)       H = m n, n the largest power of two that divides H

W_n is the Walsh-Hadamard matrix in Sylvester's order, C_m the Hartley matrix cos + sin (2 pi j k / m) of the odd
part, s random signs from the PRF. Both matrices are symmetric with their size times the identity as their square.

Sources: random signs before a Hadamard transform, Ailon & Chazelle, The fast Johnson-Lindenstrauss transform (2009);
Hartley's transform, Bracewell, Discrete Hartley transform (1983), where a size has no Hadamard matrix.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .prf import boundary_key, kept_indices

_SIGNS_KEY, _ORDER_KEY = boundary_key(0, 0), boundary_key(0, 1)


def walsh_hadamard(values: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim, orthonormal and its own inverse.

    Args:
        values: (..., n) float, n a power of two.

    Returns:
        Tensor like values.
    """
    size = values.shape[-1]
    assert size & (size - 1) == 0, values.shape
    # As products with two small matrices, W_(ab) = W_a ⊗ W_b: faster than sums and differences of pairs.
    right = 1 << (size.bit_length() // 2)
    left = size // right
    blocks = values.reshape(*values.shape[:-1], left, right) @ _hadamard_on(values.device, values.dtype, right)
    return (_hadamard_on(values.device, values.dtype, left) @ blocks).reshape(values.shape)


@functools.cache
def _hadamard_on(device: torch.device, dtype: torch.dtype, size: int) -> Tensor:
    return hadamard(size).to(device, dtype)


@functools.cache
def hadamard(size: int) -> Tensor:
    """Orthonormal Walsh-Hadamard matrix in Sylvester's order, (size, size) float32, size a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


def hartley(size: int) -> Tensor:
    """Orthonormal Hartley matrix, (size, size) float32, symmetric and its own inverse."""
    steps = torch.arange(size, dtype=torch.float64)
    angles = (steps[:, None] * steps % size) * (2 * math.pi / size)
    return ((angles.cos() + angles.sin()) / math.sqrt(size)).float()


def random_order(size: int) -> Tensor:
    """A fixed pseudo-random order of 0..size-1, int64 (size,)."""
    return kept_indices(_ORDER_KEY, size, (1 << 31) - 1, 1, "cpu").squeeze(1).argsort(stable=True)


class Rotation:
    """R above, for tokens of one width.

    Args:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int):
        self.power = hidden_size & -hidden_size
        self._signs = 1.0 - 2.0 * kept_indices(_SIGNS_KEY, hidden_size, 2, 1, "cpu").squeeze(1)
        self._hartley = hartley(hidden_size // self.power)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens (N, H) float32 to R applied to each, (N, H)."""
        return self._mix(tokens * self._signs_on(tokens.device))

    def inverse(self, rotated: Tensor) -> Tensor:
        """Undoes the rotation: (N, H) float32."""
        return self._mix(rotated) * self._signs_on(rotated.device)

    def _signs_on(self, device: torch.device) -> Tensor:
        self._signs, self._hartley = self._signs.to(device), self._hartley.to(device)
        return self._signs

    def _mix(self, tokens: Tensor) -> Tensor:
        blocks = walsh_hadamard(tokens.view(len(tokens), -1, self.power))
        if len(self._hartley) > 1:
            blocks = self._hartley.to(tokens.device) @ blocks
        return blocks.reshape(tokens.shape)
