"""Messages and frames of the anchor link: round trips, and bytes that are cut, damaged, foreign or too large."""

import contextlib
import json
import struct
import zlib

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.anchor.frames import (
    BULK,
    CONTROL,
    FRAME_HEAD_BYTES,
    MAX_CONTROL_BYTES,
    MAX_FRAME_BYTES,
    Assembler,
    frame,
)
from hf_meshadapt.anchor.messages import (
    FIELDS,
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Message,
    MessageError,
    announced_bytes,
    decode,
    encode,
)

LIMIT = 10**6
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


@st.composite
def messages(draw):
    kind = draw(st.sampled_from(sorted(FIELDS)))
    fields = {name: draw(st.integers(0, 2**40)) for name in FIELDS[kind]}
    fields["note"] = draw(st.one_of(st.none(), st.text(max_size=20), st.lists(st.integers(), max_size=3)))
    tensors = {}
    for name in draw(st.lists(st.text(st.characters(codec="ascii", categories=["L"]), min_size=1), max_size=3)):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        tensors[name] = torch.randint(0, 100, shape).to(draw(st.sampled_from(DTYPES)))
    return Message(kind, fields, tensors)


def assert_same(one: Message, other: Message) -> None:
    assert one.kind == other.kind and one.fields == other.fields and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name])


def sample() -> Message:
    return Message("prior", {"version": 7, "stage": 1, "num_batches": 3}, {"weight": torch.arange(6.0).view(2, 3)})


def assembled(header: bytes, body: bytes = b"", version: int = PROTOCOL_VERSION, magic: bytes = MAGIC) -> bytes:
    """A message with right checksums around any header and body."""
    sizes = struct.pack("<4sHIQI", magic, version, len(header), len(body), zlib.crc32(header + body))
    return sizes + struct.pack("<I", zlib.crc32(sizes)) + header + body


def places(data: bytes) -> dict[str, int]:
    """A byte of every part of a message."""
    header_bytes = struct.unpack_from("<I", data, 6)[0]
    body = PREFIX_BYTES + header_bytes
    named = {"magic": 0, "version": 4, "header_bytes": 6, "body_bytes": 10, "checksum": 18, "prefix_checksum": 22}
    named |= {"header": PREFIX_BYTES, "header_end": body - 1, "tensor_sizes": body, "tensor_head": body + 9}
    return named | {"last": len(data) - 1}


@settings(max_examples=60, deadline=None)
@given(messages())
def test_round_trip(message):
    data = encode(message)
    assert announced_bytes(data[:PREFIX_BYTES], LIMIT) == len(data)
    assert_same(decode(data, LIMIT), message)


def test_what_is_sent_is_contiguous_and_detached():
    weight = torch.arange(6.0).view(2, 3).requires_grad_().t()
    assert torch.equal(decode(encode(Message("heartbeat", {}, {"w": weight})), LIMIT).tensors["w"], weight.detach())


@pytest.mark.parametrize("place", sorted(places(encode(sample()))))
def test_a_damaged_byte_anywhere_is_noticed(place):
    data = encode(sample())
    at = places(data)[place]
    for bit in range(8):
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        with pytest.raises(MessageError):
            decode(damaged, LIMIT)


def test_every_truncation_and_extension_is_noticed():
    data = encode(sample())
    for end in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:end], LIMIT)
    with pytest.raises(MessageError, match="announces"):
        decode(data + b"\0", LIMIT)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(MessageError):
        decode(data, LIMIT)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_content_under_right_checksums_is_read_or_refused(header, body):
    for content in (header, b'{"kind":"heartbeat"}'):
        try:
            message = decode(assembled(content, body), LIMIT)
        except MessageError:
            continue
        assert message.kind in FIELDS


@pytest.mark.parametrize(
    "data,said",
    [
        (assembled(b'{"kind":"heartbeat"}', magic=b"SSH-"), "no anchor link"),
        (assembled(b'{"kind":"heartbeat"}', version=2), "speaks protocol version 2, this end 1"),
        (assembled(b"[1]"), "no JSON object"),
        (assembled(b"[" * 100_000), "no JSON"),
        (assembled(b"1" * 100_000), "no JSON"),
        (assembled(b"{}"), "kind=None"),
        (assembled(b'{"kind":["prior"]}'), "is not one of"),
        (assembled(b'{"kind":"run"}'), "is not one of"),
        (assembled(b'{"kind":"received"}'), "version=None"),
        (assembled(b'{"kind":"received","version":-1}'), "version=-1"),
        (assembled(b'{"kind":"received","version":true}'), "version=True"),
        (assembled(b'{"kind":"received","version":1.5}'), "version=1.5"),
        (assembled(b'{"kind":"heartbeat"}', b"\xff" * 9), "tensors cannot be read"),
        (assembled(b'{"kind":"heartbeat"}', struct.pack("<Q", 2**60) + b"{}"), "tensors cannot be read"),
    ],
)
def test_refusals_say_what_is_wrong(data, said):
    with pytest.raises(MessageError, match=said):
        decode(data, LIMIT)


def test_a_body_whose_sizes_lie_is_refused():
    head = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    body = struct.pack("<Q", len(head)) + head + b"\0" * 4
    with pytest.raises(MessageError, match="tensors cannot be read"):
        decode(assembled(b'{"kind":"heartbeat"}', body), LIMIT)
    assert (
        safetensors.torch.load(safetensors.torch.save({"w": torch.ones(1)}))["w"] == 1
    )  # the format itself is as assumed


def test_sizes_are_judged_by_the_prefix_alone():
    sizes = struct.pack("<4sHIQI", MAGIC, PROTOCOL_VERSION, 10, 2**50, 0)
    prefix = sizes + struct.pack("<I", zlib.crc32(sizes))
    with pytest.raises(MessageError, match="exceeds the 1000000 bytes"):
        announced_bytes(prefix, LIMIT)
    sizes = struct.pack("<4sHIQI", MAGIC, PROTOCOL_VERSION, MAX_HEADER_BYTES + 1, 0, 0)
    with pytest.raises(MessageError, match="exceeds"):
        announced_bytes(sizes + struct.pack("<I", zlib.crc32(sizes)), 2**40)


@pytest.mark.parametrize("fields,said", [({}, "version=None"), ({"version": "1"}, "version='1'")])
def test_a_message_without_its_fields_is_not_sent(fields, said):
    with pytest.raises(MessageError, match=said):
        encode(Message("received", fields))
    with pytest.raises(MessageError, match="exceeds"):
        encode(Message("heartbeat", {"note": "x" * MAX_HEADER_BYTES}))


def frames_of(message: Message, lane: int, chunk_bytes: int) -> list[bytes]:
    data = memoryview(encode(message))
    return [frame(lane, data[start : start + chunk_bytes]) for start in range(0, len(data), chunk_bytes)]


@settings(max_examples=30, deadline=None)
@given(st.lists(messages(), min_size=1, max_size=4), st.integers(1, 90), st.integers(1, 400), st.randoms())
def test_frames_of_two_lanes_in_pieces_of_any_size(sent, chunk_bytes, piece_bytes, random):
    lanes = {CONTROL: [], BULK: []}
    for number, message in enumerate(sent):
        message.fields["number"] = number
        lanes[random.choice((CONTROL, BULK))].append(message)
    queues = {lane: [f for message in lanes[lane] for f in frames_of(message, lane, chunk_bytes)] for lane in lanes}
    stream = b""
    while any(queues.values()):
        stream += queues[random.choice([lane for lane, frames in queues.items() if frames])].pop(0)
    assembler, received = Assembler(LIMIT), []
    for start in range(0, len(stream), piece_bytes):
        received += assembler.feed(stream[start : start + piece_bytes])
    numbers = [message.fields["number"] for message in received]
    assert sorted(numbers) == list(range(len(sent)))
    for lane in lanes.values():  # in order on each lane
        on_lane = [message.fields["number"] for message in lane]
        assert [number for number in numbers if number in on_lane] == on_lane
    for message in received:
        assert_same(message, sent[message.fields["number"]])


def test_no_part_of_a_message_is_taken_for_whole():
    stream = b"".join(frames_of(sample(), BULK, 50))
    for end in range(len(stream)):
        assert Assembler(LIMIT).feed(stream[:end]) == []
    assert len(Assembler(LIMIT).feed(stream)) == 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_damaged_stream_never_yields_another_message(at, bit):
    stream = bytearray(b"".join(frames_of(sample(), BULK, 50)))
    stream[at % len(stream)] ^= 1 << bit
    with contextlib.suppress(MessageError):
        # Without an error it waits for what will not come, until the link's deadline.
        assert Assembler(LIMIT).feed(bytes(stream)) == []


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<BI", 2, 10),
        struct.pack("<BI", BULK, 0),
        struct.pack("<BI", BULK, MAX_FRAME_BYTES + 1),
        b"GET / HTTP/1.1\r\n",
        b"".join(frames_of(Message("heartbeat", {"note": "x" * MAX_CONTROL_BYTES}), CONTROL, 1000)),
        b"".join(frames_of(Message("heartbeat", {}, {"w": torch.zeros(LIMIT)}), BULK, 1000)),
        frame(BULK, encode(Message("heartbeat")) + b"\0"),
    ],
)
def test_streams_that_are_refused_at_once(stream):
    with pytest.raises(MessageError):
        Assembler(LIMIT).feed(stream[: FRAME_HEAD_BYTES + 1000])
