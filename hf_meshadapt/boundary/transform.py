"""Transform coding of hidden states: decorrelate, spend bits where they are felt, quantise, pack. Pure tensor code.

    y = Uᵀ A r        r the residual of a token (hidden minus prediction), A = (C + eps mean(diag C) I)^(1/2) with C
                      the covariance of per-token-normalised boundary gradients: what the loss feels, not energy
    U, lambda         eigenvectors and eigenvalues of A Sigma A, Sigma the covariance of r (Karhunen-Loève transform)
    bits              reverse water-filling with whole bits: each bit goes where it lowers the distortion most
    q                 uniform quantiser with the Gaussian-optimal step per bit count, after a per-token gain
    r̂ = A⁻¹ U ŷ

Sources: reverse water-filling, Cover & Thomas, Elements of Information Theory, 10.3.3; optimal uniform steps, Max,
Quantizing for minimum distortion (1960); per-token gain as in gain-shape quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import Groups, pack, packed_bytes, read_bfloat16, unpack

# Gaussian-optimal uniform quantisers of 2**bits levels: step in standard deviations and mean squared error, by bits.
STEPS = (0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000872)
MAX_BITS = len(STEPS) - 1
GAIN_BYTES = 2  # a bfloat16
MIN_VARIANCE = 1e-7  # of the largest; below it is rounding


@dataclass
class TransformTables:
    """What both ends of a boundary must hold to code one direction.

    Attributes:
        analysis: (components, H) float32, y = analysis @ r.
        synthesis: (H, components) float32, r = synthesis @ y.
        variances: (components,) float32, descending, of y.
    """

    analysis: Tensor
    synthesis: Tensor
    variances: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.analysis, self.synthesis, self.variances))


def product_dtype(wire_dtype: str) -> torch.dtype:
    """In what products with the tables are computed: what they lose in bfloat16 is what such a wire would lose."""
    return torch.bfloat16 if wire_dtype == "bfloat16" else torch.float32


def fit_tables(
    covariance: Tensor, weight: Tensor | None, num_components: int, epsilon: float = 0.1
) -> TransformTables:
    """The transform of one direction, in double precision, stored in single.

    Args:
        covariance: (H, H) of the residual (or of normalised gradients, for the way back).
        weight: (H, H), C above; None weighs all directions alike.
        num_components: rows kept, at most H.
        epsilon: regularisation of C relative to its mean diagonal.
    """
    covariance = covariance.double()
    root = inverse_root = None
    if weight is not None:
        weight = weight.double()
        weight = weight / weight.diagonal().mean().clamp(min=1e-30)
        values, vectors = torch.linalg.eigh(weight)
        values = (values.clamp(min=0) + epsilon).sqrt()
        root = (vectors * values) @ vectors.T
        inverse_root = (vectors / values) @ vectors.T
        covariance = root @ covariance @ root
    variances, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    order = variances.argsort(descending=True)[:num_components]
    # Directions that were never seen would only add noise to the gain.
    order = order[: max(1, int((variances[order] > MIN_VARIANCE * variances.max()).sum()))]
    variances, vectors = variances[order].clamp(min=0), vectors[:, order]
    analysis = vectors.T @ root if root is not None else vectors.T
    synthesis = inverse_root @ vectors if inverse_root is not None else vectors
    return TransformTables(analysis.float().contiguous(), synthesis.float().contiguous(), variances.float())


def allocate_bits(variances: Tensor, total_bits: int) -> list[int]:
    """Whole bits per component by greedy reverse water-filling; variances descend, and so do the bits.

    Equals adding one bit at a time where it lowers the squared error most, since a component's gains fall with every
    bit: the largest `total_bits` gains are taken at once.
    """
    drops = torch.tensor(DISTORTION[:-1], dtype=torch.float64) - torch.tensor(DISTORTION[1:], dtype=torch.float64)
    gains = variances.double().cpu()[:, None] * drops
    count = min(total_bits, gains.numel())
    taken = torch.zeros(gains.numel(), dtype=torch.int64)
    # Stable order, so that both ends break ties alike.
    taken[torch.sort(gains.flatten(), descending=True, stable=True).indices[:count]] = 1
    return taken.view(gains.shape).sum(1).tolist()


class TransformCodec:
    """Codes tokens of one direction with the transform, into any number of bytes each.

    Args:
        tables: the transform.
        dtype: of the products with it, from `product_dtype`.
    """

    def __init__(self, tables: TransformTables, dtype: torch.dtype = torch.float32):
        scale = tables.variances.clamp(min=1e-30).sqrt()
        self.variances = tables.variances
        self.analysis = (
            (tables.analysis / scale[:, None]).T.to(dtype).contiguous()
        )  # (H, components), to unit variance
        self.synthesis = (tables.synthesis * scale).T.to(dtype).contiguous()  # (components, H), and back
        self._distortions = torch.empty(0)
        self._layouts: dict[int, tuple[Groups, Tensor, Tensor]] = {}

    def distortions(self, most_bytes: int) -> Tensor:
        """Squared error that the loss feels, per token, by bytes per token from 0 to `most_bytes`: float64, on the CPU."""
        if len(self._distortions) <= most_bytes:
            variances = self.variances.double().cpu()
            table = torch.tensor(DISTORTION, dtype=torch.float64)
            gains = torch.sort((variances[:, None] * (table[:-1] - table[1:])).flatten(), descending=True).values
            taken = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
            bits = 8 * (torch.arange(2 * most_bytes + 1) - GAIN_BYTES)
            self._distortions = variances.sum() - taken[bits.clamp(0, len(gains))]
        return self._distortions[: most_bytes + 1]

    def layout(self, bytes_per_token: int) -> tuple[Groups, Tensor, Tensor]:
        """Bit groups, quantiser steps and levels (coded components,) of a budget; components descend in variance."""
        if bytes_per_token not in self._layouts:
            bits = allocate_bits(self.variances, max(0, bytes_per_token - GAIN_BYTES) * 8)
            bits = [b for b in bits if b > 0]
            groups = tuple((b, bits.count(b)) for b in sorted(set(bits), reverse=True))
            device = self.variances.device
            index = torch.tensor(bits, dtype=torch.long, device=device)
            self._layouts[bytes_per_token] = groups, torch.tensor(STEPS, device=device)[index], 2**index
        return self._layouts[bytes_per_token]

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token)."""
        if bytes_per_token <= GAIN_BYTES:  # nothing fits: the token is taken for its prediction
            return tokens.new_zeros(len(tokens), bytes_per_token, dtype=torch.uint8)
        groups, steps, levels = self.layout(bytes_per_token)
        unit = (tokens.to(self.analysis.dtype) @ self.analysis[:, : len(steps)]).float()
        # The token's scale, judged by standard deviations: the components that carry most tell most about it. Both
        # sides use the rounded number.
        weights = self.variances[: len(steps)].sqrt()
        gain = (unit.square() @ weights[:, None] / weights.sum().clamp(min=1e-30)).sqrt().to(torch.bfloat16)
        indices = (unit / (gain.float().clamp(min=1e-30) * steps)).floor().add_(levels / 2)
        packed = pack(torch.minimum(indices.clamp_(min=0), levels - 1).long(), groups)
        spare = bytes_per_token - GAIN_BYTES - packed.shape[1]
        return torch.cat([gain.view(torch.uint8), torch.nn.functional.pad(packed, (0, spare))], dim=1)

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to the coded tokens (N, H) float32."""
        if packed.shape[1] <= GAIN_BYTES:
            return packed.new_zeros(len(packed), self.synthesis.shape[1], dtype=torch.float32)
        groups, steps, levels = self.layout(packed.shape[1])
        gain = read_bfloat16(packed, 0, 1)
        indices = unpack(packed[:, GAIN_BYTES : GAIN_BYTES + packed_bytes(groups)], groups)
        values = (indices - levels / 2 + 0.5) * (gain * steps)
        return (values.to(self.synthesis.dtype) @ self.synthesis[: len(steps)]).float()
