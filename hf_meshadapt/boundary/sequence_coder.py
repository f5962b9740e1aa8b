"""Lays the coded tokens of a sequence out in a fixed number of bytes: buffers are sized once, content adapts.

Padding is not coded, and what it would have cost goes to the real tokens. The first token of every sequence (of every
packed sequence too) travels whole, inside the same bytes. Both ends know which tokens are which, so no layout travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class TokenCodec(Protocol):
    """Codes tokens, each into the same number of bytes."""

    def encode(self, tokens: Tensor, bytes_per_token: int) -> Tensor:
        """tokens (N, H) float32 to uint8 (N, bytes_per_token)."""

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 (N, bytes_per_token) to tokens (N, H) float32."""


class SequenceCoder:
    """One direction of a boundary.

    Args:
        codec: of the tokens.
        hidden_size: width of a token.
        sequence_bytes: bytes of a sequence by its padded length; even.
        exact_first: first tokens travel whole, in bfloat16.
    """

    def __init__(
        self, codec: TokenCodec, hidden_size: int, sequence_bytes: Callable[[int], int], exact_first: bool
    ) -> None:
        self.codec, self.hidden_size, self.exact_first = codec, hidden_size, exact_first
        self.sequence_bytes = sequence_bytes

    def encode(self, hidden: Tensor, base: Tensor, real: Tensor, first: Tensor) -> Tensor:
        """Codes hidden - base.

        Args:
            hidden: (B, T, H) float32.
            base: (B, T, H) float32, what both ends know already.
            real: (B, T) bool, not padding.
            first: (B, T) bool, first tokens of sequences.

        Returns:
            uint8 (B, sequence_bytes(T)).
        """
        packed = hidden.new_zeros(len(hidden), self.sequence_bytes(hidden.shape[1]), dtype=torch.uint8)
        for row, (exact, coded, token_bytes) in enumerate(self._layouts(real, first)):
            whole = hidden[row, exact].to(torch.bfloat16).view(torch.uint8).flatten()
            packed[row, : len(whole)] = whole
            if token_bytes:
                tokens = self.codec.encode(hidden[row, coded] - base[row, coded], token_bytes).flatten()
                packed[row, len(whole) : len(whole) + len(tokens)] = tokens
        return packed

    def decode(self, packed: Tensor, base: Tensor, real: Tensor, first: Tensor) -> Tensor:
        """What `encode` was given, as far as it was coded: (B, T, H) float32; base where nothing travelled."""
        hidden = base.clone()
        for row, (exact, coded, token_bytes) in enumerate(self._layouts(real, first)):
            split = len(exact) * self.hidden_size * 2
            whole = packed[row, :split].view(torch.bfloat16).view(len(exact), self.hidden_size)
            hidden[row, exact] = whole.float()
            if token_bytes:
                tokens = packed[row, split : split + len(coded) * token_bytes].view(len(coded), token_bytes)
                hidden[row, coded] += self.codec.decode(tokens)
        return hidden

    def _layouts(self, real: Tensor, first: Tensor) -> list[tuple[Tensor, Tensor, int]]:
        """Per row: positions that travel whole, positions that are coded, and the bytes of each of these."""
        budget = self.sequence_bytes(real.shape[1])
        whole_bytes = self.hidden_size * 2
        layouts = []
        for row in range(len(real)):
            exact = (first[row] & real[row]).nonzero().squeeze(1) if self.exact_first else real.new_zeros(0).long()
            # Many short packed sequences: the budget's other half stays with the tokens in between.
            exact = exact[: max(1, budget // 2 // whole_bytes)] if len(exact) else exact
            others = real[row].clone()
            others[exact] = False
            coded = others.nonzero().squeeze(1)
            left = budget - len(exact) * whole_bytes
            layouts.append((exact, coded, max(0, left) // len(coded) if len(coded) else 0))
        return layouts
