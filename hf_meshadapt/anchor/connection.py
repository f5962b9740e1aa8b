"""One authenticated connection without blocking: messages in, messages out, bulk paced and behind control words."""

from __future__ import annotations

import contextlib
import math
import socket
from collections import deque
from dataclasses import dataclass

from .frames import BULK, CONTROL, MAX_FRAME_BYTES, Assembler, frame
from .messages import Message, encode
from .pacing import TokenBucket

MIN_CHUNK_BYTES = 1024
# Where there is a rate, a chunk takes no longer: the pipeline's messages may have to wait for one.
MAX_CHUNK_SECONDS = 0.02
NUM_BURST_CHUNKS = 2  # what a thread that wakes late may catch up with
_LINUX_BULK_PRIORITY = 2  # TC_PRIO_BULK of linux/pkt_sched.h


class ConnectionLost(ConnectionError):
    """The peer is gone, silent, or no longer understood; says which."""


@dataclass(frozen=True)
class LinkOptions:
    """How an end of the link behaves.

    Attributes:
        heartbeat_seconds: after so long without a word, send one.
        silence_seconds: a peer from whom nothing came for so long is gone.
        handshake_seconds: deadline of a connection attempt, and of its handshake.
        retry_seconds: pause between two attempts to connect.
        reconnect_seconds: the anchor gives up on a fast circuit that it could not reach for so long.
        chunk_bytes: bulk is handed to the kernel in pieces of this size.
        rate_bits_per_second: bulk flows no faster than this; None for as fast as the connection takes it.
        max_message_bytes: larger messages are refused unread; above the model's weights in float32.

    Raises:
        ValueError: a value that cannot work.
    """

    heartbeat_seconds: float = 5.0
    silence_seconds: float = 30.0
    handshake_seconds: float = 10.0
    retry_seconds: float = 1.0
    reconnect_seconds: float = 600.0
    chunk_bytes: int = 64 * 1024
    rate_bits_per_second: float | None = None
    max_message_bytes: int = 16 * 1024**3

    def __post_init__(self):
        for name in ("heartbeat_seconds", "handshake_seconds", "retry_seconds", "reconnect_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.silence_seconds >= 2 * self.heartbeat_seconds:
            raise ValueError(
                f"silence_seconds={self.silence_seconds} must be at least twice heartbeat_seconds="
                f"{self.heartbeat_seconds}, or a peer that is well would be dropped"
            )
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_FRAME_BYTES:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} must lie in {MIN_CHUNK_BYTES}..{MAX_FRAME_BYTES}")
        if self.rate_bits_per_second is not None and not self.rate_bits_per_second >= self.min_rate_bits_per_second:
            raise ValueError(
                f"rate_bits_per_second={self.rate_bits_per_second} must be at least "
                f"{self.min_rate_bits_per_second:g}, or None for no limit: below it the peer would take the pauses "
                "between chunks for silence; raise silence_seconds to go slower"
            )
        if not self.max_message_bytes > 0:
            raise ValueError(f"max_message_bytes={self.max_message_bytes} must be above 0")

    @property
    def min_rate_bits_per_second(self) -> float:
        return 8 * 2 * MIN_CHUNK_BYTES / self.silence_seconds

    @property
    def paced_chunk_bytes(self) -> int:
        """Bytes of a chunk at this rate."""
        if self.rate_bits_per_second is None:
            return self.chunk_bytes
        in_time = int(self.rate_bits_per_second / 8 * MAX_CHUNK_SECONDS)
        return max(MIN_CHUNK_BYTES, min(self.chunk_bytes, in_time))


class Connection:
    """A connected socket and the state of both directions. One thread uses it.

    Bulk is acknowledged by the peer's `received`; until then the next may not start, so that what waits is one message
    and not a queue that ages.

    Args:
        sock: connected; made non-blocking here, closed by `close`.
        now: seconds of the monotonic clock that all calls go by.

    Attributes:
        sent_bytes, received_bytes: of the stream, frames and headers included.
    """

    def __init__(self, sock: socket.socket, options: LinkOptions, now: float):
        self._sock = sock
        sock.setblocking(False)
        self._options = options
        self._assembler = Assembler(options.max_message_bytes)
        self._bucket = TokenBucket(options.rate_bits_per_second, NUM_BURST_CHUNKS * options.paced_chunk_bytes, now)
        self._words: deque[bytes] = deque()
        self._bulk = memoryview(b"")  # what of the bulk message is not framed yet
        self._frame = memoryview(b"")  # what of the current frame the kernel has not taken yet
        self._heard_at = self._spoke_at = now
        self._finishing = False
        self.unacknowledged_version: int | None = None
        self.sent_bytes = self.received_bytes = 0
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def bulk_free(self) -> bool:
        """The last bulk message has arrived whole: another may start."""
        return self.unacknowledged_version is None and not self.closed

    def say(self, message: Message) -> None:
        """Queues a message without tensors, ahead of bulk; nothing follows `finish`."""
        if self._finishing:
            return
        self._words.append(frame(CONTROL, encode(message)))

    def start_bulk(self, message: Message) -> None:
        """Starts a message with tensors and a version; only while `bulk_free`."""
        assert self.bulk_free, "the last bulk message has not been acknowledged"
        self._bulk = memoryview(encode(message))
        self.unacknowledged_version = message.fields["version"]

    def read(self, now: float) -> list[Message]:
        """Takes what has arrived; returns the messages that it completes, acknowledgements taken out.

        Raises:
            ConnectionLost: the peer closed or the connection broke.
            MessageError: the peer sends what cannot be read.
        """
        try:
            data = self._sock.recv(MAX_FRAME_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        if not data:
            raise ConnectionLost("the peer closed the connection")
        self._heard_at = now
        self.received_bytes += len(data)
        messages = []
        for message in self._assembler.feed(data):
            if message.kind != "received":
                messages.append(message)
            elif message.fields["version"] == self.unacknowledged_version and not self._bulk:
                self.unacknowledged_version = None
        return messages

    def write_wait_seconds(self, now: float) -> float | None:
        """Until there is something that may be written, 0 for now; None when there is nothing to write."""
        if self._frame or self._words:
            return 0.0
        if not self._bulk:
            return None
        return self._bucket.wait_seconds(min(len(self._bulk), self._options.paced_chunk_bytes), now)

    def write(self, now: float) -> None:
        """Hands the kernel one piece at most, if it takes one.

        Raises:
            ConnectionLost: the connection broke.
        """
        if not self._frame:
            self._next_frame(now)
        if not self._frame:
            return
        try:
            count = self._sock.send(self._frame)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        self._frame = self._frame[count:]
        self.sent_bytes += count
        self._bucket.spend(count, now)
        self._spoke_at = now
        if self._finishing and not self._frame and not self._words:
            self._sock.shutdown(socket.SHUT_WR)

    def _next_frame(self, now: float) -> None:
        if self._words:
            self._frame = memoryview(self._words.popleft())
        elif self._bulk and self.write_wait_seconds(now) == 0:
            size_bytes = min(len(self._bulk), self._options.paced_chunk_bytes)
            self._frame = memoryview(frame(BULK, self._bulk[:size_bytes]))
            # An empty view would keep the whole message alive.
            self._bulk = self._bulk[size_bytes:] or memoryview(b"")

    def beat(self, now: float) -> None:
        """Says a heartbeat when one is due. To be called after `read`: what has arrived unread is no silence.

        Raises:
            ConnectionLost: the peer has been silent for too long.
        """
        silent_seconds = now - self._heard_at
        if silent_seconds >= self._options.silence_seconds:
            raise ConnectionLost(f"nothing came from the peer for {silent_seconds:.1f} s")
        if now - self._spoke_at >= self._options.heartbeat_seconds:
            # A full socket takes no word either, and a queue of heartbeats would say no more than one.
            if not self._frame and not self._words:
                self.say(Message("heartbeat"))
            self._spoke_at = now

    def wait_seconds(self, now: float) -> float:
        """Until something falls due by itself: a heartbeat, the peer's silence, or bulk that was held back."""
        until_beat = self._spoke_at + self._options.heartbeat_seconds - now
        until_silence = self._heard_at + self._options.silence_seconds - now
        until_write = self.write_wait_seconds(now) or math.inf  # what waits for the socket alone has no time
        return max(0.0, min(until_beat, until_silence, until_write))

    def finish(self) -> None:
        """Says `done` as the last word, without the rest of a bulk message, and closes this direction after it."""
        self._bulk = memoryview(b"")
        self.say(Message("done"))
        self._finishing = True

    def close(self) -> None:
        self.closed = True
        close_socket(self._sock)


def tune(sock: socket.socket, options: LinkOptions) -> None:
    """Sets a TCP socket up for bulk beside urgent traffic, and for peers that vanish."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence_seconds = max(1, int(options.silence_seconds))
    tcp_settings = {
        "TCP_KEEPIDLE": max(1, silence_seconds // 2),
        "TCP_KEEPINTVL": max(1, silence_seconds // 6),
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * silence_seconds,
        # Data waiting in the kernel would stand before a heartbeat and, at the network card, before the pipeline.
        "TCP_NOTSENT_LOWAT": options.paced_chunk_bytes,
    }
    for name, value in tcp_settings.items():
        if hasattr(socket, name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "SO_PRIORITY"):
        # Linux's priority queues send the pipeline's packets first.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _LINUX_BULK_PRIORITY)


def close_socket(sock: socket.socket) -> None:
    """Ends a connection even where a forked process (a data loader's worker) holds a duplicate of the descriptor."""
    with contextlib.suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
