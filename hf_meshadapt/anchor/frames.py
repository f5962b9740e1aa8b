"""Cuts messages into frames that share one byte stream, so that a word passes a long message, and puts them together.

    frame    lane (1 byte), payload bytes (4 bytes), payload

Frames of one lane, in order, make up its messages one after the other. Both lanes share a connection's order and its
fate: what had not arrived whole when the connection broke is gone with its `Assembler`.
"""

from __future__ import annotations

import struct

from .messages import PREFIX_BYTES, Message, MessageError, announced_bytes, decode

CONTROL = 0  # words without tensors: they pass before the next frame of bulk
BULK = 1  # snapshots and priors
MAX_CONTROL_BYTES = 64 * 1024
MAX_FRAME_BYTES = 1024 * 1024
_HEAD = struct.Struct("<BI")
FRAME_HEAD_BYTES = _HEAD.size


def frame(lane: int, payload: bytes | memoryview) -> bytes:
    """One frame of 1 to `MAX_FRAME_BYTES` bytes of payload."""
    assert 0 < len(payload) <= MAX_FRAME_BYTES, f"a frame of {len(payload)} bytes"
    return _HEAD.pack(lane, len(payload)) + payload


class Assembler:
    """Makes messages of a stream of bytes.

    Args:
        max_bulk_bytes: size of the largest message accepted on the bulk lane.

    Holds what has arrived of one frame and of one message per lane, and nothing that was only announced.
    """

    def __init__(self, max_bulk_bytes: int):
        self._max_bytes = {CONTROL: MAX_CONTROL_BYTES, BULK: max_bulk_bytes}
        self._stream = bytearray()
        self._lanes = {CONTROL: bytearray(), BULK: bytearray()}

    def feed(self, data: bytes) -> list[Message]:
        """Takes the stream's next bytes, any number of them; returns the messages that they complete.

        Raises:
            MessageError: the stream is not one of frames of messages; what follows it cannot be read.
        """
        self._stream += data
        messages = []
        while len(self._stream) >= FRAME_HEAD_BYTES:
            lane, payload_bytes = _HEAD.unpack_from(self._stream)
            if lane not in self._lanes or not 0 < payload_bytes <= MAX_FRAME_BYTES:
                raise MessageError(f"no frame: lane {lane}, {payload_bytes} bytes")
            end = FRAME_HEAD_BYTES + payload_bytes
            if len(self._stream) < end:
                break
            self._lanes[lane] += self._stream[FRAME_HEAD_BYTES:end]
            del self._stream[:end]
            messages += self._completed(lane)
        return messages

    def _completed(self, lane: int) -> list[Message]:
        """The message that a lane's bytes make up, none while some are missing."""
        data = self._lanes[lane]
        if len(data) < PREFIX_BYTES:
            return []
        total_bytes = announced_bytes(memoryview(data)[:PREFIX_BYTES], self._max_bytes[lane])
        if len(data) < total_bytes:
            return []
        self._lanes[lane] = bytearray()
        return [decode(data, self._max_bytes[lane])]
