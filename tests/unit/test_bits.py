"""Packing of small integers against a string of bits, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.bits import pack, packed_bytes, read_bfloat16, unpack


def oracle(row: list[int], groups) -> bytes:
    """Each value's bits, least significant first, one after the other, in bytes filled likewise."""
    widths = [bits for bits, count in groups for _ in range(count)]
    stream = "".join(f"{value:0{bits}b}"[::-1] for value, bits in zip(row, widths))
    return bytes(int(stream[start : start + 8][::-1], 2) for start in range(0, len(stream), 8))


@st.composite
def rows(draw):
    groups = tuple(draw(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 9)), max_size=4)))
    columns = [st.integers(0, 2**bits - 1) for bits, count in groups for _ in range(count)]
    values = draw(st.lists(st.tuples(*columns), min_size=0, max_size=4))
    return groups, torch.tensor(values, dtype=torch.int64).view(len(values), len(columns))


@settings(max_examples=300, deadline=None)
@given(rows())
def test_round_trip_and_oracle(drawn):
    groups, values = drawn
    packed = pack(values, groups)
    assert packed.dtype == torch.uint8 and packed.shape == (len(values), packed_bytes(groups))
    assert [bytes(row) for row in packed.tolist()] == [oracle(row, groups) for row in values.tolist()]
    restored = unpack(packed, groups)
    assert restored.dtype == torch.int64
    assert torch.equal(restored, values)


@pytest.mark.parametrize(
    "groups,size", [((), 0), (((3, 0),), 0), (((1, 1),), 1), (((1, 9),), 2), (((5, 3), (1, 1)), 2)]
)
def test_packed_bytes(groups, size):
    assert packed_bytes(groups) == size


def test_the_last_byte_is_padded_with_zeros():
    assert pack(torch.tensor([[7, 1]]), ((3, 1), (1, 1))).tolist() == [[0b1111]]


@pytest.mark.parametrize("bits", range(1, 17))
def test_extremes_of_every_width(bits):
    values = torch.tensor([[0, 2**bits - 1, 1, 2**bits - 2]]).clamp(min=0)
    assert torch.equal(unpack(pack(values, ((bits, 4),)), ((bits, 4),)), values)


def test_unpacking_part_of_a_wider_buffer():
    """A sequence's payload holds rows at any offset: strides must not matter."""
    groups = ((5, 3),)
    values = torch.randint(32, (6, 3), generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(6, 7, dtype=torch.uint8)
    wide[:, 3:5] = pack(values, groups)
    assert torch.equal(unpack(wide[:, 3:5], groups), values)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_bfloat16_numbers_are_read_from_anywhere(num_rows, start):
    numbers = torch.randn(num_rows, 2).bfloat16()
    padding = torch.zeros(num_rows, start, dtype=torch.uint8)
    rows = torch.cat([padding, numbers.view(torch.uint8), padding], dim=1)
    payload = torch.cat([torch.zeros(1, dtype=torch.uint8), rows.flatten()])
    assert torch.equal(read_bfloat16(payload[1:].view(num_rows, 4 + 2 * start), start, 2), numbers.float())
