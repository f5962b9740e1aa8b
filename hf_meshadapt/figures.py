"""Where a run's time goes and what it sends per token: step times, waits and bytes of all ranks, summed up for logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .metering import METER_AXES


@dataclass
class StepTotals:
    """What one rank did in the training steps of one log interval.

    Attributes:
        num_steps: optimizer steps.
        tokens: tokens of this rank's replica.
        step_seconds: wall time within steps; evaluation and checkpoints between steps are not in it.
        wait_seconds: part of `step_seconds` spent waiting for other ranks.
    """

    num_steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """This rank's view: tokens per second of its replica, and mean seconds per step."""
        steps = max(1, self.num_steps)
        return {
            "tokens_per_second": self.tokens / self.step_seconds if self.step_seconds else 0.0,
            "step_seconds": self.step_seconds / steps,
            "compute_seconds": (self.step_seconds - self.wait_seconds) / steps,
            "wait_seconds": self.wait_seconds / steps,
        }


class StepMeter:
    """Adds up step time, waiting time and tokens of one rank until they are taken for a log.

    Args:
        clock: seconds that only grow; a test passes its own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._step_started = clock()
        self._totals = StepTotals()

    def start_step(self) -> None:
        """Begins an optimizer step; the first of its accumulation steps begins here too."""
        self._step_started = self._clock()

    def end_step(self) -> None:
        self._totals.step_seconds += self._clock() - self._step_started
        self._totals.num_steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Times one wait for other ranks, within a step. Waits do not nest."""
        started = self._clock()
        yield
        self.add_wait(self._clock() - started)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps time and waits within the context out of the totals, and out of a step that is under way."""
        started, totals = self._clock(), self._totals
        self._totals = StepTotals()
        try:
            yield
        finally:
            self._totals = totals
            self._step_started += self._clock() - started

    @property
    def wait_seconds(self) -> float:
        """Waited since the last `take`, so far."""
        return self._totals.wait_seconds

    def add_wait(self, seconds: float) -> None:
        self._totals.wait_seconds += seconds

    def add_tokens(self, tokens: int) -> None:
        """Adds tokens of this rank's replica; every stage of a replica adds the same."""
        self._totals.tokens += tokens

    def take(self) -> StepTotals:
        """The totals since the last call."""
        totals, self._totals = self._totals, StepTotals()
        return totals


@dataclass(frozen=True)
class Figures:
    """Sums over all ranks of a stretch of training; stretches add up.

    Attributes:
        tokens: of all replicas, padding included.
        seconds: mean over ranks of the time within steps.
        wait_seconds: mean over ranks of the part spent waiting for other ranks.
        axis_bytes: bytes that all ranks sent, by axis; None where some rank cannot count them.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    axis_bytes: dict[str, float] | None = None

    def __add__(self, other: Figures) -> Figures:
        mine, theirs = self.axis_bytes, other.axis_bytes
        both = {a: mine.get(a, 0) + theirs.get(a, 0) for a in METER_AXES} if mine and theirs else mine or theirs
        return Figures(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.wait_seconds + other.wait_seconds,
            both,
        )

    def logs(self) -> dict[str, float]:
        """`tokens_per_second`, `wait_share`, and where bytes were counted `bytes_per_token` in all and
        `bytes_per_token_<axis>` for each axis that sent any."""
        logs = {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "wait_share": self.wait_seconds / self.seconds if self.seconds else 0.0,
        }
        if self.axis_bytes is not None and self.tokens:
            logs["bytes_per_token"] = sum(self.axis_bytes.values()) / self.tokens
            sent = {axis: count for axis, count in self.axis_bytes.items() if count}
            logs.update({f"bytes_per_token_{axis}": count / self.tokens for axis, count in sent.items()})
        return logs


def gather(
    totals: StepTotals,
    sent_bytes: dict[str, int] | None,
    reduce: Callable[[list[float]], list[float]],
    *,
    stages: int,
) -> Figures:
    """Figures of all ranks, equal on all of them, out of each one's own.

    Args:
        totals: of this rank, from `StepMeter.take`.
        sent_bytes: of this rank, from `SocketMeter.take_axis_bytes`; None where its meter is not available.
        reduce: sums a list of floats element by element over all ranks, in double precision.
        stages: ranks per pipeline, which all count the same tokens.
    """
    counts = [float((sent_bytes or {}).get(axis, 0)) for axis in METER_AXES]
    mine = [1.0, float(sent_bytes is not None), totals.tokens, totals.step_seconds, totals.wait_seconds, *counts]
    num_ranks, num_meters, tokens, step_seconds, wait_seconds, *counts = reduce(mine)
    axis_bytes = dict(zip(METER_AXES, counts)) if num_meters == num_ranks else None
    return Figures(tokens / stages, step_seconds / num_ranks, wait_seconds / num_ranks, axis_bytes)
