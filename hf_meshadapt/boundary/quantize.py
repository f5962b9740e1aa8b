"""Uniform quantisation of every entry at a few bits, with one scale per token.

Rotated (`Rotation`, which makes entries nearly Gaussian): scale = root mean square, Gaussian-optimal steps of 2**b
levels without a zero; one bit is the sign times 0.798 of the scale.

    q = floor(y / (scale step_b)),  ŷ = (q + 1/2) scale step_b,  y = R x,    |x - x̂|² = D_b |x|² for Gaussian y

Not rotated: scale = the entry of largest magnitude, with its sign, which so is a level itself and meets no clipping;
zero is a level too, so that the many small entries beside an outlier cost nothing.

    q = round(x / step),  x̂ = q step,  step = -scale / 2**(b-1),  -2**(b-1) <= q < 2**(b-1)
    |x - x̂| <= |step| / 2, and up to |step| for entries that oppose the scale by more than (1 - 2**-b) |scale|

Deterministic rounding in both, hence biased. Scales are bfloat16: every bound grows by 2**-8 of the scale.

Sources: optimal steps and D_b, Max, Quantizing for minimum distortion (1960); a random rotation before few-bit
quantisation, Suresh, Yu, Kumar & McMahan, Distributed mean estimation with limited communication (2017), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import SCALE_BYTES, quantized_bytes
from .bits import Groups, pack, packed_bytes, read_bfloat16, unpack
from .rotation import Rotation
from .transform import STEPS


class QuantizeCodec:
    """Codes tokens at `bits` bits per entry.

    Given more bytes than `natural_bytes`, it pads. Given fewer (packed sequences whose exact first tokens cost more
    than planned), the last entries get whole bits less.

    Args:
        hidden_size: H.
        bits: 1 to 8.
        rotated: rotate first.

    Raises:
        ValueError: bits out of range.
    """

    def __init__(self, hidden_size: int, bits: int, rotated: bool = False):
        if not 1 <= bits <= 8:
            raise ValueError(f"bits={bits} must lie in 1..8")
        self.hidden_size, self.bits = hidden_size, bits
        self.rotation = Rotation(hidden_size) if rotated else None
        self._layouts: dict[tuple[int, torch.device], tuple[Groups, Tensor, Tensor]] = {}  # by bits of a token
        self._offset = 0.5 if rotated else 0.0  # of the levels from whole steps

    def natural_bytes(self, hidden_size: int) -> int:
        """Bytes of a token: the scale, and `bits` bits per entry."""
        return quantized_bytes(hidden_size, self.bits)

    def layout(self, bytes_per_token: int, device: torch.device) -> tuple[Groups, Tensor, Tensor]:
        """Bit groups, steps over the scale (coded,) and levels (coded,) of a budget; entries past them are zero."""
        total_bits = min(self.bits * self.hidden_size, 8 * max(0, bytes_per_token - SCALE_BYTES))
        if (total_bits, device) not in self._layouts:
            self._layouts[total_bits, device] = self._make_layout(total_bits, device)
        return self._layouts[total_bits, device]

    def _make_layout(self, total_bits: int, device: torch.device) -> tuple[Groups, Tensor, Tensor]:
        low, num_high = divmod(total_bits, self.hidden_size)
        groups = ((low + 1, num_high), (low, self.hidden_size - num_high))
        groups = tuple((bits, count) for bits, count in groups if bits and count)
        bits = torch.tensor([bits for bits, count in groups for _ in range(count)], dtype=torch.long, device=device)
        levels = 2**bits
        steps = torch.tensor(STEPS, device=device)[bits] if self.rotation is not None else -2.0 / levels
        return groups, steps, levels

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token)."""
        if bytes_per_token < SCALE_BYTES:
            return tokens.new_zeros(len(tokens), bytes_per_token, dtype=torch.uint8)
        groups, steps, levels = self.layout(bytes_per_token, tokens.device)
        if self.rotation is not None:
            tokens = self.rotation(tokens)
            scale = tokens.square().mean(1, keepdim=True).sqrt()
        else:
            scale = tokens.gather(1, tokens.abs().argmax(1, keepdim=True))
        scale = scale.to(torch.bfloat16)  # both sides use the rounded number
        step = torch.where(scale == 0, 1.0, scale.float()) * steps
        indices = (tokens[:, : len(steps)] / step + (0.5 - self._offset)).floor_().add_(levels / 2)
        packed = pack(torch.minimum(indices.clamp_(min=0), levels - 1).long(), groups)
        spare = bytes_per_token - SCALE_BYTES - packed.shape[1]
        return torch.cat([scale.view(torch.uint8), torch.nn.functional.pad(packed, (0, spare))], dim=1)

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to the quantised tokens (N, H) float32."""
        if packed.shape[1] < SCALE_BYTES:
            return packed.new_zeros(len(packed), self.hidden_size, dtype=torch.float32)
        groups, steps, levels = self.layout(packed.shape[1], packed.device)
        scale = read_bfloat16(packed, 0, 1)
        indices = unpack(packed[:, SCALE_BYTES : SCALE_BYTES + packed_bytes(groups)], groups)
        values = (indices - levels / 2 + self._offset) * (scale * steps)
        values = torch.nn.functional.pad(values, (0, self.hidden_size - values.shape[1]))
        return values if self.rotation is None else self.rotation.inverse(values)


class TileQuantizeCodec:
    """`QuantizeCodec` without rotation, with one scale per tile of a token.

    Args:
        hidden_size: H, a multiple of tile_size.
        tile_size: consecutive entries that share a scale.
        bits: 1 to 8.
    """

    def __init__(self, hidden_size: int, tile_size: int, bits: int):
        self.hidden_size = hidden_size
        self.tiles = hidden_size // tile_size
        self.codec = QuantizeCodec(tile_size, bits)
        self.tile_bytes = self.codec.natural_bytes(tile_size)

    def natural_bytes(self, hidden_size: int) -> int:
        """Bytes of a token."""
        return hidden_size // self.codec.hidden_size * self.tile_bytes

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token), at least `natural_bytes`."""
        packed = self.codec.encode(tokens.reshape(-1, self.codec.hidden_size), self.tile_bytes)
        packed = packed.view(len(tokens), self.tiles * self.tile_bytes)
        return torch.nn.functional.pad(packed, (0, bytes_per_token - packed.shape[1]))

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to the quantised tokens (N, H) float32."""
        tiles = packed[:, : self.tiles * self.tile_bytes].reshape(-1, self.tile_bytes)
        return self.codec.decode(tiles).view(len(packed), self.hidden_size)
