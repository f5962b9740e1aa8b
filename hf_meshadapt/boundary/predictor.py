"""Predicts a token's hidden state from its token and the previous one, so that only the surprise must travel.

    p_t = W [e(tok_t); e(tok_t-1); 1]       e: L2-normalised rows of a frozen, projected copy of the input embedding

Ridge regression, fitted on unmasked passes. Both ends of a boundary know the token ids, so a prediction costs no
bytes. With W holding only a constant this is the channel mean.

Never the next token, although both ends know that too and it predicts well: it is the label. What did not travel is
filled with the prediction, and the later stages learn to read the label from there (seen: a lower training loss and a
worse model).
"""

from __future__ import annotations

import torch
from torch import Tensor

FEATURE_SIZE = 128


def project_embedding(weight: Tensor, size: int = FEATURE_SIZE) -> Tensor:
    """Projects an embedding on its leading right singular vectors and normalises its rows.

    Args:
        weight: (vocabulary, hidden), any float dtype.
        size: width of the projection, at most hidden.

    Returns:
        (vocabulary, min(size, hidden)) bfloat16, rows of norm 1.
    """
    weight = torch.nn.functional.normalize(weight.detach().float(), dim=1)
    _, vectors = torch.linalg.eigh((weight.T @ weight).double())
    projected = weight @ vectors[:, -min(size, weight.shape[1]) :].float()
    return torch.nn.functional.normalize(projected, dim=1).to(torch.bfloat16)


def token_features(
    table: Tensor, input_ids: Tensor, starts: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Features of every token, (B, T, `num_features(table)`) in dtype; what lies outside of a sequence is taken for zero.

    Args:
        table: (vocabulary, size), from `project_embedding`.
        input_ids: (B, T).
        starts: (B, T) bool, first tokens of sequences: the one before belongs to another. None where rows begin them.
    """
    size = table.shape[1]
    features = torch.empty(*input_ids.shape, 2 * size + 1, dtype=dtype, device=table.device)
    here, before = features[..., :size], features[..., size:-1]
    here.copy_(torch.nn.functional.embedding(input_ids, table))
    before[:, 1:] = here[:, :-1]
    before[:, :1] = 0.0
    if starts is not None:
        before.masked_fill_(starts.unsqueeze(2), 0.0)
    features[..., -1] = 1.0
    return features


def num_features(table: Tensor | None) -> int:
    """Features of a token; without a table only the constant."""
    return 1 if table is None else 2 * table.shape[1] + 1


def fit_ridge(feature_moment: Tensor, cross_moment: Tensor, ridge: float) -> Tensor:
    """Weights (features, H) that predict hidden states by least squares with a ridge on all but the constant.

    Args:
        feature_moment: (F, F), sum of f fᵀ over tokens; the constant feature is the last.
        cross_moment: (F, H), sum of f hᵀ.
        ridge: added to the diagonal, in tokens.
    """
    penalty = torch.full((len(feature_moment),), ridge, dtype=torch.float64, device=feature_moment.device)
    penalty[-1] = 0.0
    solved = torch.linalg.solve(feature_moment.double() + penalty.diag(), cross_moment.double())
    return solved.float()


def fit_mean(feature_moment: Tensor, cross_moment: Tensor) -> Tensor:
    """Weights (features, H) that predict the channel mean for every token."""
    weights = torch.zeros_like(cross_moment, dtype=torch.float32)
    weights[-1] = (cross_moment[-1].double() / feature_moment[-1, -1].double()).float()
    return weights


def residual_energy(weights: Tensor, feature_moment: Tensor, cross_moment: Tensor, energy: float) -> float:
    """Sum of squared errors of a prediction over the tokens behind the moments.

    Args:
        energy: sum of squared hidden entries.
    """
    weights = weights.double()
    explained = 2 * (weights * cross_moment.double()).sum() - (weights * (feature_moment.double() @ weights)).sum()
    return energy - float(explained)


def residual_covariance(weights: Tensor, feature_moment: Tensor, cross_moment: Tensor, moment: Tensor) -> Tensor:
    """(H, H) covariance of hidden minus prediction, float64, from the moments alone.

    Args:
        moment: (H, H), sum of h hᵀ.
    """
    weights, cross = weights.double(), cross_moment.double()
    explained = weights.T @ cross
    covariance = moment.double() - explained - explained.T + weights.T @ feature_moment.double() @ weights
    return covariance / feature_moment[-1, -1].double()
