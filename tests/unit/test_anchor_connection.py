"""One connection of the anchor link, with a clock of the test's own: pacing, order, acknowledgements, deadlines."""

import contextlib
import select
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.anchor.connection import (
    NUM_BURST_CHUNKS,
    Connection,
    ConnectionLost,
    LinkOptions,
    close_socket,
    tune,
)
from hf_meshadapt.anchor.frames import FRAME_HEAD_BYTES
from hf_meshadapt.anchor.handshake import (
    GREETING,
    MAC_BYTES,
    NONCE_BYTES,
    SECRET_VARIABLE,
    HandshakeError,
    SecretError,
    checked_secret,
    greet,
    introduce,
    new_secret,
)
from hf_meshadapt.anchor.messages import Message, MessageError
from hf_meshadapt.anchor.pacing import TokenBucket


@contextlib.contextmanager
def sockets():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


@contextlib.contextmanager
def connections(**options):
    with sockets() as (near, far):
        options = LinkOptions(**options)
        yield Connection(near, options, now=0.0), Connection(far, options, now=0.0)


def prior(version: int, size: int) -> Message:
    return Message("prior", {"version": version, "stage": 0, "num_batches": 0}, {"w": torch.zeros(size)})


def pass_all(sender: Connection, receiver: Connection, now: float = 0.0) -> list[Message]:
    """Moves all that may be moved at this time."""
    messages = []
    while sender.write_wait_seconds(now) == 0 or receiver.received_bytes < sender.sent_bytes:
        sender.write(now)
        readable, _, _ = select.select([receiver], [], [], 0.1)  # the kernel may take a moment
        if readable:
            messages += receiver.read(now)
    return messages


@settings(max_examples=100, deadline=None)
@given(
    rate=st.floats(1e3, 1e9),
    burst_bytes=st.integers(1024, 65536),
    pauses=st.lists(st.floats(0, 10), min_size=1, max_size=30),
    size_bytes=st.integers(1, 1024),
)
def test_the_bucket_lets_no_more_than_rate_and_burst_pass(rate, burst_bytes, pauses, size_bytes):
    bucket, now, passed_bytes = TokenBucket(rate, burst_bytes, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        while bucket.wait_seconds(size_bytes, now) == 0:
            bucket.spend(size_bytes, now)
            passed_bytes += size_bytes
        assert passed_bytes <= burst_bytes + rate / 8 * now + 1
        wait_seconds = bucket.wait_seconds(size_bytes, now)
        assert wait_seconds > 0
        now += wait_seconds * (1 + 1e-6) + 1e-9
        assert bucket.wait_seconds(size_bytes, now) == 0


def test_no_rate_is_no_limit_and_urgent_bytes_are_paid_later():
    assert TokenBucket(None, 1, 0.0).wait_seconds(10**9, 0.0) == 0
    bucket = TokenBucket(8.0, 10, 0.0)
    bucket.spend(30, 0.0)
    assert bucket.wait_seconds(10, 0.0) == 30
    assert bucket.wait_seconds(10, 30.0) == 0


def test_bulk_flows_at_its_rate_and_words_pass_it():
    with connections(rate_bits_per_second=8 * 400_000) as (sender, receiver):
        message, tick_seconds = prior(5, 50_000), 0.02
        chunk_bytes = sender._options.paced_chunk_bytes
        assert chunk_bytes == 400_000 * tick_seconds
        burst_bytes = NUM_BURST_CHUNKS * (chunk_bytes + FRAME_HEAD_BYTES)
        sender.start_bulk(message)
        assert pass_all(sender, receiver) == []
        assert chunk_bytes < sender.sent_bytes <= burst_bytes
        assert 0 < sender.write_wait_seconds(0.0) <= 1.01 * tick_seconds
        sender.say(Message("heartbeat"))
        assert [one.kind for one in pass_all(sender, receiver)] == ["heartbeat"]
        for tick in range(1, 40):
            received = pass_all(sender, receiver, now=tick * tick_seconds)
            assert sender.sent_bytes <= burst_bytes + chunk_bytes * tick + 100  # the heartbeat
            if received:
                break
        assert [one.kind for one in received] == ["prior"] and torch.equal(
            received[0].tensors["w"], message.tensors["w"]
        )
        assert tick in (23, 24, 25)


def test_a_full_socket_neither_blocks_nor_loses():
    with connections() as (sender, receiver):
        message = prior(1, 4_000_000)
        sender.start_bulk(message)
        sent_bytes = -1
        while sender.sent_bytes != sent_bytes:  # until the kernel takes no more: the peer reads nothing
            sent_bytes = sender.sent_bytes
            sender.write(0.0)
        assert sent_bytes < 16_000_000
        sender.beat(10.0)
        sender.say(Message("heartbeat"))
        received = pass_all(sender, receiver)
        assert sorted(one.kind for one in received) == ["heartbeat", "prior"]
        assert receiver.received_bytes == sender.sent_bytes


def test_the_next_bulk_waits_for_the_last_to_be_acknowledged():
    with connections() as (sender, receiver):
        sender.start_bulk(prior(5, 10))
        for version in (5, 4):  # before it is sent, and of another
            receiver.say(Message("received", {"version": version}))
            assert pass_all(receiver, sender) == []
            assert not sender.bulk_free
            pass_all(sender, receiver)
        with pytest.raises(AssertionError):
            sender.start_bulk(prior(6, 10))
        receiver.say(Message("received", {"version": 5}))
        assert pass_all(receiver, sender) == [] and sender.bulk_free
        sender.start_bulk(prior(6, 10))


def test_heartbeats_and_silence():
    with connections(heartbeat_seconds=2.0, silence_seconds=6.0) as (sender, receiver):
        sender.beat(1.0)
        assert sender.wait_seconds(1.0) == 1.0
        assert sender.write_wait_seconds(1.0) is None
        sender.beat(2.0)
        assert [one.kind for one in pass_all(sender, receiver, now=2.0)] == ["heartbeat"]
        receiver.beat(5.0)
        assert receiver.wait_seconds(5.0) == 2.0 and receiver.wait_seconds(100.0) == 0.0
        with pytest.raises(ConnectionLost, match="nothing came from the peer for 6.5 s"):
            sender.beat(6.5)
        receiver.beat(7.9)  # it heard the heartbeat
        with pytest.raises(ConnectionLost):
            receiver.beat(8.0)


def test_bytes_of_a_long_message_are_a_sign_of_life():
    with connections(rate_bits_per_second=8 * 10_000, heartbeat_seconds=2.0, silence_seconds=6.0) as (
        sender,
        receiver,
    ):
        sender.start_bulk(prior(1, 50_000))
        for second in range(15):
            assert pass_all(sender, receiver, now=second) == []
            receiver.beat(second)


def test_heartbeats_do_not_pile_up_before_a_stopped_peer():
    with connections(heartbeat_seconds=1.0, silence_seconds=100.0) as (sender, _):
        for second in range(50):
            sender.beat(second)
        sender.write(50.0)
        assert sender.write_wait_seconds(50.0) is None


def test_a_lost_or_foreign_peer_is_told_apart_from_an_idle_one():
    with connections() as (near, far):
        assert near.read(0.0) == []
        far.close()
        with pytest.raises(ConnectionLost, match="closed"):
            near.read(0.0)
    with sockets() as (raw, far):
        connection = Connection(far, LinkOptions(), now=0.0)
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(MessageError):
            while True:
                connection.read(0.0)


def test_the_last_word_arrives_without_the_rest_of_a_long_message():
    with connections(rate_bits_per_second=8 * 10_000) as (sender, receiver):
        sender.start_bulk(prior(1, 50_000))
        pass_all(sender, receiver)
        sender.finish()
        kinds = []
        with pytest.raises(ConnectionLost, match="closed"):
            while True:
                sender.write(0.0)
                kinds += [one.kind for one in receiver.read(0.0)]
        assert kinds == ["done"]


def test_closing_reaches_the_peer_while_a_child_holds_the_descriptor():
    with sockets() as (near, far):
        with near.dup():
            close_socket(near)
            far.settimeout(5.0)
            assert far.recv(1) == b""


def test_sockets_are_tuned():
    with sockets() as (near, _):
        tune(near, LinkOptions(silence_seconds=30.0, chunk_bytes=65536))
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 65536


@pytest.mark.parametrize(
    "options,said",
    [
        (dict(heartbeat_seconds=0), "heartbeat_seconds=0"),
        (dict(heartbeat_seconds=5, silence_seconds=9), "silence_seconds=9 must be at least twice"),
        (dict(chunk_bytes=10), "chunk_bytes=10 must lie in"),
        (dict(rate_bits_per_second=100), "rate_bits_per_second=100 must be at least 546"),
        (dict(rate_bits_per_second=float("nan")), "rate_bits_per_second=nan"),
        (dict(max_message_bytes=0), "max_message_bytes=0"),
        (dict(reconnect_seconds=0), "reconnect_seconds=0"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(ValueError, match=said):
        LinkOptions(**options)


def meet(fast_secret: str, anchor_secret: str, admitted: bool = True) -> tuple:
    """How a handshake ends on both sides: None, or the error."""
    ends = {}

    def end(side, act, *args):
        try:
            ends[side] = act(*args)
        except OSError as error:
            ends[side] = error

    with sockets() as (near, far):
        admit = lambda: admitted  # noqa: E731
        fast = threading.Thread(target=end, args=("fast", greet, near, fast_secret.encode(), admit, 10.0))
        fast.start()
        end("anchor", introduce, far, anchor_secret.encode(), 10.0)
        fast.join()
    return ends["fast"], ends["anchor"]


def test_handshakes():
    assert meet("the same secret of both", "the same secret of both") == (None, None)
    fast, anchor = meet("one secret", "another secret")
    assert isinstance(fast, SecretError) and isinstance(anchor, SecretError)
    assert "secret" in str(anchor) and "one secret" not in f"{fast}{anchor}"
    fast, anchor = meet("the same", "the same", admitted=False)
    assert isinstance(fast, HandshakeError) and isinstance(anchor, HandshakeError) and "another anchor" in str(anchor)


def test_a_listener_without_the_secret_is_found_out():
    for verdict, error in ((b"A" + bytes(MAC_BYTES), SecretError), (b"", HandshakeError), (b"xx", HandshakeError)):
        with sockets() as (near, far):
            near.sendall(GREETING + bytes(NONCE_BYTES) + verdict)
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(error):
                introduce(far, b"a secret", 10.0)
    with sockets() as (near, far):
        near.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 4)
        with pytest.raises(SecretError, match="no fast circuit"):
            introduce(far, b"a secret", 10.0)


def test_a_proof_cannot_be_handed_back():
    """A stranger who lets the fast circuit and an anchor answer one another's role learns nothing that opens either."""
    with sockets() as (near, far), sockets() as (other_near, other_far):
        fast = threading.Thread(target=pytest.raises, args=(SecretError, greet, near, b"a secret", bool, 10.0))
        fast.start()
        greeting = far.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        anchor = threading.Thread(target=pytest.raises, args=(SecretError, introduce, other_near, b"a secret", 10.0))
        anchor.start()
        other_far.sendall(greeting)
        answer = other_far.recv(NONCE_BYTES + MAC_BYTES, socket.MSG_WAITALL)
        other_far.sendall(b"A" + answer[NONCE_BYTES:])
        far.sendall(answer[:NONCE_BYTES] + bytes(MAC_BYTES))
        assert far.recv(1 + MAC_BYTES, socket.MSG_WAITALL) == b"R" + bytes(MAC_BYTES)
        fast.join()
        anchor.join()


@pytest.mark.parametrize("sent", [b"", b"\0" * (NONCE_BYTES + MAC_BYTES - 1)], ids=["at once", "one byte short"])
def test_a_peer_that_stops_in_the_handshake_is_given_up(sent):
    with sockets() as (near, far):
        far.sendall(sent)
        with pytest.raises(TimeoutError):
            greet(near, b"a secret", bool, 0.2)


def test_secrets(monkeypatch):
    assert len(new_secret()) >= 32 and new_secret() != new_secret()
    monkeypatch.setenv(SECRET_VARIABLE, "from the environment")
    assert checked_secret(None) == b"from the environment"
    assert checked_secret("given as an argument") == b"given as an argument"
    for secret in ("", "short"):
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        with pytest.raises(ValueError, match=f"anchor_secret.*{SECRET_VARIABLE}"):
            checked_secret(None)
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(ValueError, match="anchor_secret has 0 characters"):
        checked_secret(None)
