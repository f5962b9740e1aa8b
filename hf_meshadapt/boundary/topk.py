"""The largest entries of every token travel, the others are zero.

    x̂_i = bfloat16(x_i) for the k largest |x_i|, else 0        k = floor(8 bytes / (16 + ceil(log2 H)))
    |x - x̂|² = sum of the H - k smallest squares, + at most 2**-16 of the kept energy

Biased. A residual belongs to its sample, so that error feedback takes a cache of all samples (`aq_sgd.DeltaCoder`),
which is not saved with checkpoints.
Deterministic.

Source: Aji & Heafield, Sparse communication for distributed gradient descent (2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import index_bits
from .bits import pack, packed_bytes, read_bfloat16, unpack


class TopKCodec:
    """Codes each token as values (bfloat16) and indices (packed) of its largest entries.

    Args:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size
        self.index_bits = index_bits(hidden_size)

    def num_kept(self, bytes_per_token: int) -> int:
        """Entries that fit, k."""
        return min(self.hidden_size, 8 * bytes_per_token // (16 + self.index_bits))

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token): values, then indices, then zeros."""
        kept = self.num_kept(bytes_per_token)
        indices = tokens.abs().topk(kept, dim=1).indices
        values = tokens.gather(1, indices).to(torch.bfloat16).view(torch.uint8)
        packed = torch.cat([values, pack(indices, ((self.index_bits, kept),))], dim=1)
        return torch.nn.functional.pad(packed, (0, bytes_per_token - packed.shape[1]))

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to the kept entries, zeros elsewhere: (N, H) float32."""
        kept = self.num_kept(packed.shape[1])
        groups = ((self.index_bits, kept),)
        values = read_bfloat16(packed, 0, kept)
        indices = unpack(packed[:, 2 * kept : 2 * kept + packed_bytes(groups)], groups)
        return values.new_zeros(len(packed), self.hidden_size).scatter_(1, indices, values)
