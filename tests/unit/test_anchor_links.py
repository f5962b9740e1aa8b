"""What the training loop and the anchor's loop call of their ends of the link, while the peer is stuck or absent."""

import os
import socket
import threading

import pytest
import torch

from hf_meshadapt.anchor.anchor_link import FIRST, AnchorLink, read_sources
from hf_meshadapt.anchor.connection import Connection, LinkOptions
from hf_meshadapt.anchor.fast_link import ANCHOR, NUM_HELD_PRIORS, FastLink, Source, listen
from hf_meshadapt.anchor.messages import Message, MessageError
from hf_meshadapt.anchor.snapshot import SnapshotEncoder
from hf_meshadapt.waiting import LinkError


def test_the_list_of_sources():
    assert read_sources([[0, 0, "", 5], [1, 0, "host", 6]]) == (Source(0, 0, "", 5), Source(1, 0, "host", 6))
    for value in (None, [], [[0, 0, "", "5"]], [[0, 0, 5]], [5], {"a": 1}, [[True, 0, "", 5]]):
        with pytest.raises(MessageError):
            read_sources(value)


@pytest.fixture
def stuck_link():
    """A link whose thread never runs, connected to a peer that never reads."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    source = Source(0, 0, "127.0.0.1", port)
    link = FastLink(listener, source, (source,), b"secret", SnapshotEncoder(0), LinkOptions())
    with socket.create_connection(("127.0.0.1", port)) as peer:
        link.connections[ANCHOR] = Connection(listener.accept()[0], link.options, 0.0)
        yield link, peer
        link.connections[ANCHOR].close()
    listener.close()


def finishes(function) -> bool:
    """Whether a call returns at all: one that blocks would never."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60.0)
    return not thread.is_alive()


def test_offer_and_poll_never_block_on_a_thread_that_is_stuck(stuck_link):
    link, _ = stuck_link
    offered = [{"w": torch.zeros(1)} for _ in range(3000)]  # more than the socket that wakes the thread holds

    def train():
        for step, snapshot in enumerate(offered):
            assert link.ready == (step == 0)
            assert link.offer(step, snapshot) and link.poll() is None

    assert finishes(train)
    assert link.num_replaced == 2999
    assert list(link._offered) == [(2999, offered[-1])]  # the newest replaced all others


def test_offer_and_poll_never_block_on_a_full_socket(stuck_link):
    link, _ = stuck_link
    connection = link.connections[ANCHOR]
    link.offer(0, {"w": torch.zeros(4_000_000)})

    def send_until_full():
        link.turn(0.0)
        sent_bytes = -1
        while connection.sent_bytes != sent_bytes:
            sent_bytes = connection.sent_bytes
            connection.write(0.0)
        assert link.offer(1, {"w": torch.ones(1)}) and link.poll() is None
        link.turn(1.0)  # does not start the next: the last is on its way

    assert finishes(send_until_full)
    assert 0 < connection.sent_bytes < 8_000_000
    assert [version for version, _ in link._offered] == [1] and not link.ready
    assert connection.unacknowledged_version == 0


def test_without_an_anchor_nothing_is_kept(stuck_link):
    link, _ = stuck_link
    link.offer(0, {"w": torch.zeros(1)})
    link.lost(ANCHOR, "test")
    assert not link._offered
    connection = link.connections.pop(ANCHOR)
    assert not link.offer(1, {"w": torch.zeros(1)}) and not link.ready and not link._offered
    link.connections[ANCHOR] = connection


def test_priors_wait_in_order_and_the_oldest_gives_way(stuck_link):
    link, _ = stuck_link
    for version in range(NUM_HELD_PRIORS + 2):
        link.arrived(ANCHOR, Message("prior", {"version": version, "stage": 0, "num_batches": version}))
    assert [link.poll().fields["version"] for _ in range(NUM_HELD_PRIORS)] == [2, 3, 4, 5]
    assert link.poll() is None and link.num_batches == 5
    for kind, fields in (("prior", {"version": 0, "stage": 1, "num_batches": 0}), ("snapshot", {}), ("welcome", {})):
        with pytest.raises(MessageError):
            link.arrived(ANCHOR, Message(kind, fields))


def test_priors_are_read_in_the_thread_and_what_cannot_be_is_said_where_they_are_taken(stuck_link):
    link, _ = stuck_link

    def read(message: Message) -> str:
        if message.fields["version"] == 1:
            raise ValueError("not finite")
        return f"prior {message.fields['version']}"

    link._read = read
    for version in (0, 1, 2):
        link.arrived(ANCHOR, Message("prior", {"version": version, "stage": 0, "num_batches": 0}))
    assert link.poll() == "prior 0"
    with pytest.raises(ValueError, match="not finite"):
        link.wait_for_prior(2, 5.0)
    assert link.wait_for_prior(2, 5.0) == "prior 2" and link.poll() is None


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_the_thread_takes_no_core_from_the_training_loop():
    listener = listen("127.0.0.1", 0)
    source = Source(0, 0, *listener.getsockname())
    link = FastLink(listener, source, (source,), b"secret", SnapshotEncoder(0), LinkOptions())
    policies: list[int] = []
    link.ended = lambda: policies.append(os.sched_getscheduler(0))
    link.start()
    link.close(20.0)
    listener.close()
    assert policies == [os.SCHED_BATCH] and os.sched_getscheduler(0) != os.SCHED_BATCH


def test_waits_have_deadlines_and_say_what_was_awaited(stuck_link):
    link, _ = stuck_link
    link.arrived(ANCHOR, Message("prior", {"version": 10, "stage": 0, "num_batches": 0}))
    link.arrived(ANCHOR, Message("prior", {"version": 20, "stage": 0, "num_batches": 0}))
    assert link.wait_for_prior(20, 5.0).fields["version"] == 20
    with pytest.raises(
        LinkError, match=r"stage 0 waited for the anchor's prior of step 30 \(deadline 0.05 s\): an anchor is"
    ):
        link.wait_for_prior(30, 0.05)
    link.wait_until_ready(5.0)
    connection = link.connections.pop(ANCHOR)
    with pytest.raises(LinkError, match=r"waited for an anchor .*no anchor is connected, 0 came so far"):
        link.wait_until_ready(0.05)
    link.connections[ANCHOR] = connection
    link.failure = RuntimeError("broken")
    with pytest.raises(LinkError, match="the link failed: broken"):
        link.wait_for_prior(30, 5.0)


def test_a_snapshot_that_must_not_be_sent_is_skipped_by_name(stuck_link, caplog):
    link, _ = stuck_link
    link.offer(3, {"layers.0": torch.tensor([float("nan")])})
    link.turn(0.0)
    assert link.ready and "did not send the snapshot of step 3" in caplog.text and "layers.0" in caplog.text


@pytest.fixture
def stuck_anchor_link():
    """An anchor's link whose thread never runs, connected to a fast circuit that never reads."""
    near, far = socket.socketpair()
    link = AnchorLink("127.0.0.1", 5000, b"secret", LinkOptions())
    link.connections[FIRST] = Connection(near, link.options, 0.0)
    link.begun(FIRST, link.connections[FIRST])
    link.arrived(FIRST, welcome([[0, 0, "", 5000]]))
    with far:
        yield link
    near.close()


def welcome(sources: list, stage: int = 0) -> Message:
    fields = {"stage": stage, "slice": 0, "generation": 1, "num_batches": 7, "sources": sources}
    return Message("welcome", fields)


def snapshot(version: int) -> Message:
    return SnapshotEncoder(0).encode(version, {"w": torch.zeros(1)})


def test_a_snapshot_is_acknowledged_when_it_is_taken_and_no_second_waits(stuck_anchor_link):
    link = stuck_anchor_link
    link.wait_for_sources(5.0)
    assert link.num_batches == 7 and link.take(0.0) is None and not link.newer_waits
    link.arrived(FIRST, snapshot(3))
    assert link.newer_waits
    with pytest.raises(MessageError, match="before the last one was acknowledged"):
        link.arrived(FIRST, snapshot(4))
    assert link.take(5.0).fields["version"] == 3 and not link.newer_waits
    assert [message.fields["version"] for _, message in link._taken] == [3]
    link.arrived(FIRST, snapshot(4))
    link.lost(FIRST, "test")
    assert link.take(0.0) is None and link.sources == ()


def test_a_prior_that_does_not_get_through_has_a_deadline(stuck_anchor_link):
    link = stuck_anchor_link
    assert link.send(0, {"version": 3, "num_batches": 8}, {"w": torch.zeros(1)})
    assert not link.send(1, {"version": 3, "num_batches": 8}, {})
    with pytest.raises(LinkError, match=r"waited for stage 0 .*to receive its prior \(deadline 0.05 s\)"):
        link.flush(0.05)
    link.drop(FIRST, "test")  # gone with its connection
    link.flush(5.0)


def test_what_a_fast_circuit_does_not_say(stuck_anchor_link):
    for message in (
        Message("prior"),
        Message("hello"),
        welcome([[1, 0, "", 5]]),
        welcome([]),
        welcome([[0, 0, "", 5]], 2),
    ):
        with pytest.raises(MessageError):
            stuck_anchor_link.arrived(FIRST, message)


def test_an_absent_fast_circuit_is_given_up_by_name():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, and nobody listens
        port = unused.getsockname()[1]
        options = LinkOptions(retry_seconds=0.02, reconnect_seconds=0.1)
        link = AnchorLink("127.0.0.1", port, b"secret", options)
        with pytest.raises(LinkError, match=rf"fast circuit at 127.0.0.1:{port} \(deadline 0.05 s\)"):
            link.wait_for_sources(0.05)
        link.start()
        for call in (lambda: link.take(60.0), lambda: link.wait_for_sources(60.0), lambda: link.flush(60.0)):
            with pytest.raises(LinkError, match=rf"could not reach the fast circuit at 127.0.0.1:{port} for 0.1 s"):
                call()
        link.close(5.0)


def test_an_error_in_the_thread_is_told_and_ends_nothing_else(caplog):
    class BrokenEncoder(SnapshotEncoder):
        def reset(self):
            raise RuntimeError("out of memory")

    listener = listen("127.0.0.1", 0)
    source = Source(0, 0, *listener.getsockname())
    link = FastLink(listener, source, (source,), b"secret", BrokenEncoder(0), LinkOptions())
    link.start()
    near, far = socket.socketpair()
    with near, far:
        link.hand_over(ANCHOR, near)
        with pytest.raises(LinkError, match="the link failed: out of memory"):
            link.wait_for_prior(0, 60.0)
        assert not link.offer(1, {}) and link.poll() is None and not link.ready
        assert "the anchor link of stage 0 ended by an error" in caplog.text
        link.close(5.0)


@pytest.mark.parametrize("done", [True, False])
def test_only_an_end_that_is_done_says_so(done):
    listener = listen("127.0.0.1", 0)
    source = Source(0, 0, *listener.getsockname())
    link = FastLink(listener, source, (source,), b"secret", SnapshotEncoder(0), LinkOptions(handshake_seconds=2.0))
    link.start()
    near, far = socket.socketpair()
    with near, far:
        link.hand_over(ANCHOR, near)
        far.settimeout(20.0)
        data = far.recv(65536)
        assert b'"welcome"' in data
        closing = threading.Thread(target=link.close, args=(20.0, done))
        closing.start()
        while part := far.recv(65536):
            data += part
        assert (b'"done"' in data) == done
        far.shutdown(socket.SHUT_RDWR)
        closing.join(20.0)
    assert not closing.is_alive()


def test_an_anchor_that_waits_says_so_every_second():
    """Its other ranks would take a silent one for dead."""
    waits = []
    link = AnchorLink("127.0.0.1", 1, b"secret", LinkOptions(), on_wait=lambda: waits.append(len(waits)))
    assert link.take(1.2) is None and waits == [0, 1]
    with pytest.raises(LinkError, match="waited for the fast circuit"):
        link.wait_for_sources(0.1)
    link.flush(0.1)
    assert waits == [0, 1, 2, 3]
