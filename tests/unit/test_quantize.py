"""Few-bit quantisation and its rotation: error laws, exact bytes, and what happens beside the natural size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.quantize import QuantizeCodec, TileQuantizeCodec
from hf_meshadapt.boundary.rotation import Rotation, hartley, random_order, walsh_hadamard
from hf_meshadapt.boundary.transform import DISTORTION
from hf_meshadapt.config import BoundaryConfig

from ..token_codecs import SIZES, TILED_SIZES, round_trip, tokens

BITS = (1, 2, 3, 4, 6, 8)
ROUNDING = 2**-8  # of a bfloat16 scale


# Rotation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_walsh_hadamard_is_sylvesters_matrix(size):
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    torch.testing.assert_close(walsh_hadamard(torch.eye(size)), matrix / math.sqrt(size))


@pytest.mark.parametrize("size", [1, 3, 9, 97])
def test_hartley_is_orthogonal_and_its_own_inverse(size):
    matrix = hartley(size)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_orthogonal_with_its_inverse(size):
    rotation = Rotation(size)
    matrix = rotation(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=5e-6)
    torch.testing.assert_close(rotation.inverse(matrix), torch.eye(size), rtol=0, atol=5e-6)
    # Both ends build their own.
    assert torch.equal(Rotation(size)(torch.eye(size)), matrix)


@pytest.mark.parametrize("size", [64, 576, 2048])
def test_rotation_spreads_a_single_outlier_over_all_entries(size):
    outlier = torch.zeros(1, size)
    outlier[0, size // 3] = 1.0
    # Walsh-Hadamard spreads it evenly, Hartley within a factor of sqrt 2.
    assert Rotation(size)(outlier).abs().max() <= math.sqrt(2 / size) * 1.001


def test_rotated_entries_of_a_spiky_token_are_nearly_gaussian():
    spiky = torch.randn(400, 576, generator=torch.Generator().manual_seed(0))
    spiky[:, 100:110] *= 30

    def kurtosis(tokens: torch.Tensor) -> float:
        return float((tokens.pow(4).mean(1) / tokens.pow(2).mean(1) ** 2).mean())

    assert kurtosis(spiky) > 50 and kurtosis(Rotation(576)(spiky)) == pytest.approx(3.0, abs=0.7)


def test_order_is_a_permutation_and_looks_random():
    order = random_order(576)
    assert torch.equal(order.sort().values, torch.arange(576))
    assert (order[:288] < 288).sum().item() == pytest.approx(144, abs=40)


# Error laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [512, 576])
def test_rotated_error_on_gaussian_tokens_is_the_optimal_uniform_quantisers(size, bits):
    normal = torch.randn(1000, size, generator=torch.Generator().manual_seed(1)) * 3
    codec = QuantizeCodec(size, bits, rotated=True)
    error = (round_trip(codec, normal, codec.natural_bytes(size)) - normal).square().sum() / normal.square().sum()
    assert float(error) == pytest.approx(DISTORTION[bits], rel=0.04)


def test_one_rotated_bit_is_the_sign_times_0798_of_the_scale():
    normal = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    codec = QuantizeCodec(64, 1, rotated=True)
    levels = codec.rotation(codec.decode(codec.encode(normal, codec.natural_bytes(64))))
    scale = codec.rotation(normal).square().mean(1, keepdim=True).sqrt().bfloat16().float()
    torch.testing.assert_close(levels, codec.rotation(normal).sign() * 0.7979 * scale, rtol=1e-4, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(x=tokens(), bits=st.sampled_from(BITS))
def test_unrotated_error_law(x, bits):
    codec = QuantizeCodec(x.shape[1], bits)
    decoded = round_trip(codec, x, codec.natural_bytes(x.shape[1]))
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    step = extreme.abs() / 2 ** (bits - 1)
    error, slack = (decoded - x).abs(), ROUNDING * extreme.abs()
    assert (error <= step + slack).all()
    opposed = -x * extreme.sign() > (1 - 2.0**-bits) * extreme.abs() - slack
    assert (error[~opposed] <= (step / 2 + slack).expand_as(x)[~opposed]).all()
    assert (decoded[x == 0] == 0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_extreme_and_zero_are_levels_of_their_own(sign):
    token = torch.zeros(1, 64)
    token[0, 5], token[0, 6] = sign * 96.0, 0.1
    for bits in BITS:
        codec = QuantizeCodec(64, bits)
        decoded = codec.decode(codec.encode(token, codec.natural_bytes(64)))
        assert decoded[0, 5] == sign * 96.0 and decoded.count_nonzero() == 1


@settings(max_examples=100, deadline=None)
@given(x=tokens(), bits=st.sampled_from(BITS))
def test_rotated_error_never_exceeds_a_clipped_token(x, bits):
    codec = QuantizeCodec(x.shape[1], bits, rotated=True)
    decoded = round_trip(codec, x, codec.natural_bytes(x.shape[1]))
    # Whatever the distribution: levels reach no further than the largest, so neither does the result.
    largest = (2**bits - 1) / 2 * codec.layout(codec.natural_bytes(x.shape[1]), x.device)[1][0]
    assert (decoded.norm(dim=1) <= x.norm(dim=1) * float(largest) * (1 + 2 * ROUNDING) + 1e-30).all()
    assert torch.isfinite(decoded).all()


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, bits, expected", [(576, 1, 74), (576, 2, 146), (576, 4, 290), (576, 8, 578), (7, 3, 5)]
)
def test_natural_bytes(size, bits, expected):
    codec = QuantizeCodec(size, bits, rotated=True)
    assert codec.natural_bytes(size) == expected
    assert BoundaryConfig(codec="quantize", bits=bits).token_bytes(size, "backward") == expected


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("bytes_per_token", range(0, 90, 7))
def test_other_sizes_than_the_natural_one(bytes_per_token, rotated):
    normal = torch.randn(300, 64, generator=torch.Generator().manual_seed(3))
    codec = QuantizeCodec(64, 8, rotated)
    decoded = round_trip(codec, normal, bytes_per_token)
    error = float((decoded - normal).square().sum() / normal.square().sum())
    coded = max(0, min(8 * 64, 8 * (bytes_per_token - 2)))
    if rotated:
        low, high = divmod(coded, 64)
        expected = (high * DISTORTION[min(8, low + 1)] + (64 - high) * DISTORTION[low]) / 64
        assert error == pytest.approx(expected, rel=0.15)
    assert error <= 1.0 + 1e-6
    if bytes_per_token >= codec.natural_bytes(64):
        packed = codec.encode(normal, bytes_per_token)
        assert torch.equal(packed[:, :66], codec.encode(normal, 66)) and not packed[:, 66:].any()


def test_not_a_number_stays_visible():
    broken = torch.ones(2, 64)
    broken[1, 3] = float("nan")
    for rotated in (False, True):
        codec = QuantizeCodec(64, 4, rotated)
        decoded = codec.decode(codec.encode(broken, codec.natural_bytes(64)))
        assert torch.isfinite(decoded[0]).all() and decoded[1].isnan().all()


def test_bits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="bits=9 must lie in 1..8"):
        QuantizeCodec(8, 9)


@settings(max_examples=50, deadline=None)
@given(x=tokens(TILED_SIZES), bits=st.sampled_from((4, 6)))
def test_tiles_are_quantised_one_by_one(x, bits):
    codec, single = TileQuantizeCodec(x.shape[1], 8, bits), QuantizeCodec(8, bits)
    natural = codec.natural_bytes(x.shape[1])
    assert natural == x.shape[1] // 8 * (2 + bits)
    decoded = round_trip(codec, x, natural)
    for start in range(0, x.shape[1], 8):
        tile = x[:, start : start + 8]
        assert torch.equal(decoded[:, start : start + 8], single.decode(single.encode(tile, 2 + bits)))
    assert torch.equal(codec.decode(codec.encode(x, natural + 3)), decoded)
