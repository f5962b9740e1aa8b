"""Where the time of synchronisations goes: into computing what is sent, or into sending it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..devices import finish_kernels

# Smaller messages tell of latency, not of a link's rate.
LEAST_TIMED_BYTES = 32 * 1024


class SyncClock:
    """Adds up what one rank's synchronisations take.

    Args:
        clock: seconds that only grow; a test passes its own.

    Attributes:
        num_syncs: aggregations that have ended.
        sync_seconds: within aggregations, exchanges included.
        exchange_seconds: within exchanges.
        seconds_per_byte: of the fastest message; slower ones waited for a replica. None: none was large enough.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self.num_syncs, self.sync_seconds, self.exchange_seconds = 0, 0.0, 0.0
        self.seconds_per_byte: float | None = None

    @property
    def compute_seconds(self) -> float:
        return self.sync_seconds - self.exchange_seconds

    @contextmanager
    def synchronising(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Around one aggregation, on a device that may not have ended the backward pass before it."""
        finish_kernels(device)
        started = self._clock()
        yield
        self.sync_seconds += self._clock() - started
        self.num_syncs += 1

    @contextmanager
    def exchanging(self, link_bytes: float) -> Iterator[None]:
        """Around one message, of which this rank sends so many bytes to a neighbour."""
        started = self._clock()
        yield
        seconds = self._clock() - started
        self.exchange_seconds += seconds
        if link_bytes >= LEAST_TIMED_BYTES:
            fastest = self.seconds_per_byte
            self.seconds_per_byte = seconds / link_bytes if fastest is None else min(fastest, seconds / link_bytes)
