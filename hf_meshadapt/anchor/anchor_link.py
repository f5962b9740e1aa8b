"""The anchor's end of the link: it calls the fast circuit, all of its sources, and calls again when one is lost."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..waiting import LinkError
from .connection import Connection, LinkOptions, close_socket, tune
from .fast_link import Source
from .handshake import SECRET_VARIABLE, SecretError, introduce
from .messages import Message, MessageError
from .pump import Pump

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
FIRST = 0  # the key of the source that tells where the others listen; keys are places in its list
_REMEDY = f"Give both circuits of this run the same secret ({SECRET_VARIABLE}), and the anchor the right address"


class _Arrival(NamedTuple):
    connection: Connection
    message: Message


class AnchorLink(Pump):
    """Receives snapshots of all sources and sends each stage its priors.

    The first source admits one anchor at a time. When it is lost, all are given up and called anew: two anchors that
    hold half of the sources each would wait for one another.

    Args:
        host, port: of the fast circuit's first source.
        secret: from `checked_secret`.
        on_wait: is called, in the circuit's thread, before a wait and about every second of it.

    Attributes:
        sources: of the fast circuit, () until the first has been reached.
        num_batches: of the anchor's data that were used before, None until the first source has been reached.
        done: the fast circuit has said that it has finished.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, options: LinkOptions, on_wait: Callable[[], None] = lambda: None
    ):
        super().__init__(f"the anchor's link to {host}:{port}", options)
        self._first = Source(0, 0, host, port)
        self._secret, self._on_wait = secret, on_wait
        self._changed = threading.Condition()  # for the circuit's thread, of all below
        self._waiting: dict[int, _Arrival] = {}  # the snapshot of each source that has not been taken, oldest first
        self._taken: deque[_Arrival] = deque()  # those to be acknowledged
        self._outbox: dict[int, Message] = {}  # the next prior of each source
        self._calling: set[int] = set()
        self.sources: tuple[Source, ...] = ()
        self.num_batches: int | None = None
        self.done = False

    # The circuit's thread.

    def wait_for_sources(self, timeout_seconds: float) -> None:
        """Waits until `sources` and `num_batches` are known.

        Raises:
            LinkError: as `take`, or it took longer.
        """
        known = self._wait(lambda: self.sources or self._over, timeout_seconds)
        self._check()
        if not known:
            raise LinkError(
                f"the anchor waited for the fast circuit at {self._first.host}:{self._first.port} (deadline "
                f"{timeout_seconds:g} s). Check that it runs, that the port is open and that no other anchor is there"
            )

    @property
    def newer_waits(self) -> bool:
        """Every source has a snapshot that has not been taken."""
        return bool(self.sources) and len(self._waiting) == len(self.sources)

    def take(self, timeout_seconds: float) -> Message | None:
        """The next snapshot, which its source may then follow with another; None when none came in time or all is done.

        Raises:
            LinkError: the fast circuit refused this anchor or could not be reached for `reconnect_seconds`.
        """
        self._wait(lambda: self._waiting or self._over, timeout_seconds)
        with self._changed:
            self._check()
            if self.done or not self._waiting:
                return None
            arrival = self._waiting.pop(next(iter(self._waiting)))
            self._taken.append(arrival)
        self.wake()
        return arrival.message

    def send(self, stage: int, fields: dict, tensors: dict[str, Tensor]) -> bool:
        """Sends a stage its prior, in the background; False where its source is not connected.

        Call `flush` between two priors of a stage.

        Raises:
            LinkError: as `take`.
        """
        self._check()
        for key, source in enumerate(self.sources):
            if (source.stage, source.slice) == (stage, 0) and key in self.connections:
                self._outbox[key] = Message("prior", {"stage": stage, **fields}, tensors)
                self.wake()
                return True
        return False

    def flush(self, timeout_seconds: float) -> None:
        """Waits until what was sent has arrived, or its connection is lost.

        Raises:
            LinkError: as `take`, or it took longer.
        """
        arrived = self._wait(lambda: not self._unsent() or self._over, timeout_seconds)
        self._check()
        if not arrived:
            raise LinkError(
                f"the anchor waited for {', '.join(map(str, self._unsent()))} to receive its prior (deadline "
                f"{timeout_seconds:g} s). Check the link's speed and rate limit"
            )

    def _wait(self, condition: Callable[[], object], timeout_seconds: float) -> bool:
        """Waits until the condition holds; False when the time was over before."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._on_wait()
            left = deadline - time.monotonic()
            with self._changed:
                if self._changed.wait_for(condition, max(0.0, min(left, WAIT_SECONDS))):
                    return True
            if left <= WAIT_SECONDS:
                return False

    @property
    def _over(self) -> bool:
        return self.done or self.failure is not None

    def _unsent(self) -> list[Source]:
        busy = {key for key, one in list(self.connections.items()) if not one.bulk_free} | set(self._outbox)
        return [self.sources[key] for key in sorted(busy) if key < len(self.sources)]

    def _check(self) -> None:
        if self.failure is not None:
            raise LinkError(str(self.failure)) from self.failure

    # The thread.

    def turn(self, now: float) -> None:
        for key in self._wanted() - self._calling - set(self.connections):
            self._calling.add(key)
            threading.Thread(target=self._call, args=(key, self._address(key)), daemon=True).start()
        while self._taken:
            connection, message = self._taken.popleft()
            if not connection.closed:
                connection.say(Message("received", {"version": message.fields["version"]}))
        for key in list(self._outbox):
            connection = self.connections.get(key)
            if connection is None:
                del self._outbox[key]
            elif connection.bulk_free:
                connection.start_bulk(self._outbox[key])
                del self._outbox[key]
        with self._changed:
            self._changed.notify_all()

    def ended(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wanted(self) -> set[int]:
        """Sources to be connected to: the first alone until it has said which others there are."""
        return set(range(len(self.sources))) if FIRST in self.connections and self.sources else {FIRST}

    def _address(self, key: int) -> tuple[str, int]:
        if key == FIRST:  # what the user gave: the fast circuit's own name for itself may mean nothing here
            return self._first.host, self._first.port
        return self.sources[key].host or self._first.host, self.sources[key].port

    def _call(self, key: int, address: tuple[str, int]) -> None:
        """Connects, in a thread of its own: an attempt that hangs must not silence the other connections."""
        deadline = time.monotonic() + self.options.reconnect_seconds
        while not self._closing.is_set() and (key == FIRST or FIRST in self.connections):
            try:
                self.hand_over(key, self._connect(address))
                return  # `begun` ends the call: until then, none other may start
            except SecretError as error:
                self.fail(LinkError(f"the anchor was turned away at {address[0]}:{address[1]}: {error}. {_REMEDY}"))
            except OSError as error:
                if time.monotonic() > deadline:
                    self.fail(LinkError(self._unreachable(address, error)))
            self._closing.wait(self.options.retry_seconds)
        self._calling.discard(key)
        self.wake()

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        sock = socket.create_connection(address, timeout=self.options.handshake_seconds)
        try:
            tune(sock, self.options)
            introduce(sock, self._secret, self.options.handshake_seconds)
        except OSError:
            close_socket(sock)
            raise
        return sock

    def _unreachable(self, address: tuple[str, int], error: OSError) -> str:
        return (
            f"the anchor could not reach the fast circuit at {address[0]}:{address[1]} for "
            f"{self.options.reconnect_seconds:g} s: {error}. Check that it runs and that the port is open; if it has "
            "ended, all is well"
        )

    def begun(self, key: int, connection: Connection) -> None:
        self._calling.discard(key)
        if key != FIRST and FIRST not in self.connections:
            self.drop(key, "the first source is lost")
            return
        connection.say(Message("hello", {"pid": os.getpid()}))

    def lost(self, key: int, reason: str) -> None:
        if self.done or self._closing.is_set():
            return
        self._outbox.pop(key, None)
        with self._changed:
            self._waiting.pop(key, None)  # the source will begin anew, in full
        logger.warning("the anchor lost %s: %s", self.sources[key] if key < len(self.sources) else self.name, reason)
        if key == FIRST:
            self.sources = ()
            for other in list(self.connections):
                self.drop(other, "the first source is lost")

    def arrived(self, key: int, message: Message) -> None:
        if message.kind == "welcome":
            self._welcomed(key, message)
        elif message.kind == "snapshot":
            with self._changed:
                if key in self._waiting:
                    raise MessageError("a snapshot came before the last one was acknowledged")
                self._waiting[key] = _Arrival(self.connections[key], message)
        elif message.kind == "done":
            self.done = True
            self._closing.set()
        elif message.kind != "heartbeat":
            raise MessageError(f"a fast circuit does not send {message.kind} messages")

    def _welcomed(self, key: int, message: Message) -> None:
        if key == FIRST:
            self.sources = read_sources(message.fields.get("sources"))
            self.num_batches = message.fields["num_batches"]
        source = self.sources[key]
        if (message.fields["stage"], message.fields["slice"]) != (source.stage, source.slice):
            raise MessageError(f"stage {message.fields['stage']} answers where {source} should listen")


def read_sources(value: object) -> tuple[Source, ...]:
    """The list that a welcome carries.

    Raises:
        MessageError: it is not one.
    """
    if not isinstance(value, list) or not value:
        raise MessageError("the first source did not say where the others listen")
    sources = []
    for row in value:
        if not isinstance(row, list) or [type(entry) for entry in row] != [int, int, str, int]:
            raise MessageError(f"{row!r} is no source: stage, slice, host, port are expected")
        sources.append(Source(*row))
    return tuple(sources)
