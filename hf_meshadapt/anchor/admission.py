"""Who knocks at the fast circuit's end of a link proves the run's secret; one at a time is let in."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from .connection import LinkOptions, close_socket, tune
from .handshake import HandshakeError, SecretError, greet

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 8  # strangers who connect and say nothing hold one each until its deadline


class Admission:
    """Handshakes, each in a thread of its own: a stranger's silence must not hold the anchor up.

    Args:
        name: of the link, for logs.
        secret: from `checked_secret`.
        let_in: takes the socket of who has proved the secret.

    Attributes:
        num_refused: connections that did not know the secret or came while an anchor was there.
    """

    def __init__(self, name: str, secret: bytes, options: LinkOptions, let_in: Callable[[socket.socket], None]):
        self._name, self._secret, self._options, self._let_in = name, secret, options, let_in
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._lock = threading.Lock()
        self._taken = False  # an anchor holds the link, or is about to
        self.num_refused = 0

    def free(self) -> None:
        """The anchor that was let in is gone."""
        self._taken = False

    def knocked(self, sock: socket.socket) -> None:
        """Someone connected."""
        if not self._handshakes.acquire(blocking=False):
            close_socket(sock)
            return
        threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        claims: list[bool] = []

        def admit() -> bool:
            with self._lock:
                claims.append(not self._taken)
                self._taken = True
            return claims[0]

        peer = "someone"
        try:
            peer = sock.getpeername()[0]
            tune(sock, self._options)
            greet(sock, self._secret, admit, self._options.handshake_seconds)
            self._let_in(sock)
        except OSError as error:
            if any(claims):  # the connection broke after it was admitted
                self.free()
            close_socket(sock)
            if isinstance(error, SecretError | HandshakeError):
                self._count_refusal(peer, error)
        finally:
            self._handshakes.release()

    def _count_refusal(self, peer: str, error: OSError) -> None:
        with self._lock:
            self.num_refused += 1
            count = self.num_refused
        if count & (count - 1) == 0:  # 1, 2, 4, ...: a stranger must not fill the log
            logger.warning("%s refused a connection from %s (%d so far): %s", self._name, peer, count, error)
