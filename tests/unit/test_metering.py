"""Meters in one process: real loopback sockets, a hand-wound clock, the progress bar's line."""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hf_meshadapt import metering
from hf_meshadapt.figures import StepMeter, StepTotals, gather
from hf_meshadapt.metering import UNKNOWN_PEER, SocketMeter
from hf_meshadapt.progress import AnchorNews, MeshProgressCallback


def connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def send(near: socket.socket, far: socket.socket, size: int) -> None:
    near.sendall(bytes(size))
    far.recv(size, socket.MSG_WAITALL)


def sent_bytes(meter: SocketMeter, axis: str) -> int:
    return meter.read().get(axis, {}).get(UNKNOWN_PEER, 0)


def test_connections_belong_to_the_axis_in_whose_context_they_appeared():
    meter = SocketMeter()
    assert meter.available
    before = sent_bytes(meter, "other")
    outside = connect()
    with meter.axis("data_parallel"):
        outer = connect()
        with meter.axis("tied"):
            inner = connect()
        meter.read()  # files the new connection under other for now
    for pair, size in ((outside, 1000), (outer, 2000), (inner, 3000)):
        send(*pair, size)
    assert sent_bytes(meter, "other") - before == 1000
    assert meter.read()["data_parallel"] == {UNKNOWN_PEER: 2000}
    assert meter.read()["tied"] == {UNKNOWN_PEER: 3000}
    assert meter.retransmitted_bytes() >= 0
    for near, far in (outside, outer, inner):
        near.close(), far.close()
    assert meter.read()["tied"] == {UNKNOWN_PEER: 3000}, "counts outlive their connections"


def test_take_axis_bytes_counts_since_the_last_call_and_leaves_strangers_out():
    meter = SocketMeter()
    stranger = connect()
    with meter.axis("pipeline"):
        near, far = connect()
    send(*stranger, 50)
    send(near, far, 700)
    assert meter.take_axis_bytes() == {"other": 0, "pipeline": 700}
    send(near, far, 11)
    assert meter.take_axis_bytes()["pipeline"] == 11
    for connection in (*stranger, near, far):
        connection.close()


def test_reading_leaks_no_descriptor_and_changes_no_connection():
    meter = SocketMeter()
    near, far = connect()
    local, remote = socket.socketpair()
    meter.read()
    descriptors = sorted(os.listdir("/proc/self/fd"))
    socket.setdefaulttimeout(5)
    try:
        meter.read()
    finally:
        socket.setdefaulttimeout(None)
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert os.get_blocking(near.fileno()), "blocking mode is shared with duplicates"
    near.close()
    assert far.recv(1) == b"", "the peer sees the end at once"
    for connection in (far, local, remote):
        connection.close()


def test_reading_takes_less_than_a_millisecond():
    meter = SocketMeter()
    pairs = [connect() for _ in range(8)]
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        meter.read()
        costs.append(time.perf_counter() - started)
    assert min(costs) < 1e-3, min(costs)
    for near, far in pairs:
        near.close(), far.close()


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="axis='pp' is not one of pipeline, tied"):
        with SocketMeter().axis("pp"):
            pass


@pytest.mark.parametrize("missing", ["TCP_INFO", "proc", "short"])
def test_without_tcp_info_or_proc_the_meter_is_unavailable_and_empty(monkeypatch, missing):
    if missing == "TCP_INFO":
        monkeypatch.delattr(socket, "TCP_INFO")
    elif missing == "proc":
        monkeypatch.setattr(metering.os.path, "isdir", lambda path: False)
    else:
        monkeypatch.setattr(metering, "_TCP_INFO_LENGTH", 1000)
    meter = SocketMeter()
    assert not meter.available
    with meter.axis("pipeline"):
        near, far = connect()
    assert meter.read() == {} and meter.take_axis_bytes() == {} and meter.retransmitted_bytes() == 0
    near.close(), far.close()


def test_step_meter_with_a_hand_wound_clock():
    now = [100.0]
    meter = StepMeter(clock=lambda: now[0])
    for _ in range(2):
        meter.start_step()
        now[0] += 3.0
        with meter.waiting():
            now[0] += 1.0
        meter.add_tokens(60)
        meter.end_step()
        now[0] += 50.0  # an evaluation between steps
    meter.add_wait(0.5)
    totals = meter.take()
    assert totals == StepTotals(num_steps=2, tokens=120, step_seconds=8.0, wait_seconds=2.5)
    assert totals.summary() == {
        "tokens_per_second": 15.0,
        "step_seconds": 4.0,
        "compute_seconds": 2.75,
        "wait_seconds": 1.25,
    }
    assert meter.take() == StepTotals()
    assert StepTotals().summary()["tokens_per_second"] == 0.0


def test_what_is_apart_counts_neither_as_step_nor_as_wait():
    now = [0.0]
    meter = StepMeter(clock=lambda: now[0])
    meter.start_step()
    now[0] += 3.0
    with meter.apart():  # in the middle of a step
        with meter.waiting():
            now[0] += 10.0
        meter.add_wait(1.0)
        assert meter.wait_seconds == 11.0
    with meter.waiting():
        now[0] += 1.0
    meter.end_step()
    with pytest.raises(RuntimeError), meter.apart():  # an evaluation between steps that fails
        meter.add_wait(2.0)
        raise RuntimeError
    assert meter.take() == StepTotals(num_steps=1, step_seconds=4.0, wait_seconds=1.0)


def sum_of(*others):
    """A reduce over this rank and `others`, which are its own numbers times a factor."""
    return lambda mine: [value * (1 + sum(others)) for value in mine]


def test_gathering_divides_all_ranks_bytes_by_all_replicas_tokens():
    totals = StepTotals(num_steps=4, tokens=1000, step_seconds=10.0, wait_seconds=2.5)
    sent = {"pipeline": 400_000, "control": 1000, "other": 500}
    # Four equal ranks, two stages: two replicas of 1000 tokens each.
    logs = gather(totals, sent, sum_of(1, 1, 1), stages=2).logs()
    assert logs == {
        "tokens_per_second": 200.0,
        "wait_share": 0.25,
        "bytes_per_token": 4 * 401_500 / 2000,
        "bytes_per_token_pipeline": 800.0,
        "bytes_per_token_control": 2.0,
        "bytes_per_token_other": 1.0,
    }


def test_gathering_without_steps_or_without_a_meter_somewhere():
    assert gather(StepTotals(), {"pipeline": 5}, list, stages=1).logs() == {
        "tokens_per_second": 0.0,
        "wait_share": 0.0,
    }
    totals = StepTotals(1, 10, 1.0, 0.0)
    assert "bytes_per_token" not in gather(totals, None, list, stages=1).logs()

    def one_of_two_without(mine):
        return [2.0, 1.0, *[2 * value for value in mine[2:]]]

    assert "bytes_per_token" not in gather(totals, {"pipeline": 5}, one_of_two_without, stages=1).logs()


def test_metering_does_not_import_transformers():
    code = "import sys, hf_meshadapt.metering; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Bar:
    def __init__(self):
        self.lines, self.postfix = [], ""

    def write(self, text):
        self.lines.append(text)

    def set_postfix_str(self, text):
        self.postfix = text

    def update(self, steps):
        pass


def test_progress_bar_shows_the_latest_figures_on_rank_0_only():
    callback = MeshProgressCallback()
    state = SimpleNamespace(is_world_process_zero=True)
    callback.on_log(None, state, None, logs={"loss": 1.0})  # no bar: outside training or another rank
    callback.training_bar = bar = Bar()
    logs = {"loss": 1.23456, "tokens_per_second": 12345.6, "bytes_per_token": 408.2, "wait_share": 0.314}
    callback.on_log(None, state, None, logs=logs)
    assert bar.postfix == "loss 1.235, 12,346 tok/s, 408 B/tok, wait 31%"
    callback.on_log(None, state, None, logs={"eval_loss": 2.0, "loss": 1.0})
    assert bar.postfix == "loss 1, 12,346 tok/s, 408 B/tok, wait 31%"
    assert len(bar.lines) == 2


def test_progress_bar_says_at_every_step_how_it_goes_with_the_anchor():
    said = ["no anchor connected yet"]
    callback = MeshProgressCallback(lambda: said[-1])
    callback.training_bar = bar = Bar()
    callback.current_step = 0
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    callback.on_step_end(None, state, None)
    assert bar.postfix == "no anchor connected yet"
    said.append("prior of step 4, 7 steps old")
    callback.on_log(None, state, None, logs={"loss": 1.5})
    assert bar.postfix == "loss 1.5, prior of step 4, 7 steps old"


def test_news_of_the_anchor_come_once_and_on_rank_0_only():
    lines, phases = (
        [],
        ["no anchor connected yet"] * 2
        + ["anchor connected, no prior yet", "anchor connected, its priors are in use"],
    )
    news = AnchorNews(lambda: phases[0], lambda: "prior of step 4, 7 steps old", lines.append)
    for step in range(1, 9):
        for first in (False, True):
            news.on_step_end(None, SimpleNamespace(is_world_process_zero=first, global_step=step), None)
        del phases[: len(phases) > 1]
    assert [line.split(" (")[0] for line in lines] == [
        "step 1: no anchor connected yet",
        "step 3: anchor connected, no prior yet",
        "step 4: anchor connected, its priors are in use",
    ]
    assert lines[-1].endswith("(prior of step 4, 7 steps old)")


def test_bytes_that_are_counted_elsewhere_belong_to_their_axis():
    meter, counts = SocketMeter(), [100]
    meter.add_counter("anchor", lambda: counts[0])
    assert meter.take_axis_bytes()["anchor"] == 100
    counts[0] = 130
    assert meter.read()["anchor"] == {UNKNOWN_PEER: 130}
    assert meter.take_axis_bytes()["anchor"] == 30
