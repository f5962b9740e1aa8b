"""TAH-Quant, step by step as the paper has it, and as a whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from hf_meshadapt.boundary.bits import unpack
from hf_meshadapt.boundary.rotation import walsh_hadamard
from hf_meshadapt.boundary.tah_quant import TahQuantCodec, swap_with_first, tile_entropy
from hf_meshadapt.config import BoundaryConfig

from ..token_codecs import TILED_SIZES, round_trip, tokens

CONFIG = BoundaryConfig(codec="tah_quant")


def natural(size: int) -> int:
    return CONFIG.token_bytes(size, "forward")


def parts(codec: TahQuantCodec, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Precision bits, transform bits and outliers' places of one token's tiles, as they travel."""
    packed = codec.encode(token, natural(codec.hidden_size))
    columns = [codec.hidden_size, codec.tiles, codec.tiles, codec.tiles]
    return unpack(packed[:, 4 * codec.tiles :], codec.groups).split(columns, dim=1)[1:]


# Step 1: tiles of 64 channels, each with a scale and a zero-point of its own.
def test_tiles_do_not_disturb_each_other():
    codec = TahQuantCodec(192)
    assert (codec.size, codec.tiles, codec.num_high) == (64, 3, 2)
    token = torch.randn(1, 192, generator=torch.Generator().manual_seed(0))
    decoded = round_trip(codec, token, natural(192))
    # Another magnitude and level in one tile; its entropy stays between those of the others.
    precision = parts(codec, token)[0]
    token[:, 64:128] = token[:, 64:128] * 1000
    assert torch.equal(parts(codec, token)[0], precision)
    changed = round_trip(codec, token, natural(192))
    assert torch.equal(changed[:, :64], decoded[:, :64]) and torch.equal(changed[:, 128:], decoded[:, 128:])


# Step 2: entropy of the magnitudes; the most even 80% of a token's tiles get 4 bits.
def test_entropy_is_that_of_normalised_magnitudes():
    even, single = torch.full((1, 1, 64), -3.0), torch.zeros(1, 1, 64)
    single[..., 9] = 5.0
    assert float(tile_entropy(even)) == pytest.approx(math.log(64), rel=1e-5)
    assert float(tile_entropy(single)) == pytest.approx(0.0, abs=1e-5)
    halves = torch.zeros(1, 1, 64)
    halves[..., :2] = torch.tensor([1.0, -3.0])
    assert float(tile_entropy(halves)) == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), rel=1e-5)
    assert float(tile_entropy(torch.zeros(1, 1, 64))) == 0.0


def test_even_tiles_get_four_bits_and_spiky_ones_three():
    codec = TahQuantCodec(640)
    token = torch.randn(1, 10, 64, generator=torch.Generator().manual_seed(1))
    token[0, 2, 5], token[0, 7, 40] = 500.0, -300.0
    precision = parts(codec, token.flatten(1))[0]
    assert precision.tolist() == [[1, 1, 0, 1, 1, 1, 1, 0, 1, 1]]


# Step 3: r = largest / second magnitude; over 2, the tile has an outlier.
@pytest.mark.parametrize("ratio, transformed", [(1.9, 0), (2.1, 1), (-5.0, 1)])
def test_outliers_are_told_by_the_ratio_of_the_two_largest_magnitudes(ratio, transformed):
    token = torch.rand(1, 64, generator=torch.Generator().manual_seed(2)).clamp(max=0.9)
    token[0, 20], token[0, 33] = 1.0, ratio
    _, spread, pivot = parts(TahQuantCodec(64), token)
    assert spread.item() == transformed
    assert pivot.item() == (33 if transformed else 0)


# Step 4: the outlier swaps places with channel 0, then the Hadamard transform.
def test_swap_is_its_own_inverse():
    tiles = torch.arange(24.0).view(2, 3, 4)
    pivot = torch.tensor([[0, 1, 3], [2, 0, 3]])
    swapped = swap_with_first(tiles, pivot)
    assert swapped[0, 2].tolist() == [11.0, 9.0, 10.0, 8.0] and torch.equal(swapped[0, 0], tiles[0, 0])
    assert torch.equal(swap_with_first(swapped, pivot), tiles)


def test_a_transformed_tile_is_quantised_after_swap_and_hadamard():
    token = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    token[0, 50] = 40.0
    codec = TahQuantCodec(64)
    mixed = walsh_hadamard(swap_with_first(token.view(1, 1, 64), torch.tensor([[50]])))
    # With the outlier in channel 0 every entry of the transform holds +40 / 8: a narrow range.
    assert float(mixed.amax() - mixed.amin()) < 12 < float(token.amax() - token.amin()) / 3
    error = round_trip(codec, token, natural(64)) - token
    step = float(mixed.amax() - mixed.amin()) / 15
    assert float(error.square().mean()) == pytest.approx(step**2 / 12, rel=0.5)
    without = 42.0 / 15
    assert float(error.square().mean()) < without**2 / 12 / 5


# Step 5: affine quantisation from the tile's minimum to its maximum, to the nearest of 16 or 8 levels.
def test_levels_run_from_minimum_to_maximum():
    codec = TahQuantCodec(64)
    token = (torch.arange(64.0) % 16 + 100).view(1, 64)  # sixteen levels that bfloat16 holds exactly
    assert torch.equal(codec.decode(codec.encode(token, natural(64))), token)


@settings(max_examples=150, deadline=None)
@given(x=tokens(TILED_SIZES))
def test_error_law(x):
    codec = TahQuantCodec(x.shape[1])
    error = (round_trip(codec, x, natural(x.shape[1])) - x).view(len(x), codec.tiles, codec.size)
    tiles = x.view(error.shape)
    precise, spread, pivot = parts(codec, x)
    mixed = torch.where(spread.bool().unsqueeze(2), walsh_hadamard(swap_with_first(tiles, pivot)), tiles)
    span = mixed.amax(2) - mixed.amin(2)
    bound = span / torch.where(precise.bool(), 30, 14) + 2**-7 * (mixed.amin(2).abs() + span)
    # The transform is orthonormal: its error has the norm of the tile's.
    assert (error.norm(dim=2) <= bound * codec.size**0.5 * (1 + 1e-4) + 1e-30).all()
    untouched = error.abs().amax(2) * (spread == 0)
    assert (untouched <= bound * (1 + 1e-4) + 1e-30).all()


# Step 6: gradients in 6 bits with one scale per 32 channels.
@pytest.mark.parametrize("size, forward, backward", [(576, 317, 468), (2048, 1136, 1664), (64, 37, 52), (24, 25, 24)])
def test_bytes_of_both_directions(size, forward, backward):
    assert TahQuantCodec(size).natural_bytes(size) == natural(size) == forward
    assert CONFIG.token_bytes(size, "backward") == backward
    if size == 2048:  # 3.81 bits, and 40 per tile of 64
        assert 8 * forward / size == pytest.approx(4.43, abs=0.01)


def test_sizes_without_tiles_are_refused():
    with pytest.raises(ValueError, match="hidden size 100 has no tiles of 8"):
        TahQuantCodec(100)
