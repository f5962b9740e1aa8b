"""When compressing what replicas exchange does not pay: what is timed, what is counted, and that it is said once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_meshadapt.config import DataParallelConfig
from hf_meshadapt.data_parallel.clock import SyncClock
from hf_meshadapt.sync_cost import LEAST_SYNCS, TIMED_STEPS, WARM_UP_STEPS, SyncCost, cost_warning, rank_bytes, whole

POWERSGD = DataParallelConfig("powersgd", matrix_rank=4)
DILOCO = DataParallelConfig("diloco", sync_every=10, outer_wire="int8")
SHAPES = [[(64, 128), (128,)]]


class Seconds:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def synchronise(clock: SyncClock, seconds: Seconds, compute: float, send: float, sent_bytes: float) -> None:
    with clock.synchronising():
        seconds.now += compute
        with clock.exchanging(sent_bytes):
            seconds.now += send


def test_the_clock_tells_computing_from_sending_and_keeps_the_fastest_message():
    seconds = Seconds()
    clock = SyncClock(seconds)
    synchronise(clock, seconds, compute=0.25, send=2.0, sent_bytes=1e6)  # waits for a slow replica
    synchronise(clock, seconds, compute=0.5, send=0.5, sent_bytes=1e6)
    synchronise(clock, seconds, compute=0.0, send=1.0, sent_bytes=8)  # tells nothing of the rate
    assert (clock.num_syncs, clock.compute_seconds, clock.exchange_seconds) == (3, 0.75, 3.5)
    assert clock.seconds_per_byte == 0.5e-6
    clock.reset()
    assert (clock.num_syncs, clock.compute_seconds, clock.seconds_per_byte) == (0, 0.0, None)


def test_what_nothing_compressed_would_be():
    assert whole(DataParallelConfig()) is None
    assert whole(POWERSGD) == replace(POWERSGD, sync="allreduce")
    assert whole(DILOCO) == replace(DILOCO, outer_wire="bfloat16")
    assert whole(replace(DILOCO, outer_wire="float32")) is None


def test_bytes_of_a_rank():
    # Two replicas: each sends half of a message twice, or all of what is gathered once.
    values = 64 * 128 + 128
    assert rank_bytes(SHAPES, DataParallelConfig(), 2, value_bytes=4) == 4 * values
    assert rank_bytes(SHAPES, DataParallelConfig(), 2, value_bytes=2) == 2 * values
    assert rank_bytes(SHAPES, POWERSGD, 2, value_bytes=4) == 2 * (4 * (64 + 128) + 128)
    assert rank_bytes(SHAPES, DILOCO, 2, value_bytes=4) == pytest.approx((values + 33 * 4) / 10)
    assert rank_bytes(SHAPES, DataParallelConfig(), 1, value_bytes=4) == 0


def test_the_warning_has_the_figures():
    assert cost_warning(POWERSGD, "rank 3", compute_seconds=0.5, saved_bytes=1e6, seconds_per_byte=1e-6) is None
    text = cost_warning(POWERSGD, "rank 3", compute_seconds=0.5, saved_bytes=1e6, seconds_per_byte=1e-8)
    for part in (
        "dp_sync='powersgd' costs rank 3",
        "0.5 s of",
        "1 MB",
        "0.01 s",
        "800 Mbit/s",
        "Use dp_sync='allreduce'",
    ):
        assert part in text
    assert "Use outer_wire='bfloat16'" in cost_warning(DILOCO, "rank 3", 0.5, 1e6, 1e-8)


@pytest.mark.parametrize("compute,warns", [(0.5, True), (0.001, False)])
def test_it_is_said_once_after_the_first_steps(compute, warns):
    seconds = Seconds()
    clock = SyncClock(seconds)
    cost = SyncCost(POWERSGD, clock, 1e6, "rank 0")
    said = []
    for step in range(1, 60):
        # The first steps are slow, whatever the sync.
        synchronise(clock, seconds, 100.0 if step <= WARM_UP_STEPS else compute, 0.01, 1e6)
        if cost.end_step():
            said.append(step)
    assert said == ([TIMED_STEPS] if warns else [])


def test_nothing_is_said_of_what_is_not_compressed_or_was_not_seen():
    seconds = Seconds()
    for sync in (DataParallelConfig(), replace(DILOCO, outer_wire="float32"), POWERSGD):
        clock = SyncClock(seconds)
        cost = SyncCost(sync, clock, 1e6, "rank 0")
        for _ in range(60):
            if sync is POWERSGD:  # in one process nothing is exchanged
                with clock.synchronising():
                    seconds.now += 1.0
            else:
                synchronise(clock, seconds, 1.0, 0.01, 1e6)
            assert cost.end_step() is None
    rare = SyncCost(DILOCO, SyncClock(seconds), 1e6, "rank 0")
    said = []
    for step in range(1, 60):
        if step % 25 == 0:
            synchronise(rare.clock, seconds, 9.0, 0.01, 1e6)
        if rare.end_step():
            said.append(step)
    assert said == [25 * LEAST_SYNCS]
