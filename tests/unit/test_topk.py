"""Top-k: what is kept, what it costs, and what the variant with free indices pretends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.topk import TopKCodec
from hf_meshadapt.config import BoundaryConfig, index_bits

from ..token_codecs import round_trip, tokens


@settings(max_examples=150, deadline=None)
@given(x=tokens(), data=st.data())
def test_the_largest_entries_survive_and_the_rest_is_zero(x, data):
    codec = TopKCodec(x.shape[1])
    bytes_per_token = data.draw(st.integers(0, 4 * x.shape[1] + 5))
    kept = codec.num_kept(bytes_per_token)
    decoded = round_trip(codec, x, bytes_per_token)
    rounded = x.bfloat16().float()
    assert ((decoded == 0) | (decoded == rounded)).all()
    magnitudes = x.abs().sort(dim=1, descending=True).values
    # The energy lost is that of the smallest entries; equal magnitudes may be exchanged.
    lost = (x.double() - decoded.double()).square().sum(1)
    energy = magnitudes.double().square()
    assert (lost <= energy[:, kept:].sum(1) * (1 + 1e-5) + energy[:, :kept].sum(1) * 2**-16 + 1e-40).all()


@pytest.mark.parametrize("size, bits", [(1, 0), (2, 1), (32, 5), (33, 6), (576, 10), (2048, 11)])
def test_index_bits(size, bits):
    assert index_bits(size) == bits
    assert 2**bits >= size > (2 ** (bits - 1) if bits else 0)


@pytest.mark.parametrize("size, bytes_per_token, kept", [(576, 57, 17), (576, 86, 26), (2048, 204, 60), (32, 200, 32)])
def test_indices_are_paid_for(size, bytes_per_token, kept):
    codec = TopKCodec(size)
    assert codec.num_kept(bytes_per_token) == kept
    assert kept == size or kept * (16 + index_bits(size)) <= 8 * bytes_per_token
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    assert (codec.decode(codec.encode(x, bytes_per_token)) != 0).sum(1).tolist() == [kept] * 3


def test_free_indices_keep_as_many_entries_as_values_fit_and_the_wire_says_what_they_cost():
    paid = BoundaryConfig(codec="topk", budget=0.05, forward_share=0.5)
    free = BoundaryConfig(codec="topk_free_indices", budget=0.05, forward_share=0.5)
    for direction in ("forward", "backward"):
        values = paid.sequence_bytes(100, 576, direction) // 2
        assert values == int(0.05 * 100 * 576)
        assert free.sequence_bytes(100, 576, direction) == 2 * (values * 26 // 16)
    # 28 bfloat16 values are 5% of 576; a paid index leaves 17 of them.
    codec = TopKCodec(576)
    assert codec.num_kept(free.sequence_bytes(100, 576, "forward") // 100) == 28
    assert codec.num_kept(paid.sequence_bytes(100, 576, "forward") // 100) == 17
