"""Lays the coded tokens of a sequence out in a fixed number of bytes: buffers are sized once, content adapts.

Padding is not coded, and what it would have cost goes to the real tokens. The first token of every sequence (of every
packed sequence too) travels whole, inside the same bytes. Tokens that predict a label are felt more by the loss than
their context, and get more. Both ends know which tokens are which, so no layout travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .bits import read_bfloat16

# Kinds of tokens, as every chunk knows them: padding, context, first of a sequence, and those that predict a label.
PADDING, TOKEN, FIRST, TARGET = 0, 1, 2, 3


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
        sensitivity: how much the loss feels an error in a context token and in one that predicts a label: (2,).
            Bytes are divided between the two by it where the codec knows its distortions.
    """

    def __init__(
        self,
        codec: TokenCodec,
        hidden_size: int,
        sequence_bytes: Callable[[int], int],
        exact_first: bool,
        sensitivity: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.codec, self.hidden_size, self.exact_first = codec, hidden_size, exact_first
        self.sequence_bytes, self.sensitivity = sequence_bytes, sensitivity
        self._divisions: dict[tuple[int, int, int], tuple[int, int]] = {}

    def encode(self, hidden: Tensor, base: Tensor | None, kind: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Codes hidden - base.

        Args:
            hidden: (B, T, H) float32.
            base: (B, T, H) float32, what both ends know already; None is zero.
            kind: (B, T), what every position is.
            token_ids: (B, T); not looked at here, for coders that divide bytes by them.

        Returns:
            uint8 (B, sequence_bytes(T)).
        """
        packed = hidden.new_zeros(len(hidden), self.sequence_bytes(hidden.shape[1]), dtype=torch.uint8)
        for row, (exact, classes) in enumerate(self._layouts(kind, hidden.device)):
            pieces = [hidden[row, exact].to(torch.bfloat16).view(torch.uint8).flatten()]
            for coded, token_bytes in classes:
                tokens = hidden[row, coded] if base is None else hidden[row, coded] - base[row, coded]
                pieces.append(self.codec.encode(tokens, token_bytes).flatten())
            stream = torch.cat(pieces)
            packed[row, : len(stream)] = stream
        return packed

    def decode(self, packed: Tensor, base: Tensor | None, kind: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """What `encode` was given, as far as it was coded: (B, T, H) float32; base where nothing travelled."""
        if base is None:
            base = torch.zeros(*kind.shape, self.hidden_size, device=packed.device)
        hidden = base.clone()
        for row, (exact, classes) in enumerate(self._layouts(kind, packed.device)):
            start = len(exact) * self.hidden_size * 2
            whole = read_bfloat16(packed[row : row + 1], 0, len(exact) * self.hidden_size)
            hidden[row, exact] = whole.view(len(exact), self.hidden_size)
            for coded, token_bytes in classes:
                stop = start + len(coded) * token_bytes
                hidden[row, coded] += self.codec.decode(packed[row, start:stop].view(len(coded), token_bytes))
                start = stop
        return hidden

    def _layouts(self, kind: Tensor, device: torch.device) -> list[tuple[Tensor, list[tuple[Tensor, int]]]]:
        """By sequence: positions that travel whole, and those coded with the bytes of each, class by class."""
        whole_bytes, total = self.hidden_size * 2, self.sequence_bytes(kind.shape[1])
        layouts = []

        def there(places: np.ndarray) -> Tensor:
            return torch.from_numpy(places).to(device, non_blocking=True)

        for row in kind.cpu().numpy():
            exact, coded, left = split_tokens(row, total, whole_bytes, self.exact_first)
            is_target = row[coded] == TARGET
            classes = [there(coded[members]) for members in (~is_target, is_target)]
            token_bytes = self._divide(left, *map(len, classes))
            layouts.append((there(exact), [(p, b) for p, b in zip(classes, token_bytes) if len(p) and b]))
        return layouts

    def _divide(self, total_bytes: int, num_context: int, num_targets: int) -> tuple[int, int]:
        """Bytes of each context token and of each target, so that the loss feels the least error."""
        key = (total_bytes, num_context, num_targets)
        if key not in self._divisions:
            self._divisions[key] = divide_bytes(self.codec, total_bytes, key[1:], self.sensitivity)
        return self._divisions[key]


def split_tokens(
    kind: np.ndarray, budget: int, whole_bytes: int, exact_first: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Of one sequence's kinds (T,): positions that travel whole, positions that are coded, and the bytes for these.

    Args:
        budget: bytes of the sequence.
        whole_bytes: what a token costs that travels whole.
        exact_first: first tokens do, as far as they fit.
    """
    exact = np.flatnonzero(kind == FIRST) if exact_first else np.zeros(0, dtype=np.int64)
    # Many short packed sequences: the budget's other half stays with the tokens in between.
    exact = exact[: max(1, budget // 2 // whole_bytes)]
    if len(exact) * whole_bytes > budget:
        exact = exact[:0]
    coded = kind != PADDING
    coded[exact] = False
    return exact, np.flatnonzero(coded), budget - len(exact) * whole_bytes


def divide_bytes(
    codec: TokenCodec, total_bytes: int, counts: tuple[int, int], sensitivity: tuple[float, float]
) -> tuple[int, int]:
    """Bytes per token of two classes of tokens, by trying every division; equal where the codec cannot tell."""
    num_context, num_targets = counts
    if not num_context or not num_targets or not hasattr(codec, "distortions"):
        each = total_bytes // max(1, num_context + num_targets)
        return each, each
    context_bytes = torch.arange(total_bytes // num_context + 1)
    target_bytes = (total_bytes - num_context * context_bytes) // num_targets
    by_bytes = codec.distortions(total_bytes // min(counts))
    error = (
        num_context * sensitivity[0] * by_bytes[context_bytes] + num_targets * sensitivity[1] * by_bytes[target_bytes]
    )
    best = int(error.argmin())
    return best, int(target_bytes[best])
