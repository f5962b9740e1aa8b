"""The anchor link between processes: anchors that are late, slow, stopped, killed, restarted, strangers, or outlived.

Every prior that the fast circuit takes is checked against weights of its version, so that nothing half-arrived, mixed or
stale passes for whole.
"""

from __future__ import annotations

import os
import signal
import socket

import pytest

from ..anchor_ends import ANCHOR_EVERY, HOST, circuits
from ..launch import free_port


def ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


@pytest.mark.parametrize("num_stages,num_slices", [(2, 1), (1, 3)])
def test_priors_arrive_and_the_anchor_ends_when_the_fast_circuit_is_done(num_stages, num_slices, tmp_path):
    with circuits(tmp_path, ports(num_stages * num_slices)) as both:
        both.start_fast(num_slices=num_slices)
        both.wait(lambda now: now["step"] > 20, "steps without an anchor")
        anchor = both.start_anchor()
        progress = both.wait_for_priors(5)
        assert progress["first_version"] > 0 and progress["generations"] == [1] * num_stages * num_slices
        both.finish()
        both.stop(anchor)


def test_the_anchor_may_come_first_and_be_slow(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        anchor = both.start_anchor(pass_seconds=0.3)
        both.start_fast()
        progress = both.wait_for_priors(2)
        # None queue up: for each pass at most one is passed over, and one waits while the next pass runs.
        assert progress["num_snapshots"] <= 2 * (progress["num_applied"] + 1) + 1
        assert progress["num_steps"] > progress["num_snapshots"]
        both.finish()
        both.stop(anchor)


def test_a_deterministic_run_waits_for_its_priors(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        both.start_fast(deterministic=True)
        anchor = both.start_anchor(pass_seconds=0.05)
        both.wait_for_priors(4)
        progress = both.finish()
        step = progress["step"]  # the last that was begun
        assert progress["applied_version"] == step // ANCHOR_EVERY * ANCHOR_EVERY - ANCHOR_EVERY
        assert progress["num_applied"] == step // ANCHOR_EVERY
        assert progress["num_snapshots"] == step // ANCHOR_EVERY + 1
        assert progress["num_live_steps"] == step + 1 - ANCHOR_EVERY
        ages = [ANCHOR_EVERY + at % ANCHOR_EVERY for at in range(ANCHOR_EVERY, step + 1)]
        assert progress["age_sum_steps"] == sum(ages)
        both.stop(anchor)


def test_the_anchor_is_foreign_to_the_fast_circuit_and_outlives_a_signal_to_it(tmp_path):
    with circuits(tmp_path, ports(1)) as both:
        fast = both.start_fast()
        anchor = both.start_anchor(reconnect_seconds=0.5)
        progress = both.wait_for_priors(1)
        assert progress["peer_pid"] == anchor.pid != progress["pid"] == fast.pid
        assert os.getpgid(anchor.pid) == anchor.pid != progress["process_group"]
        os.kill(fast.pid, signal.SIGKILL)
        both.stop(anchor, code=1)
        assert "LinkError: the anchor could not reach the fast circuit" in both.logs()


def test_a_stopped_anchor_is_dropped_and_comes_back_as_a_new_generation(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        both.start_fast()
        anchor = both.start_anchor()
        both.wait_for_priors(1)
        os.kill(anchor.pid, signal.SIGSTOP)
        step = both.wait(lambda now: not any(now["connected"]), "the end of a silent generation")["step"]
        both.wait(lambda now: now["step"] > step + 20, "steps without an anchor")
        os.kill(anchor.pid, signal.SIGCONT)
        both.wait(lambda now: min(now["generations"]) >= 2, "the next generation")
        both.wait_for_priors(2)
        both.finish()
        both.stop(anchor)
        assert "nothing came from the peer for" in both.logs()


def kill_and_restart(both, cycles: int) -> None:
    """Kills anchors after a prior, at once, and in the middle of a snapshot, by turns."""
    anchor = None
    for cycle in range(cycles):
        if anchor is not None:
            os.kill(anchor.pid, signal.SIGKILL)
            anchor.join()
        before = both.progress()
        anchor = both.start_anchor()
        if cycle % 3 == 0:
            both.wait_for_priors(1)
        elif cycle % 3 == 1:
            sent = before["sent_bytes"]
            both.wait(lambda now, sent=sent: now["sent_bytes"] > sent + 20_000, "the beginning of a snapshot")
    progress = both.wait_for_priors(2)
    assert progress["num_batches"] >= progress["num_applied"]  # each went on in the data where the one before it was
    both.finish()
    both.stop(anchor)


def test_killed_anchors_are_replaced(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        both.start_fast(size=50_000, rate_bits_per_second=8e6)  # 0.1 s for a snapshot in full
        kill_and_restart(both, cycles=7)


@pytest.mark.slow
def test_200_killed_anchors_are_replaced(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        both.start_fast(size=50_000, rate_bits_per_second=8e6)
        kill_and_restart(both, cycles=200)


def test_a_wrong_secret_ends_the_stranger_and_nothing_else(tmp_path):
    with circuits(tmp_path, ports(1)) as both:
        both.start_fast()
        anchor = both.start_anchor()
        both.wait_for_priors(1)
        stranger = both.start_anchor(secret="a secret of another run")
        both.stop(stranger, code=1)
        both.wait(lambda now: now["num_refused"] == 1, "the refusal")
        with (
            socket.create_connection((HOST, both.ports[0])) as silent,
            socket.create_connection((HOST, both.ports[0])) as talking,
        ):
            talking.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            both.wait(lambda now: now["num_refused"] == 2, "the refusal of foreign bytes")
            progress = both.wait_for_priors(2)
            assert silent.recv(8) == b"HFMA\x00\x00\x00\x01"
        assert progress["generations"] == [1]
        both.finish()
        both.stop(anchor)
        logs = both.logs()
        assert "refused this anchor's secret" in logs and "does not know this run's secret" in logs
        assert "a secret" not in logs


def test_a_second_anchor_waits_until_the_first_is_gone(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        both.start_fast()
        first = both.start_anchor()
        both.wait_for_priors(1)
        second = both.start_anchor()
        both.wait(lambda now: now["num_refused"] >= 2, "refusals of the second anchor")
        assert both.progress()["generations"] == [1, 1] and both.progress()["peer_pid"] == first.pid
        os.kill(first.pid, signal.SIGKILL)
        both.wait(lambda now: now["peer_pid"] == second.pid, "the second anchor")
        both.wait_for_priors(2)
        both.finish()
        both.stop(second)


def test_the_fast_circuit_ends_in_the_middle_of_a_snapshot(tmp_path):
    with circuits(tmp_path, ports(2)) as both:
        both.start_fast(size=500_000, rate_bits_per_second=1e6)  # 8 s for a snapshot in full
        anchor = both.start_anchor()
        both.wait(lambda now: now["sent_bytes"] > 40_000, "the beginning of a snapshot")
        both.finish()
        both.stop(anchor)
        assert both.progress()["num_applied"] == 0
