"""Both ends of a new connection prove that they know the run's secret, which never travels: HMAC-SHA-256 challenges.

    fast -> anchor   greeting (8 bytes), nonce f (32)
    anchor -> fast   nonce a (32), HMAC(secret, "anchor" + f + a) (32)
    fast -> anchor   verdict (1), HMAC(secret, "fast" + f + a) (32), zeros unless accepted

Fixed sizes: nothing that a stranger sends is parsed. It authenticates the ends of the connection, after which bytes
are neither encrypted nor signed (docs/anchor.md).
Source: challenge-response with mutual authentication, Menezes, van Oorschot & Vanstone, Handbook of Applied
Cryptography (1996), 10.3.2, SKID3, which names the peers where this names the roles.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable

SECRET_VARIABLE = "HF_MESHADAPT_ANCHOR_SECRET"
MIN_SECRET_CHARACTERS = 16
GREETING = b"HFMA\x00\x00\x00\x01"  # the last byte is the handshake's version
NONCE_BYTES = 32
MAC_BYTES = 32
ACCEPTED, REFUSED, BUSY = b"A", b"R", b"B"


class HandshakeError(ConnectionError):
    """The peer broke off, took too long, or is busy: worth another try."""


class SecretError(ConnectionError):
    """The peer does not know this run's secret, or is no anchor link: trying again is no use."""


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def checked_secret(secret: str | None) -> bytes:
    """The secret as bytes, from the environment (`SECRET_VARIABLE`) where it is None.

    Raises:
        ValueError: there is none, or it is too short to be one.
    """
    secret = os.environ.get(SECRET_VARIABLE) if secret is None else secret
    if not secret or len(secret) < MIN_SECRET_CHARACTERS:
        raise ValueError(
            f"anchor_secret has {len(secret or '')} characters and needs {MIN_SECRET_CHARACTERS} or more: set "
            f"{SECRET_VARIABLE} to one random string for the fast circuit and its anchor, another for every run "
            "(openssl rand -hex 32)"
        )
    return secret.encode()


def greet(sock: socket.socket, secret: bytes, admit: Callable[[], bool], timeout_seconds: float) -> None:
    """The fast circuit's part, on a blocking socket.

    Args:
        admit: asked once the peer has proved itself, so that strangers occupy nothing; False turns it away as busy.

    Raises:
        SecretError: wrong secret.
        HandshakeError: busy.
        OSError: the connection broke, or `timeout_seconds` for the whole handshake passed.
    """
    deadline = time.monotonic() + timeout_seconds
    fast_nonce = secrets.token_bytes(NONCE_BYTES)
    _send(sock, GREETING + fast_nonce, deadline)
    answer = _receive(sock, NONCE_BYTES + MAC_BYTES, deadline)
    anchor_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _mac(secret, b"anchor", fast_nonce, anchor_nonce)):
        _send(sock, REFUSED + bytes(MAC_BYTES), deadline)
        raise SecretError("it does not know this run's secret")
    if not admit():
        _send(sock, BUSY + bytes(MAC_BYTES), deadline)
        raise HandshakeError("another anchor holds the link")
    _send(sock, ACCEPTED + _mac(secret, b"fast", fast_nonce, anchor_nonce), deadline)


def introduce(sock: socket.socket, secret: bytes, timeout_seconds: float) -> None:
    """The anchor's part, on a blocking socket.

    Raises:
        SecretError: the peer refused our secret, does not know it, or is something else.
        HandshakeError: the fast circuit has another anchor.
        OSError: the connection broke, or `timeout_seconds` for the whole handshake passed.
    """
    deadline = time.monotonic() + timeout_seconds
    greeting = _receive(sock, len(GREETING) + NONCE_BYTES, deadline)
    if greeting[: len(GREETING)] != GREETING:
        raise SecretError("what listens there is no fast circuit of this version of hf_meshadapt")
    fast_nonce, anchor_nonce = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    _send(sock, anchor_nonce + _mac(secret, b"anchor", fast_nonce, anchor_nonce), deadline)
    answer = _receive(sock, 1 + MAC_BYTES, deadline)
    if answer[:1] == REFUSED:
        raise SecretError("the fast circuit refused this anchor's secret")
    if answer[:1] == BUSY:
        raise HandshakeError("the fast circuit has another anchor")
    if answer[:1] != ACCEPTED or not hmac.compare_digest(answer[1:], _mac(secret, b"fast", fast_nonce, anchor_nonce)):
        raise SecretError("what listens there does not know this run's secret")


def _mac(secret: bytes, role: bytes, fast_nonce: bytes, anchor_nonce: bytes) -> bytes:
    # The role keeps a proof from being handed back to the end that asked for it.
    return hmac.new(secret, role + fast_nonce + anchor_nonce, hashlib.sha256).digest()


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_seconds_left(deadline))
    sock.sendall(data)


def _receive(sock: socket.socket, size_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size_bytes:
        sock.settimeout(_seconds_left(deadline))
        part = sock.recv(size_bytes - len(data))
        if not part:
            raise HandshakeError("the connection closed during the handshake")
        data += part
    return data


def _seconds_left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the handshake took too long")
    return seconds
