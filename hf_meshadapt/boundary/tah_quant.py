"""TAH-Quant (He et al., arXiv 2506.01352v2): tile-wise adaptive Hadamard quantisation of activations.

Steps, per token of H channels, with the section or equation of the paper:
1. section 3.1: tiles of G consecutive channels, each quantised with a scale and a zero-point of its own.
2. section 3.2, equations 1 and 2: p_k = |a_k| / (|a|_1 + eps), entropy = -sum p_k log(p_k + eps). The paper prints
   equation 2 without the minus; its text (even tiles have a high entropy and get more bits) needs it. The 80% of a
   token's tiles with the highest entropy get 4 bits, the others 3.
3. section 3.3, equation 3: r = |a|_(1) / (|a|_(2) + eps), the largest magnitude over the second; r > tau = 2 marks an
   outlier.
4. section 3.3, equation 4: a tile with an outlier is replaced by a P H_G / sqrt(G): the outlier swaps places with
   channel 0, then the Hadamard transform (Sylvester's order) spreads it.
5. section 3.1: affine quantisation to 2**b levels from the tile's minimum to its maximum, rounded to the nearest.
6. Algorithm 1: gradients go back through plain fixed-point quantisation, 6 bits with one scale per 32 channels
   (heguangxin/TAH-Quant, run_lm.sh): `TileQuantizeCodec`.

G = 64 as in that script. On the wire per tile: scale, zero-point, one bit for the precision, one for the transform,
log2 G for the outlier's place; the paper's 4.41 bits per entry are one bit per tile less.

Where we differ: scale and zero-point are bfloat16, not float16, which a massive activation overflows; where 64 does not
divide H, G is the largest power of two that does; bits are shared out within a token (the paper's second version says
so; its published code is the first version's, among tokens).

Error law: |a - â| <= scale / 2 + 2**-7 (|min| + max - min) per entry of the tile as it was quantised; deterministic,
biased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import TAH_BITS, tah_high_tiles, tah_quant_bytes, tile_size
from .bits import pack, read_bfloat16, unpack
from .rotation import walsh_hadamard

OUTLIER_RATIO = 2.0  # tau
_EPSILON = 1e-30


def tile_entropy(tiles: Tensor) -> Tensor:
    """Entropy of the magnitudes in each tile: (..., G) to (...)."""
    magnitudes = tiles.abs()
    shares = magnitudes / (magnitudes.sum(-1, keepdim=True) + _EPSILON)
    return -(shares * (shares + _EPSILON).log()).sum(-1)


def swap_with_first(tiles: Tensor, pivot: Tensor) -> Tensor:
    """Exchanges channel 0 and channel pivot (...) of each tile (..., G); its own inverse."""
    pivot = pivot.unsqueeze(-1)
    order = torch.arange(tiles.shape[-1], device=tiles.device).expand(tiles.shape).clone()
    order.scatter_(-1, pivot, 0)
    order[..., :1] = pivot
    return tiles.gather(-1, order)


class TahQuantCodec:
    """Codes activations; gradients have a codec of their own.

    Args:
        hidden_size: H.

    Raises:
        ValueError: H is not divisible by 8.
    """

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size
        self.size = tile_size(hidden_size, 64)
        self.tiles = hidden_size // self.size
        self.num_high = tah_high_tiles(self.tiles)
        high, low = self.num_high * self.size, (self.tiles - self.num_high) * self.size
        pivot_bits = self.size.bit_length() - 1
        self.groups = ((TAH_BITS[0], high), (TAH_BITS[1], low), *((bits, self.tiles) for bits in (1, 1, pivot_bits)))

    def natural_bytes(self, hidden_size: int) -> int:
        """Bytes of a token."""
        return tah_quant_bytes(hidden_size)

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token), at least `natural_bytes`."""
        tiles = tokens.reshape(-1, self.tiles, self.size)
        order = tile_entropy(tiles).argsort(dim=1, descending=True, stable=True)
        precise = torch.zeros_like(order).scatter_(1, order[:, : self.num_high], 1)
        largest = tiles.abs().topk(2, dim=2)
        spread = largest.values[..., 0] > OUTLIER_RATIO * (largest.values[..., 1] + _EPSILON)
        pivot = torch.where(spread, largest.indices[..., 0], 0)
        tiles = torch.where(spread.unsqueeze(2), walsh_hadamard(swap_with_first(tiles, pivot)), tiles)
        steps = self._levels(precise) - 1
        zero = tiles.amin(2).to(torch.bfloat16)
        scale = ((tiles.amax(2) - tiles.amin(2)) / steps).to(torch.bfloat16)
        divisor = torch.where(scale == 0, 1.0, scale.float()).unsqueeze(2)
        indices = ((tiles - zero.float().unsqueeze(2)) / divisor).round_().clamp_(min=0)
        indices = torch.minimum(indices, steps.unsqueeze(2)).long()
        indices = indices.gather(1, self._wire_order(precise).unsqueeze(2).expand_as(indices)).flatten(1)
        codes = pack(torch.cat([indices, precise, spread.long(), pivot], dim=1), self.groups)
        packed = torch.cat([scale.view(torch.uint8), zero.view(torch.uint8), codes], dim=1)
        return torch.nn.functional.pad(packed, (0, bytes_per_token - packed.shape[1]))

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to the quantised tokens (N, H) float32."""
        packed = packed[:, : self.natural_bytes(self.hidden_size)]
        scale = read_bfloat16(packed, 0, self.tiles)
        zero = read_bfloat16(packed, 2 * self.tiles, self.tiles)
        columns = [self.hidden_size, self.tiles, self.tiles, self.tiles]
        indices, precise, spread, pivot = unpack(packed[:, 4 * self.tiles :], self.groups).split(columns, dim=1)
        indices = indices.view(-1, self.tiles, self.size)
        order = self._wire_order(precise).unsqueeze(2).expand_as(indices)
        indices = torch.empty_like(indices).scatter_(1, order, indices)
        tiles = indices * scale.unsqueeze(2) + zero.unsqueeze(2)
        tiles = torch.where(spread.bool().unsqueeze(2), swap_with_first(walsh_hadamard(tiles), pivot), tiles)
        return tiles.reshape(len(packed), self.hidden_size)

    def _levels(self, precise: Tensor) -> Tensor:
        """Levels of each tile, from its precision bit."""
        return torch.where(precise.bool(), 2 ** TAH_BITS[0], 2 ** TAH_BITS[1])

    def _wire_order(self, precise: Tensor) -> Tensor:
        """Tiles (N, tiles) in the order in which their values travel: those of more bits first."""
        return precise.argsort(dim=1, descending=True, stable=True)
