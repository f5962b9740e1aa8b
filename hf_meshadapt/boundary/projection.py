"""Tokens travel as their coordinates in a subspace: one that was fitted, or a fixed random one.

subspace    x̂ = U Q(Uᵀ x), U the leading eigenvectors of what is coded (residuals forward, gradients backward, each
            direction its own), Q quantisation at 8 bits with one scale per token (`quantize.py`, not rotated).
            |x - x̂|² = energy outside U + at most d (max |Uᵀ x| / 128)² for d coordinates (a quarter of it but for
            coordinates near the opposite of the largest)
bottleneck  x̂ = P Pᵀ x, P d random columns of the inverse of a random rotation: orthonormal, fixed, the same in both
            directions, so that the gradient that comes back is the true one, P Pᵀ g. Coordinates in bfloat16.
            |x̂ - P Pᵀ x| <= 2**-8 |x|

Both deterministic and, for a given token, biased: what lies outside is lost.

Sources: principal components, Jolliffe, Principal component analysis (2002); randomly sampled rows of a randomised
Hadamard transform, Tropp, Improved analysis of the subsampled randomized Hadamard transform (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import SCALE_BYTES
from .bits import read_bfloat16
from .quantize import QuantizeCodec
from .rotation import Rotation, random_order


class SubspaceCodec:
    """Codes tokens in the leading directions of a basis, as many as fit.

    Args:
        basis: (H, components) float32, orthonormal columns, the most important first.
    """

    def __init__(self, basis: Tensor):
        self.basis = basis
        self._quantizers: dict[int, QuantizeCodec] = {}

    def num_dims(self, bytes_per_token: int) -> int:
        """Coordinates that fit, d."""
        return min(self.basis.shape[1], max(0, bytes_per_token - SCALE_BYTES))

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token)."""
        dims = self.num_dims(bytes_per_token)
        if dims == 0:
            return tokens.new_zeros(len(tokens), bytes_per_token, dtype=torch.uint8)
        return self._quantizer(dims).encode(tokens @ self.basis[:, :dims], bytes_per_token)

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to (N, H) float32."""
        dims = self.num_dims(packed.shape[1])
        if dims == 0:
            return packed.new_zeros(len(packed), len(self.basis), dtype=torch.float32)
        return self._quantizer(dims).decode(packed) @ self.basis[:, :dims].T

    def _quantizer(self, dims: int) -> QuantizeCodec:
        return self._quantizers.setdefault(dims, QuantizeCodec(dims, 8))


class BottleneckCodec:
    """Codes tokens in a fixed random subspace; fewer bytes keep a part of the same coordinates.

    Args:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int):
        self.rotation = Rotation(hidden_size)
        self.order = random_order(hidden_size)

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token)."""
        kept = self._kept(bytes_per_token, tokens.device)
        packed = self.rotation(tokens)[:, kept].to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.nn.functional.pad(packed, (0, bytes_per_token - packed.shape[1]))

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to the projections (N, H) float32."""
        kept = self._kept(packed.shape[1], packed.device)
        values = read_bfloat16(packed, 0, len(kept))
        rotated = values.new_zeros(len(packed), len(self.order))
        rotated[:, kept] = values
        return self.rotation.inverse(rotated)

    def _kept(self, bytes_per_token: int, device: torch.device) -> Tensor:
        """The rotated coordinates that travel, int64 (d,)."""
        self.order = self.order.to(device)
        return self.order[: bytes_per_token // 2]
