"""Factors: against truncated SVDs, deterministic starts, sums that are never dense, zero and thin matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.factors import (
    Factors,
    compress,
    concatenate_and_recompress,
    from_tensors,
    sign_matrix,
    to_tensors,
)
from tests.spectral_oracle import gaussian, random_matrix, truncated

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))


def assert_factors(factors: Factors, shape: tuple[int, int], rank: int) -> None:
    u, s, v = factors
    rank = min(rank, *shape)
    assert factors.shape == shape and s.shape == (rank,) and u.dtype == s.dtype == v.dtype == torch.float32
    assert (s >= 0).all() and (s[:-1] >= s[1:]).all()
    for basis in (u, v):
        torch.testing.assert_close(basis.T @ basis, torch.eye(rank), atol=2e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES, rank=st.integers(1, 50), seed=st.integers(0, 1000), dtype=st.sampled_from(["float32", "bfloat16"])
)
def test_a_matrix_of_low_rank_is_found_whole(shape, rank, seed, dtype):
    true_rank = min(rank, *shape)
    matrix = random_matrix(*shape, true_rank, seed).to(getattr(torch, dtype))
    rank = rank if dtype == "float32" else 50  # rounding to bfloat16 makes it full rank
    factors = compress(matrix, rank, "weight")
    assert_factors(factors, shape, rank)
    torch.testing.assert_close(factors.dense(), matrix.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_the_best_approximation_is_nearly_reached_and_a_warm_start_helps(shape):
    matrix = random_matrix(*shape, 40, seed=1, decay=0.8)
    best = (matrix - truncated(matrix, 8)).norm()
    cold = compress(matrix, 8, "weight")
    assert_factors(cold, shape, 8)
    assert (matrix - cold.dense()).norm() < 1.05 * best
    torch.testing.assert_close(cold.s[:6], torch.linalg.svdvals(matrix)[:6], rtol=0.01, atol=0)
    moved = matrix + 0.02 * random_matrix(*shape, 40, seed=2)
    best = (moved - truncated(moved, 8)).norm()
    assert (moved - compress(moved, 8, "weight", warm_start=cold).dense()).norm() < 1.05 * best


def test_a_start_depends_on_the_name_alone():
    first, second = sign_matrix("layers.0.weight", 30, 4), sign_matrix("layers.0.weight", 30, 4)
    assert torch.equal(first, second) and not torch.equal(first, sign_matrix("layers.1.weight", 30, 4))
    torch.manual_seed(5)
    matrix = gaussian(20, 30, seed=0)
    before = torch.get_rng_state()
    one = compress(matrix, 4, "layers.0.weight")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(one, compress(matrix, 4, "layers.0.weight")))
    # Golden: first signs of this name, so that releases stay alike.
    assert (sign_matrix("layers.0.weight", 6, 1)[:, 0] > 0).tolist() == [True, False, True, False, False, True]


def test_zero_matrices_have_no_singular_values_and_are_no_dead_end():
    factors = compress(torch.zeros(10, 6), 4, "weight")
    assert_factors(factors, (10, 6), 4)
    assert (factors.s == 0).all() and (factors.dense() == 0).all()
    matrix = random_matrix(10, 6, 4, seed=0)
    torch.testing.assert_close(compress(matrix, 4, "weight", warm_start=factors).dense(), matrix, atol=1e-5, rtol=0)


def test_directions_below_rounding_are_exactly_zero():
    factors = compress(random_matrix(30, 20, 3, seed=0), 8, "weight")
    assert (factors.s[:3] > 0).all() and (factors.s[3:] == 0).all()


def test_a_warm_start_of_another_rank_is_cut_or_filled():
    matrix = random_matrix(30, 20, 6, seed=0)
    for rank in (2, 6, 12):
        found = compress(matrix, 6, "weight", warm_start=compress(matrix, rank, "weight"))
        torch.testing.assert_close(found.dense(), matrix, atol=1e-5, rtol=0)


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, ranks=st.tuples(st.integers(1, 8), st.integers(1, 8)), seed=st.integers(0, 1000))
def test_a_sum_of_factors_is_the_sum_of_the_matrices(shape, ranks, seed):
    matrices = [random_matrix(*shape, min(rank, *shape), seed + i) for i, rank in enumerate(ranks)]
    factors = [compress(matrix, rank, "weight") for matrix, rank in zip(matrices, ranks)]
    found = concatenate_and_recompress([(0.25, factors[0]), (0.75, factors[1])], 16, "weight", warm_start=factors[0])
    assert_factors(found, shape, 16)
    torch.testing.assert_close(found.dense(), 0.25 * matrices[0] + 0.75 * matrices[1], atol=1e-5, rtol=0)


def test_factors_travel_flat_and_broken_sets_are_refused():
    values = {"layers.0.weight": compress(gaussian(6, 4, seed=0), 2, "x"), "norm.weight": gaussian(4, seed=1)}
    tensors = to_tensors(values)
    assert set(tensors) == {"layers.0.weight/u", "layers.0.weight/s", "layers.0.weight/v", "norm.weight/whole"}
    again = from_tensors(tensors)
    assert torch.equal(again["norm.weight"], values["norm.weight"])
    assert all(torch.equal(a, b) for a, b in zip(again["layers.0.weight"], values["layers.0.weight"]))
    del tensors["layers.0.weight/s"]
    with pytest.raises(ValueError, match="layers.0.weight.*send it again"):
        from_tensors(tensors)


def test_the_compressor_sends_what_the_rule_needs():
    gradients = {
        "model.layers.0.q.weight": random_matrix(12, 8, 3, seed=0),
        "model.layers.0.norm.weight": gaussian(8, seed=1),
        "model.embed_tokens.weight": gaussian(30, 8, seed=2),
        "model.layers.0.experts": gaussian(2, 4, 4, seed=3),
    }
    compressor = GradientCompressor(SpectralConfig(matrix_rank=3))
    sent = compressor.compress(gradients)
    assert list(sent) == ["model.layers.0.q.weight"] and sent["model.layers.0.q.weight"].u.dtype == torch.bfloat16
    found = sent["model.layers.0.q.weight"].to(torch.float32).dense()
    torch.testing.assert_close(found, gradients["model.layers.0.q.weight"], atol=0.01, rtol=0)
    compressor.compress(gradients)
    assert list(compressor.warm_starts) == ["model.layers.0.q.weight"]
    del gradients["model.layers.0.experts"]
    sent = GradientCompressor(SpectralConfig(rule="blend", matrix_rank=3), dtype=torch.float32).compress(gradients)
    assert set(sent) == set(gradients)
    assert torch.equal(sent["model.layers.0.norm.weight"], gradients["model.layers.0.norm.weight"])
    assert sent["model.embed_tokens.weight"].s.shape == (3,)
