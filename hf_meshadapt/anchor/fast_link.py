"""The fast circuit's end of the link: one per stage (and slice), on the rank that sends it.

The training loop calls `offer` and `poll`, which touch a queue each and never wait. All else happens in the thread.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..waiting import LinkError
from .admission import MAX_HANDSHAKES, Admission
from .connection import Connection, ConnectionLost, LinkOptions, close_socket
from .messages import Message, MessageError
from .pump import Pump

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
ANCHOR = "anchor"  # the key of the one connection
NUM_HELD_PRIORS = 4


class Encoder(Protocol):
    """Makes messages of snapshots; see `snapshot.SnapshotEncoder`."""

    def reset(self) -> None:
        """The peer has nothing (any more): the next snapshot goes out in full."""

    def encode(self, version: int, weights: dict[str, Tensor]) -> Message:
        """Raises ValueError for weights that must not be sent."""


@dataclass(frozen=True)
class Source:
    """One end of the fast circuit that sends snapshots.

    Attributes:
        stage: whose weights.
        slice: which part of them, of those that the stage's replicas share out; priors go to slice 0.
        host, port: where it listens; an empty host is the host of the first source.
    """

    stage: int
    slice: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"stage {self.stage} (slice {self.slice}, {self.host}:{self.port})"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one (`getsockname`).

    Raises:
        OSError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_HANDSHAKES)


class FastLink(Pump):
    """Sends one source's snapshots to whichever anchor comes, and keeps the priors that it returns.

    Args:
        listener: from `listen`; owned from now on.
        source: what is sent here.
        sources: all of the fast circuit, for the one that the anchor calls first (`sources[0]`, of slice 0); the others
            pass ().
        secret: from `checked_secret`.
        encoder: used in the thread only.
        num_batches: of the anchor's data that a resumed run has used already.
        read: a prior's message to what `poll` shall return, in the thread, where it costs the training loop nothing;
            raises ValueError for what must not be taken.

    Attributes:
        generation: anchors so far.
        peer_pid: process id of the last one, on its machine.
        num_batches: of the anchor's data, used for the priors so far.
        num_replaced: snapshots that a newer one replaced before they were sent.
        transfer_seconds: what the last snapshot took from its first byte to the anchor's word that it has arrived;
            None before.
    """

    def __init__(
        self,
        listener: socket.socket,
        source: Source,
        sources: tuple[Source, ...],
        secret: bytes,
        encoder: Encoder,
        options: LinkOptions,
        num_batches: int = 0,
        read: Callable[[Message], Any] = lambda message: message,
    ):
        super().__init__(f"the anchor link of stage {source.stage}", options)
        self.source, self._sources, self._encoder = source, sources, encoder
        self._read = read
        self._listener = listener
        listener.setblocking(False)
        # A deque of one is a slot in which the newest replaces what nobody has taken yet.
        self._offered: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=1)
        # Versions, and what was read or the error that it was.
        self._priors: deque[tuple[int, Any]] = deque(maxlen=NUM_HELD_PRIORS)
        self._changed = threading.Event()
        self._admission = Admission(self.name, secret, options, lambda sock: self.hand_over(ANCHOR, sock))
        self._sending = False  # from the moment a snapshot is taken from the slot until it has arrived
        self._sending_since = 0.0
        self.num_batches = num_batches
        self.generation = self.num_replaced = 0
        self.peer_pid: int | None = None
        self.transfer_seconds: float | None = None

    # The training loop: none of these waits, but for those that say so.

    @property
    def num_refused(self) -> int:
        """Connections that did not know the secret or came while an anchor was there."""
        return self._admission.num_refused

    @property
    def connected(self) -> bool:
        return bool(self.connections)

    @property
    def ready(self) -> bool:
        """An anchor is there, and whatever was offered has arrived."""
        return self.connected and not self._offered and not self._sending

    def offer(self, version: int, weights: dict[str, Tensor]) -> bool:
        """Gives a snapshot away, to be sent when the last has arrived; False where no anchor is there to get it.

        Args:
            version: optimizer steps taken so far.
            weights: copies that nobody writes to.
        """
        if not self.connected:
            return False
        if self._offered:
            self.num_replaced += 1
        self._offered.append((version, weights))
        self.wake()
        return True

    def poll(self) -> Any | None:
        """The oldest prior that has not been taken yet, None when there is none; raises ValueError as `read` did."""
        found = self._take_prior()
        return None if found is None else found[1]

    def _take_prior(self) -> tuple[int, Any] | None:
        try:
            version, prior = self._priors.popleft()
        except IndexError:
            return None
        if isinstance(prior, ValueError):
            raise prior
        return version, prior

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Waits for an anchor: for runs that must not begin without one.

        Raises:
            LinkError: none came in time.
        """
        self._wait(lambda: self.ready or None, "an anchor", timeout_seconds)

    def wait_for_prior(self, version: int, timeout_seconds: float) -> Any:
        """The prior of this version, older ones dropped: for runs that must not depend on the anchor's speed.

        Raises:
            LinkError: it did not come in time.
            ValueError: as `poll`.
        """

        def take() -> Any | None:
            while (found := self._take_prior()) is not None:
                if found[0] == version:
                    return found[1]
            return None

        return self._wait(take, f"the anchor's prior of step {version}", timeout_seconds)

    def _wait(self, take: Callable[[], Result | None], awaited: str, timeout_seconds: float) -> Result:
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._changed.clear()
            if (result := take()) is not None:
                return result
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or self.failure is not None:
                raise LinkError(
                    f"stage {self.source.stage} waited for {awaited} (deadline {timeout_seconds:g} s): "
                    f"{self._state()}. Check that the anchor runs and reaches {self.source.host}:{self.source.port}, "
                    "or let training go on without waiting for it"
                )
            self._changed.wait(seconds_left)

    def _state(self) -> str:
        if self.failure is not None:
            return f"the link failed: {self.failure}"
        return "an anchor is connected" if self.connected else f"no anchor is connected, {self.generation} came so far"

    # The thread.

    def listener(self) -> socket.socket | None:
        return None if self._closing.is_set() else self._listener

    def ended(self) -> None:
        close_socket(self._listener)
        self._changed.set()

    def knocked(self, sock: socket.socket) -> None:
        self._admission.knocked(sock)

    def begun(self, key: str, connection: Connection) -> None:
        self.generation += 1
        self._encoder.reset()
        self._forget_sending()
        fields = {"stage": self.source.stage, "slice": self.source.slice, "generation": self.generation}
        sources = [[one.stage, one.slice, one.host, one.port] for one in self._sources]
        connection.say(Message("welcome", {**fields, "num_batches": self.num_batches, "sources": sources}))
        logger.info("%s has an anchor (generation %d)", self.name, self.generation)
        self._changed.set()

    def lost(self, key: str, reason: str) -> None:
        self._admission.free()
        self._forget_sending()
        if not self._closing.is_set():
            logger.warning("%s lost its anchor (generation %d): %s", self.name, self.generation, reason)

    def _forget_sending(self) -> None:
        """What was meant for an anchor that is gone would reach the next one stale."""
        self._offered.clear()
        self._sending = False

    def arrived(self, key: str, message: Message) -> None:
        connection = self.connections[key]
        if message.kind == "hello":
            self.peer_pid = message.fields["pid"]
        elif message.kind == "prior":
            if message.fields["stage"] != self.source.stage:
                raise MessageError(f"a prior of stage {message.fields['stage']} came to stage {self.source.stage}")
            self.num_batches = message.fields["num_batches"]
            self._priors.append((message.fields["version"], self._read_prior(message)))
            self._changed.set()
            connection.say(Message("received", {"version": message.fields["version"]}))
        elif message.kind == "done":
            raise ConnectionLost("it has finished")
        elif message.kind != "heartbeat":
            raise MessageError(f"an anchor does not send {message.kind} messages")

    def _read_prior(self, message: Message) -> Any:
        try:
            return self._read(message)
        except ValueError as error:  # for the training loop to say: the link is sound
            return error

    def turn(self, now: float) -> None:
        connection = self.connections.get(ANCHOR)
        if connection is None or not connection.bulk_free:
            return
        if self._sending:
            self.transfer_seconds, self._sending = time.monotonic() - self._sending_since, False
            self._changed.set()
        if not self._offered:
            return
        self._sending = True  # before the slot is empty: `ready` must not be true in between
        version, weights = self._offered.popleft()
        try:
            connection.start_bulk(self._encoder.encode(version, weights))
            self._sending_since = time.monotonic()
        except ValueError as error:
            self._sending = False
            logger.warning("%s did not send the snapshot of step %d: %s", self.name, version, error)
