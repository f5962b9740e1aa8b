"""What the fast circuit and the anchor say to each other: a JSON header and named tensors, as bytes.

    prefix   magic, protocol version, header bytes, body bytes, checksum of both, checksum of the prefix
    header   JSON object: `kind` and the fields of that kind
    body     safetensors, empty without tensors

Nothing is unpickled. Sizes are judged by the prefix alone, before anything of that size is allocated. Checksums find
accidents (CRC-32, as in Ethernet and gzip), not forgers.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

MAGIC = b"HFMA"
PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 4 * 1024 * 1024
# Fields that are required of each kind: whole numbers, zero or more. Versions are optimizer steps.
FIELDS = {
    "hello": ("pid",),
    "welcome": ("stage", "slice", "generation", "num_batches"),
    "snapshot": ("version", "stage", "slice", "num_slices", "value_bits", "code_bits"),
    "prior": ("version", "stage", "num_batches"),
    "received": ("version",),
    "heartbeat": (),
    "done": (),
}
_SIZES = struct.Struct("<4sHIQI")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _SIZES.size + _CHECKSUM.size


class MessageError(ValueError):
    """Bytes that are no message of this protocol, or one that is too large, damaged or lacks a field."""


@dataclass(frozen=True, eq=False)  # tensors do not compare to one truth
class Message:
    """One message.

    Attributes:
        kind: a key of `FIELDS`.
        fields: JSON values by name, those of `FIELDS[kind]` among them.
        tensors: by name; on the CPU after `decode`.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    """The message's bytes.

    Raises:
        MessageError: unknown kind, a missing field, or a header that is too long.
    """
    _check_fields(message.kind, message.fields)
    header = json.dumps({"kind": message.kind, **message.fields}, separators=(",", ":"), allow_nan=False).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise MessageError(f"a {message.kind} message's header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
    tensors = {name: tensor.detach().contiguous() for name, tensor in message.tensors.items()}
    body = safetensors.torch.save(tensors) if tensors else b""
    checksum = zlib.crc32(body, zlib.crc32(header))
    sizes = _SIZES.pack(MAGIC, PROTOCOL_VERSION, len(header), len(body), checksum)
    return b"".join((sizes, _CHECKSUM.pack(zlib.crc32(sizes)), header, body))


def announced_bytes(prefix: bytes | bytearray | memoryview, max_bytes: int) -> int:
    """Bytes of the whole message that begins with `prefix`, its first `PREFIX_BYTES` bytes.

    Raises:
        MessageError: foreign, damaged, of another protocol version, or larger than `max_bytes`.
    """
    magic, version, header_bytes, body_bytes, _ = _SIZES.unpack_from(prefix)
    if magic != MAGIC:
        raise MessageError(f"a message begins with {bytes(magic)!r}, not {MAGIC!r}: the peer is no anchor link")
    if zlib.crc32(prefix[: _SIZES.size]) != _CHECKSUM.unpack_from(prefix, _SIZES.size)[0]:
        raise MessageError("a message's prefix is damaged: its checksum differs")
    if version != PROTOCOL_VERSION:
        raise MessageError(
            f"the peer speaks protocol version {version}, this end {PROTOCOL_VERSION}: install the same hf_meshadapt"
        )
    total_bytes = PREFIX_BYTES + header_bytes + body_bytes
    if header_bytes > MAX_HEADER_BYTES or total_bytes > max_bytes:
        raise MessageError(
            f"a message of {total_bytes} bytes (header {header_bytes}) exceeds the {max_bytes} bytes "
            f"(header {MAX_HEADER_BYTES}) that this end accepts: are both ends given the same model?"
        )
    return total_bytes


def decode(data: bytes | bytearray | memoryview, max_bytes: int) -> Message:
    """The message whose bytes these are, all of them.

    Raises:
        MessageError: anything else.
    """
    if len(data) < PREFIX_BYTES:
        raise MessageError(f"{len(data)} bytes are no message: its prefix alone has {PREFIX_BYTES}")
    if announced_bytes(data, max_bytes) != len(data):
        raise MessageError(f"a message announces {announced_bytes(data, max_bytes)} bytes and has {len(data)}")
    _, _, header_bytes, _, checksum = _SIZES.unpack_from(data)
    content = memoryview(data)[PREFIX_BYTES:]
    if zlib.crc32(content) != checksum:
        raise MessageError("a message is damaged: its checksum differs")
    header = _read_header(bytes(content[:header_bytes]))
    kind = header.pop("kind", None)
    _check_fields(kind, header)
    return Message(kind, header, _read_tensors(bytes(content[header_bytes:])))


def _read_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message's header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise MessageError("a message's header is no JSON object")
    return header


def _read_tensors(data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data) if data else {}
    # Depending on what is wrong (sizes, a dtype that torch lacks), safetensors raises any of these.
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise MessageError(f"a message's tensors cannot be read: {error}") from error


def _check_fields(kind: Any, fields: dict[str, Any]) -> None:
    if not isinstance(kind, str) or kind not in FIELDS:
        raise MessageError(f"kind={kind!r} is not one of {', '.join(FIELDS)}")
    for name in FIELDS[kind]:
        value = fields.get(name)
        if type(value) is not int or value < 0:
            raise MessageError(f"a {kind} message has {name}={value!r}, which must be a whole number, 0 or more")
