"""Measures the links between stages by sending over them, with an acknowledgement; before training, in turn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .engine import MeshEngine

# A probe grows until it takes long enough to be told from noise and from TCP's slow start.
LEAST_BYTES, MOST_BYTES, GROWTH = 64 * 1024, 4 * 1024 * 1024, 4
ENOUGH_SECONDS = 0.05
LATENCY_PROBES = 3
# What a transfer takes at least: on loopback differences of clock readings can vanish.
LEAST_SECONDS = 1e-6
STOP = 0


def measure_links(engine: MeshEngine) -> list[tuple[int, int, float]]:
    """Seconds per byte of the links on which this rank sends: (link, 0 forward or 1 backward, seconds per byte).

    Link l joins stages l and l + 1, the last one, which only interleaved schedules use, the last stage and the first.
    Collective over the pipeline; its links are measured one after the other where they share a stage, those of other
    pipelines at the same time, as they are used. Goes over the control group: the same machines as the boundary's own
    connections, though not NCCL's path.
    """
    mesh, stage, rates = engine.mesh, engine.topology.stage, []
    for link in range(min(mesh.num_boundaries, mesh.stages)):
        ends = link, (link + 1) % mesh.stages
        for way, (sender, taker) in enumerate((ends, ends[::-1])):
            if stage == sender:
                rates.append((link, way, _measure(engine, taker)))
            elif stage == taker:
                _answer(engine, sender)
    return rates


def _measure(engine: MeshEngine, taker: int) -> float:
    """Seconds per byte to a stage, what an empty message takes taken off."""
    data = torch.randint(256, (MOST_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latency = min(_send(engine, data[:1], taker) for _ in range(LATENCY_PROBES))
    size = LEAST_BYTES
    while (seconds := _send(engine, data[:size], taker) - latency) < ENOUGH_SECONDS and size < MOST_BYTES:
        size *= GROWTH
    with engine.naming("ending a probe of the link to", _peer(engine, taker)):
        dist.send(torch.tensor([STOP]), group=engine.groups.control, group_dst=taker)
    return max(seconds, LEAST_SECONDS) / size


def _send(engine: MeshEngine, data: torch.Tensor, taker: int) -> float:
    """Seconds until a stage acknowledges data (bytes,)."""
    group, started = engine.groups.control, time.monotonic()
    with engine.naming("a probe of the link to", _peer(engine, taker)):
        dist.send(torch.tensor([len(data)]), group=group, group_dst=taker)
        dist.send(data, group=group, group_dst=taker)
        dist.recv(torch.empty(1, dtype=torch.uint8), group=group, group_src=taker)
    return time.monotonic() - started


def _answer(engine: MeshEngine, sender: int) -> None:
    """Takes and acknowledges what `_measure` of a stage sends."""
    group, size = engine.groups.control, torch.empty(1, dtype=torch.int64)
    with engine.naming("a probe of the link from", _peer(engine, sender)):
        while dist.recv(size, group=group, group_src=sender) is not None and int(size) != STOP:
            dist.recv(torch.empty(int(size), dtype=torch.uint8), group=group, group_src=sender)
            dist.send(torch.zeros(1, dtype=torch.uint8), group=group, group_dst=sender)


def _peer(engine: MeshEngine, stage: int) -> list[int]:
    return [engine.topology.rank_of(engine.topology.replica, stage)]
