"""The background thread that moves the bytes of an end of the link."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable

from .connection import Connection, ConnectionLost, LinkOptions, close_socket
from .messages import Message, MessageError

logger = logging.getLogger(__name__)

Key = Hashable
MAX_WAIT_SECONDS = 1.0
ACCEPT_PAUSE_SECONDS = 0.05


class Pump:
    """One daemon thread and its connections, by key. Both ends of the link are subclasses: they say what happens when
    a connection begins, brings a message, or is lost.

    Only the thread touches connections. Other threads hand it sockets (`hand_over`) and wake it.

    Attributes:
        failure: what ended the thread, None while all is well.
    """

    def __init__(self, name: str, options: LinkOptions):
        self.name, self.options = name, options
        self.connections: dict[Key, Connection] = {}
        self.failure: BaseException | None = None
        self._past_sent_bytes = self._past_received_bytes = 0
        self._newcomers: deque[tuple[Key, socket.socket]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._closing = threading.Event()
        self._says_done = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # What a subclass says.

    def begun(self, key: Key, connection: Connection) -> None:
        """A connection has been made."""

    def arrived(self, key: Key, message: Message) -> None:
        """A message came; raises MessageError to drop the connection."""

    def lost(self, key: Key, reason: str) -> None:
        """A connection is gone, its half-arrived messages with it."""

    def turn(self, now: float) -> None:
        """Called in every turn of the thread, to give idle connections something to send."""

    def listener(self) -> socket.socket | None:
        """Where newcomers knock, while this end listens."""
        return None

    def knocked(self, sock: socket.socket) -> None:
        """Someone connected to the listener."""

    # What other threads call.

    @property
    def sent_bytes(self) -> int:
        """Over all connections so far."""
        return self._past_sent_bytes + sum(one.sent_bytes for one in list(self.connections.values()))

    @property
    def received_bytes(self) -> int:
        """Over all connections so far."""
        return self._past_received_bytes + sum(one.received_bytes for one in list(self.connections.values()))

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Ends the thread's current wait; never blocks."""
        with contextlib.suppress(OSError):  # it has been woken and has not looked yet, or has ended
            self._wake_writer.send(b"\0")

    def hand_over(self, key: Key, sock: socket.socket) -> None:
        """Gives the thread an authenticated socket."""
        if self._closing.is_set() or self.failure is not None:
            close_socket(sock)
            return
        self._newcomers.append((key, sock))
        self.wake()

    def close(self, timeout_seconds: float, done: bool = True) -> None:
        """Ends the thread: says `done` to the peers and waits until it is sent, so long at most.

        Args:
            done: False breaks off without a word, so that peers wait for a new attempt of this end.
        """
        self._says_done = done
        self._closing.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def fail(self, error: BaseException) -> None:
        """Ends the thread with this error, the first if there are several."""
        self.failure = self.failure or error
        self._closing.set()
        self.wake()

    # The thread.

    def _run(self) -> None:
        give_way()
        try:
            while not self._closing.is_set():
                self._turn()
            if self._says_done:
                self._say_done()
        except BaseException as error:
            self.failure = self.failure or error
            logger.exception("%s ended by an error", self.name)  # the training loop asks for no anchor and goes on
        finally:
            for key in list(self.connections):
                self.drop(key, "this end has closed")
            self._wake_reader.close()
            self._wake_writer.close()
            while self._newcomers:
                close_socket(self._newcomers.popleft()[1])
            self.ended()

    def ended(self) -> None:
        """The thread has ended, by `close` or by `failure`."""

    def _turn(self) -> None:
        now = time.monotonic()
        while self._newcomers:
            key, sock = self._newcomers.popleft()
            self.connections[key] = Connection(sock, self.options, now)
            self.begun(key, self.connections[key])
        self.turn(now)
        wait_seconds = min((one.wait_seconds(now) for one in self.connections.values()), default=MAX_WAIT_SECONDS)
        readable, writable = self._ready(min(wait_seconds, MAX_WAIT_SECONDS))
        now = time.monotonic()
        if self._wake_reader.fileno() in readable:
            self._clear_wakes()
        listener = self.listener()
        if listener is not None and listener.fileno() in readable:
            self._accept(listener)
        for key, connection in list(self.connections.items()):
            if not connection.closed:
                self._exchange(key, connection, readable, writable, now)

    def _ready(self, wait_seconds: float) -> tuple[set[int], set[int]]:
        """File descriptors that can be read and written."""
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        if (listener := self.listener()) is not None:
            poll.register(listener, select.POLLIN)
        now = time.monotonic()
        for connection in self.connections.values():
            may_write = connection.write_wait_seconds(now) == 0
            poll.register(connection, select.POLLIN | (select.POLLOUT if may_write else 0))
        events = poll.poll(1000 * wait_seconds)
        readable = {descriptor for descriptor, event in events if event & ~select.POLLOUT}
        return readable, {descriptor for descriptor, event in events if event & select.POLLOUT}

    def _exchange(self, key: Key, connection: Connection, readable: set[int], writable: set[int], now: float) -> None:
        descriptor = connection.fileno()
        try:
            if descriptor in readable:
                for message in connection.read(now):
                    self.arrived(key, message)
            if descriptor in writable and not connection.closed:
                connection.write(now)
            connection.beat(now)
        except (ConnectionLost, MessageError) as error:
            self.drop(key, str(error))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            time.sleep(ACCEPT_PAUSE_SECONDS)  # gone again, or no descriptors left, which would repeat at once
            return
        self.knocked(sock)

    def drop(self, key: Key, reason: str) -> None:
        """Closes a connection."""
        connection = self.connections.pop(key, None)
        if connection is None:
            return
        connection.close()
        self._past_sent_bytes += connection.sent_bytes
        self._past_received_bytes += connection.received_bytes
        self.lost(key, reason)

    def _clear_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _say_done(self) -> None:
        """Tells every peer that this end has finished, whatever else was on the way, and waits until they close.

        Closing with something unread would make the kernel throw away what it has not sent yet.
        """
        deadline = time.monotonic() + self.options.handshake_seconds
        for connection in self.connections.values():
            connection.finish()
        while self.connections and (now := time.monotonic()) < deadline:
            readable, writable = self._ready(min(deadline - now, MAX_WAIT_SECONDS))
            for key, connection in list(self.connections.items()):
                self._exchange(key, connection, readable, writable, now)


def give_way() -> None:
    """Lets the calling thread run only where no other would: waking it takes no core from the training loop."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
