"""What a synchronisation of replicas sends, by message. Pure arithmetic: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hf_meshadapt.config import WIRE_DTYPE_BYTES, DataParallelConfig
from hf_meshadapt.data_parallel.sizes import Shape, int8_bytes, powersgd_values
from hf_meshadapt.link_bytes import LinkBytes, all_gather_links, all_reduce_links, spread_over

# Of a comparison of what replicas must hold alike: a hash; whether it differs, and a hash of a tied copy.
REPLICA_CHECK_BYTES, STAGE_CHECK_BYTES = 8, 16
# (collective, bytes of each replica): `reduce` or `gather`
Message = tuple[str, int]


def low_rank_messages(shapes: Iterable[Shape], sync: DataParallelConfig) -> list[Message]:
    """PowerSGD's two messages for parameters of these shapes; one that is empty is not sent."""
    sizes = powersgd_values(shapes, sync.matrix_rank)
    return [("reduce", size * WIRE_DTYPE_BYTES[sync.factor_dtype]) for size in sizes if size]


def sync_messages(shapes: Iterable[Shape], sync: DataParallelConfig) -> list[Message]:
    """What a replica contributes to one exchange of parameters of these shapes."""
    if sync.low_rank:
        messages = low_rank_messages(shapes, sync)
    else:
        num_values = sum(math.prod(shape) for shape in shapes)
        if sync.outer_wire == "int8":
            messages = [("gather", int8_bytes(num_values))]
        else:
            messages = [("reduce", num_values * WIRE_DTYPE_BYTES[sync.outer_wire])]
    if sync.sync != "streaming_diloco":
        return messages
    return [piece for message in messages for piece in _in_pieces(message, sync.chunk_bytes)]


def _in_pieces(message: Message, chunk_bytes: int) -> list[Message]:
    collective, size_bytes = message
    num_whole, rest = divmod(size_bytes, chunk_bytes)
    return [(collective, chunk_bytes)] * num_whole + [(collective, rest)] * bool(rest)


def message_links(axis: str, ranks: list[int], messages: Iterable[Message]) -> Iterator[LinkBytes]:
    """One `LinkBytes` per link for all messages together."""
    totals: dict[tuple[int, int], LinkBytes] = {}
    for collective, size_bytes in messages:
        links = all_reduce_links if collective == "reduce" else all_gather_links
        for link in links(axis, ranks, size_bytes):
            sent = totals.get((link.from_rank, link.to_rank), replace(link, bytes=0, messages=0))
            added = {"bytes": sent.bytes + link.bytes, "messages": sent.messages + link.messages}
            totals[link.from_rank, link.to_rank] = replace(link, **added)
    yield from totals.values()


def sync_links(ranks: list[int], parts: Iterable[Iterable[Shape]], sync: DataParallelConfig) -> Iterator[LinkBytes]:
    """What the replicas of one stage send per optimizer step; every part is exchanged once in `sync_every`.

    Args:
        parts: shapes of the parameters that are exchanged together.
    """
    messages = [message for shapes in parts for message in sync_messages(tuple(shapes), sync)]
    for link in message_links("data_parallel", ranks, messages):
        yield spread_over(sync.sync_every, link) if sync.sync_every > 1 else link


def check_links(pipelines: list[list[int]], replicas: list[list[int]], check_every: int) -> Iterator[LinkBytes]:
    """What comparing what replicas must hold alike sends per optimizer step.

    Args:
        pipelines: ranks of every replica.
        replicas: ranks of every stage.
    """
    for groups, size_bytes in ((pipelines, STAGE_CHECK_BYTES), (replicas, REPLICA_CHECK_BYTES)):
        for ranks in groups:
            yield from (spread_over(check_every, link) for link in all_gather_links("control", ranks, size_bytes))
