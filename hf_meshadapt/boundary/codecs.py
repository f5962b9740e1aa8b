"""What a boundary does with a hidden state before it travels: `Codec` is the extension point."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_meshadapt.boundary.prf import kept_indices
from hf_meshadapt.config import BoundaryConfig


class Codec:
    """Packs a hidden state for the wire and unpacks it on the other side, differentiably in both.

    `encode` and `decode` of one microbatch get equal `key` and `first_token`, and the codec derives from them whatever
    both sides must agree on.
    """

    def __init__(self, config: BoundaryConfig, hidden_size: int) -> None:
        self.config = config
        self.hidden_size = hidden_size
        self.wire_dtype = getattr(torch, config.wire_dtype)

    def packed_shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Shape of `encode`'s result for `batch` sequences of `length` tokens."""
        raise NotImplementedError

    def encode(self, hidden: Tensor, key: int, first_token: Tensor | None) -> Tensor:
        """Pack hidden (B, T, H), any float dtype, into the wire dtype and `packed_shape(B, T)`.

        Args:
            hidden: boundary activations.
            key: from `prf.boundary_key`.
            first_token: int64 (B,) position of each sequence's first real token, None where all are at 0.
        """
        raise NotImplementedError

    def decode(self, packed: Tensor, key: int, first_token: Tensor | None, fill: Tensor) -> Tensor:
        """Unpack into hidden (B, T, H) of fill's dtype.

        Args:
            packed: what `encode` returned.
            key: as in `encode`.
            first_token: as in `encode`.
            fill: (B, T, H), what stands where nothing was sent: constant in the backward pass, never written to, often
                an expanded view.
        """
        raise NotImplementedError


class DenseCodec(Codec):
    """Everything travels, in the wire dtype: evaluation, and training with mask_ratio 0."""

    def packed_shape(self, batch: int, length: int) -> tuple[int, ...]:
        return batch, length, self.hidden_size

    def encode(self, hidden: Tensor, key: int, first_token: Tensor | None) -> Tensor:
        return hidden.to(self.wire_dtype)

    def decode(self, packed: Tensor, key: int, first_token: Tensor | None, fill: Tensor) -> Tensor:
        return packed.to(fill.dtype)


class RandomMaskCodec(Codec):
    """Only a pseudo-random share of each token's entries travels; the gradient comes back on the same entries.

    Never rescaled by 1/keep: on a pre-norm residual stream that breaks training. Source: arXiv
    2609.14339, which zero-fills and masks every token; the exact first token and the fill are ours.
    """

    def packed_shape(self, batch: int, length: int) -> tuple[int, ...]:
        return batch, self.config.values_per_sequence(length, self.hidden_size)

    def encode(self, hidden: Tensor, key: int, first_token: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        positions = self._positions(batch, length, key, first_token, hidden.device)
        return hidden.flatten(1).gather(1, positions).to(self.wire_dtype)

    def decode(self, packed: Tensor, key: int, first_token: Tensor | None, fill: Tensor) -> Tensor:
        batch, length, _ = fill.shape
        positions = self._positions(batch, length, key, first_token, packed.device)
        return fill.detach().flatten(1).scatter(1, positions, packed.to(fill.dtype)).view(fill.shape)

    def _positions(
        self, batch: int, length: int, key: int, first_token: Tensor | None, device: torch.device
    ) -> Tensor:
        """Where each packed value sits in its sequence's flattened (length x hidden) entries: int64 (B, V), distinct.

        With an exact first token: the kept entries of the other tokens in order, then that token whole.
        """
        num_kept = self.config.num_kept(self.hidden_size)
        kept = kept_indices(key, batch * length, self.hidden_size, num_kept, device).view(batch, length, num_kept)
        kept += (torch.arange(length, device=device) * self.hidden_size).unsqueeze(1)
        if not self.config.exact_first_token:
            return kept.view(batch, -1)
        if first_token is None:
            first_token = torch.zeros(batch, dtype=torch.int64, device=device)
        first_token = first_token.to(device).unsqueeze(1)
        others = torch.arange(length - 1, device=device)
        others = others + (others >= first_token)
        sequences = torch.arange(batch, device=device).unsqueeze(1)
        exact = first_token * self.hidden_size + torch.arange(self.hidden_size, device=device)
        return torch.cat([kept[sequences, others].view(batch, -1), exact], dim=1)


def make_codec(config: BoundaryConfig, hidden_size: int, coded: bool) -> Codec:
    """The in-graph codec of a coded pass (training) or an uncoded one (evaluation, calibration, anchors)."""
    return (RandomMaskCodec if coded and config.codec == "random_mask" else DenseCodec)(config, hidden_size)
