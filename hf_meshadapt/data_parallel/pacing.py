"""Cuts bulk traffic in pieces, so that what a pipeline waits for does not queue behind all of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def chunks(message: torch.Tensor, chunk_bytes: int) -> Iterator[torch.Tensor]:
    """Views of a flat tensor, in order, of at most `chunk_bytes` (one value at least) each."""
    yield from message.split(max(1, chunk_bytes // message.element_size()))
