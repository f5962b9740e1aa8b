"""What one rank sends another, and what gloo's collectives come to over the links of a group. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

# Measured on gloo of torch 2.13 (tests/distributed/test_metering.py): every message, whatever its size, costs two
# 48-byte headers of its sender and one of its receiver. The meter sees the receiver's on the way back.
GLOO_MESSAGE_BYTES = 144
# Gloo's ring all-reduce cuts each rank's block in segments: at least two, none larger than this (measured likewise).
GLOO_SEGMENT_BYTES = 1024 * 1024


@dataclass(frozen=True)
class LinkBytes:
    """Payload that one rank sends another on one axis in one optimizer step.

    Attributes:
        axis: one of the planner's `PLAN_AXES`.
        from_rank, to_rank: global ranks, replica x stages + stage.
        bytes: payload bytes; a fraction where what is sent every so many steps is spread over them.
        messages: gloo messages that carry them, likewise.
        boundary: on the pipeline axis the boundary's index (between chunk c and c + 1), else None.
        direction: on the pipeline axis `forward` or `backward`, else None.
    """

    axis: str
    from_rank: int
    to_rank: int
    bytes: float
    messages: float
    boundary: int | None = None
    direction: str | None = None


def spread_over(num_steps: int, link: LinkBytes) -> LinkBytes:
    """A step's share of what a link carries every so many steps."""
    return replace(link, bytes=link.bytes / num_steps, messages=link.messages / num_steps)


def all_reduce_links(axis: str, ranks: list[int], size_bytes: int, value_bytes: int = 4) -> Iterator[LinkBytes]:
    """Gloo's ring all-reduce of `size_bytes`: each of n ranks sends 2(n-1)/n of it to the rank before it.

    Args:
        value_bytes: of one value, of which a segment holds whole ones: a few values fill fewer segments.
    """
    num_ranks = len(ranks)
    if num_ranks < 2 or size_bytes == 0:
        return
    total_bytes = 2 * (num_ranks - 1) * size_bytes
    num_segments = num_ranks * max(2, -(-size_bytes // (num_ranks * GLOO_SEGMENT_BYTES)))
    num_values = -(-size_bytes // value_bytes)
    num_filled = -(-num_values // -(-num_values // num_segments))
    for index, rank in enumerate(ranks):
        # A total that does not divide leaves some ranks one byte more, so that the rows sum to it exactly.
        share_bytes = total_bytes // num_ranks + (index < total_bytes % num_ranks)
        messages = 2 * (num_ranks - 1) * num_filled / num_ranks
        yield LinkBytes(axis, rank, ranks[index - 1], share_bytes, messages)


def all_gather_links(axis: str, ranks: list[int], size_bytes: int) -> Iterator[LinkBytes]:
    """Gloo's ring all-gather of `size_bytes` per rank: each of n ranks sends n-1 shares to the rank after it."""
    num_ranks = len(ranks)
    if num_ranks < 2:
        return
    for index, rank in enumerate(ranks):
        to_rank = ranks[(index + 1) % num_ranks]
        yield LinkBytes(axis, rank, to_rank, (num_ranks - 1) * size_bytes, 2 * (num_ranks - 1))
