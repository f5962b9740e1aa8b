"""What a boundary does with a hidden state before it travels: `Codec` is the extension point."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_meshadapt.boundary.prf import kept_indices
from hf_meshadapt.config import BoundaryConfig


class Codec:
    """Packs a hidden state for the wire and unpacks it on the other side, differentiably in both.

    `encode` and `decode` of one microbatch get equal `key` and `starts`, and the codec derives from them whatever
    both sides must agree on.
    """

    def __init__(self, config: BoundaryConfig, hidden_size: int) -> None:
        self.config = config
        self.hidden_size = hidden_size
        self.wire_dtype = getattr(torch, config.wire_dtype)

    def packed_shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Shape of `encode`'s result for `batch` sequences of `length` tokens."""
        raise NotImplementedError

    def encode(self, hidden: Tensor, key: int, starts: Tensor | None) -> Tensor:
        """Pack hidden (B, T, H), any float dtype, into the wire dtype and `packed_shape(B, T)`.

        Args:
            hidden: boundary activations.
            key: from `prf.boundary_key`.
            starts: bool (B, T), first tokens of sequences, packed ones included; None where each row begins one.
        """
        raise NotImplementedError

    def decode(self, packed: Tensor, key: int, starts: Tensor | None, fill: Tensor) -> Tensor:
        """Unpack into hidden (B, T, H) of fill's dtype.

        Args:
            packed: what `encode` returned.
            key: as in `encode`.
            starts: as in `encode`.
            fill: (B, T, H), what stands where nothing was sent: constant in the backward pass, never written to, often
                an expanded view.
        """
        raise NotImplementedError


class DenseCodec(Codec):
    """Everything travels, in the wire dtype: evaluation, and training with mask_ratio 0."""

    def packed_shape(self, batch: int, length: int) -> tuple[int, ...]:
        return batch, length, self.hidden_size

    def encode(self, hidden: Tensor, key: int, starts: Tensor | None) -> Tensor:
        return hidden.to(self.wire_dtype)

    def decode(self, packed: Tensor, key: int, starts: Tensor | None, fill: Tensor) -> Tensor:
        return packed.to(fill.dtype)


class RandomMaskCodec(Codec):
    """Only a pseudo-random share of each token's entries travels; the gradient comes back on the same entries.

    Never rescaled by 1/keep: on a pre-norm residual stream that breaks training. Source: arXiv
    2609.14339, which zero-fills and masks every token; the exact first token and the fill are ours.

    A row's size is that of one exact token. Where sequences are packed, all their first tokens are exact as long as they
    take half of it; what they take, the other tokens lack alike.
    """

    def packed_shape(self, batch: int, length: int) -> tuple[int, ...]:
        return batch, self.config.values_per_sequence(length, self.hidden_size)

    def encode(self, hidden: Tensor, key: int, starts: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        positions = self._positions(batch, length, key, starts, hidden.device)
        return hidden.flatten(1).gather(1, positions).to(self.wire_dtype)

    def decode(self, packed: Tensor, key: int, starts: Tensor | None, fill: Tensor) -> Tensor:
        batch, length, _ = fill.shape
        positions = self._positions(batch, length, key, starts, packed.device)
        return fill.detach().flatten(1).scatter(1, positions, packed.to(fill.dtype)).view(fill.shape)

    def _positions(self, batch: int, length: int, key: int, starts: Tensor | None, device: torch.device) -> Tensor:
        """Where each packed value sits in its sequence's flattened (length x hidden) entries: int64 (B, V), distinct.

        With exact first tokens: the kept entries of the other tokens, then those tokens whole.
        """
        num_kept = self.config.num_kept(self.hidden_size)
        kept = kept_indices(key, batch * length, self.hidden_size, num_kept, device).view(batch, length, num_kept)
        kept += (torch.arange(length, device=device) * self.hidden_size).unsqueeze(1)
        if not self.config.exact_first_token:
            return kept.view(batch, -1)
        if starts is not None and bool((starts.sum(1) > 1).any()):
            return torch.stack([self._with_several_starts(*row) for row in zip(kept, starts)])
        if starts is None:
            starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
        # A row that continues a sequence has no first token: its position 0 stands in.
        first = starts.to(device, non_blocking=True).int().argmax(dim=1, keepdim=True)
        others = torch.arange(length - 1, device=device)
        others = others + (others >= first)
        sequences = torch.arange(batch, device=device).unsqueeze(1)
        exact = first * self.hidden_size + torch.arange(self.hidden_size, device=device)
        return torch.cat([kept[sequences, others].view(batch, -1), exact], dim=1)

    def _with_several_starts(self, kept: Tensor, starts: Tensor) -> Tensor:
        """`_positions` of one row (V,), from its kept entries (T, kept) and starts (T,)."""
        num_values = self.config.values_per_sequence(len(kept), self.hidden_size)
        exact = starts.nonzero().squeeze(1)[: max(1, num_values // 2 // self.hidden_size)]
        if not len(exact):
            exact = exact.new_zeros(1)
        coded = torch.ones_like(starts)
        coded[exact] = False
        # Starts are best on the host, where places are found without a wait for the device.
        exact, others = (places.to(kept.device, non_blocking=True) for places in (exact, coded.nonzero().squeeze(1)))
        # In turns over the tokens: cutting the last turns off takes as much from each.
        turns = kept.index_select(0, others).T.flatten()[: num_values - len(exact) * self.hidden_size]
        whole = exact.unsqueeze(1) * self.hidden_size + torch.arange(self.hidden_size, device=kept.device)
        return torch.cat([turns, whole.flatten()])


def make_codec(config: BoundaryConfig, hidden_size: int, coded: bool) -> Codec:
    """The in-graph codec of a coded pass (training) or an uncoded one (evaluation, calibration, anchors)."""
    return (RandomMaskCodec if coded and config.codec == "random_mask" else DenseCodec)(config, hidden_size)
