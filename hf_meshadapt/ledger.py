"""This rank's account of a run: what its sockets sent and how long its steps took, training apart from the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .figures import Figures, StepMeter, gather
from .metering import SocketMeter


class Ledger:
    """Owns the meters.

    Args:
        counts_bytes: sockets carry all that ranks send each other. NCCL uses none within a machine, and opens those to
            others at any time: then no bytes are told, rather than too few.

    Attributes:
        sockets: bytes by axis and peer.
        step_meter: step and waiting times, tokens.
        run: figures of all ranks over the whole log intervals of the run so far.
    """

    def __init__(self, counts_bytes: bool = True):
        self.sockets = SocketMeter()
        self.sockets.available &= counts_bytes
        self.step_meter = StepMeter()
        self.run = Figures()
        self._kept_bytes: dict[str, int] = {}  # sent in training steps before something set apart

    def start_run(self) -> None:
        """Forgets what was sent and timed so far: figures of a run begin with its first step."""
        self.sockets.take_axis_bytes()
        self.step_meter.take()
        self._kept_bytes, self.run = {}, Figures()

    @contextlib.contextmanager
    def apart(self) -> Iterator[dict[str, int]]:
        """Keeps what is sent and waited for within the context (evaluation, calibration) out of the figures of training.

        Yields a dict that holds this rank's bytes by axis once the context has ended.
        """
        for axis, count in self.sockets.take_axis_bytes().items():
            self._kept_bytes[axis] = self._kept_bytes.get(axis, 0) + count
        spent: dict[str, int] = {}
        with self.step_meter.apart():
            yield spent
        spent.update(self.sockets.take_axis_bytes())

    def take(self, sum_over_ranks: Callable[[list[float]], list[float]], *, stages: int, alone: bool) -> Figures:
        """Figures of all ranks since the last call; collective through `sum_over_ranks`.

        Args:
            stages: ranks that count the same tokens.
            alone: this is the only process, and sends nothing.
        """
        sent = None
        if self.sockets.available and not alone:
            now = self.sockets.take_axis_bytes()
            sent = {axis: count + self._kept_bytes.get(axis, 0) for axis, count in now.items()}
        self._kept_bytes = {}
        figures = gather(self.step_meter.take(), sent, sum_over_ranks, stages=stages)
        self.run += figures
        return figures
