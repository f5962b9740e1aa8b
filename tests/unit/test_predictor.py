"""The token predictor and its moments against direct computation over the tokens."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.boundary.predictor import (
    fit_mean,
    fit_ridge,
    num_features,
    project_embedding,
    residual_covariance,
    residual_energy,
    token_features,
)

VOCAB, HIDDEN, SIZE = 23, 12, 5


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def sample(num_tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, F) with the constant last, and hidden states (N, H) that depend on them."""
    features = torch.cat([torch.randn(num_tokens, 2 * SIZE), torch.ones(num_tokens, 1)], dim=1).double()
    hidden = features @ torch.randn(2 * SIZE + 1, HIDDEN).double() + 3 * torch.randn(num_tokens, HIDDEN).double()
    return features, hidden


def moments(features: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features.T @ features, features.T @ hidden


# Features ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size,dtype", [(SIZE, torch.float32), (SIZE, torch.bfloat16), (100, torch.float32)])
def test_projected_embedding_keeps_what_varies_most(size, dtype):
    # Rows in a plane plus noise: two dimensions of the projection hold nearly all.
    weight = (torch.randn(VOCAB, 2) @ torch.randn(2, HIDDEN) + 0.01 * torch.randn(VOCAB, HIDDEN)).to(dtype)
    table = project_embedding(weight, size)
    assert table.shape == (VOCAB, min(size, HIDDEN)) and table.dtype == torch.bfloat16
    torch.testing.assert_close(table.float().norm(dim=1), torch.ones(VOCAB), rtol=0, atol=0.01)
    whole = torch.nn.functional.normalize(weight.float(), dim=1)
    torch.testing.assert_close(table.float() @ table.float().T, whole @ whole.T, rtol=0, atol=0.05)


def test_projected_embedding_of_scaled_rows_is_the_same():
    weight = torch.randn(VOCAB, HIDDEN)
    scaled = weight * 2.0 ** torch.randint(-8, 8, (VOCAB, 1))
    assert torch.equal(project_embedding(weight, SIZE), project_embedding(scaled, SIZE))


@pytest.mark.parametrize("starts", [[], [(0, 0), (1, 2), (2, 0), (2, 3)]], ids=["rows", "packed"])
def test_features_are_this_token_the_previous_one_of_its_sequence_and_a_constant(starts):
    table = torch.randn(VOCAB, SIZE).bfloat16()
    ids = torch.randint(VOCAB, (3, 4))
    is_start = torch.zeros(3, 4, dtype=torch.bool)
    for start in starts:
        is_start[start] = True
    features = token_features(table, ids, is_start) if starts else token_features(table, ids)
    assert features.shape == (3, 4, num_features(table)) and features.dtype == torch.float32
    for row in range(3):
        for position in range(4):
            begins = position == 0 or (row, position) in starts
            before = torch.zeros(SIZE) if begins else table[ids[row, position - 1]].float()
            expected = torch.cat([table[ids[row, position]].float(), before, torch.ones(1)])
            assert torch.equal(features[row, position], expected)


def test_no_token_is_predicted_from_those_that_follow():
    """They are the labels."""
    table, ids = torch.randn(VOCAB, SIZE).bfloat16(), torch.randint(VOCAB, (2, 9))
    other = torch.cat([ids[:, :5], (ids[:, 5:] + 1) % VOCAB], dim=1)
    assert torch.equal(token_features(table, ids)[:, :5], token_features(table, other)[:, :5])


# Fits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.0, 1.2, 100.0])
def test_ridge_equals_least_squares_on_augmented_rows(ridge):
    """A ridge is as many further rows: sqrt(ridge) times each feature but the constant, with target zero."""
    features, hidden = sample()
    weights = fit_ridge(*moments(features, hidden), ridge)
    penalty = ridge**0.5 * torch.eye(2 * SIZE + 1).double()[:-1]
    rows = torch.cat([features, penalty])
    targets = torch.cat([hidden, torch.zeros(2 * SIZE, HIDDEN).double()])
    expected = torch.linalg.lstsq(rows, targets).solution
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-5)


def test_ridge_copes_with_features_that_never_vary():
    features, hidden = sample()
    features[:, 0] = 0.0  # a direction of the embedding in which no seen token lies
    features[:, 1] = features[:, 2]
    weights = fit_ridge(*moments(features, hidden), 1.2)
    assert bool(weights.isfinite().all()) and not weights[0].any()
    torch.testing.assert_close(weights[1], weights[2])


def test_mean_predicts_the_channel_mean():
    features, hidden = sample()
    weights = fit_mean(*moments(features, hidden))
    assert weights.dtype == torch.float32 and not weights[:-1].any()
    torch.testing.assert_close(weights[-1].double(), hidden.mean(0), rtol=0, atol=1e-5)


# What is left --------------------------------------------------------------------------------------------------------


def predictions(features: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    fits = moments(features, hidden)
    return [fit_ridge(*fits, 1.2), fit_mean(*fits), torch.randn(2 * SIZE + 1, HIDDEN)]


def test_residual_energy_equals_the_direct_sum():
    features, hidden = sample()
    for weights in predictions(features, hidden):
        direct = (hidden - features @ weights.double()).square().sum()
        energy = residual_energy(weights, *moments(features, hidden), float(hidden.square().sum()))
        assert energy == pytest.approx(float(direct), rel=1e-9)


def test_residual_energy_on_other_tokens_than_those_of_the_fit():
    features, hidden = sample()
    held_features, held_hidden = sample(50)
    weights = fit_ridge(*moments(features, hidden), 1.2)
    direct = (held_hidden - held_features @ weights.double()).square().sum()
    energy = residual_energy(weights, *moments(held_features, held_hidden), float(held_hidden.square().sum()))
    assert energy == pytest.approx(float(direct), rel=1e-9)


def test_residual_covariance_equals_the_direct_mean_of_outer_products():
    features, hidden = sample()
    for weights in predictions(features, hidden):
        residual = hidden - features @ weights.double()
        covariance = residual_covariance(weights, *moments(features, hidden), hidden.T @ hidden)
        assert covariance.dtype == torch.float64
        torch.testing.assert_close(covariance, residual.T @ residual / len(hidden), rtol=0, atol=1e-9)


def test_a_large_mean_leaves_the_covariance_accurate():
    """Channel means hold half of the energy on a real model; moments in single precision must survive them."""
    features, hidden = sample(2000)
    hidden = hidden + 30.0
    f, h = features.float(), hidden.float()
    single = f.T @ f, f.T @ h
    weights = fit_ridge(*single, 1.2)
    covariance = residual_covariance(weights, *single, h.T @ h)
    residual = hidden - features @ weights.double()
    direct = residual.T @ residual / len(hidden)
    assert float((covariance - direct).norm() / direct.norm()) < 1e-3
