"""Measures of gradients and priors: in how many directions they live, and how alike they are. Pure functions, float32.

What they are for: a prior of rank r helps where gradients are nearly of that rank, where the prior's directions are those
of the next gradients, and where they still are K steps later. docs/spectral.md has the rules that rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .spectral.config import SpectralConfig
from .spectral.correction import filter_weights, filtered
from .spectral.factors import Factors


def singular_values(matrix: Tensor) -> Tensor:
    """(min(m, n),), descending, float32, on the CPU."""
    return torch.linalg.svdvals(matrix.detach().float().cpu())


def energy_in_top(s: Tensor, rank: int) -> float:
    """Share of the energy (sum of squares) in the `rank` largest of descending singular values; nan for a zero matrix."""
    energies = s.double() ** 2
    return float(energies[:rank].sum() / energies.sum())


def effective_rank(s: Tensor) -> float:
    """exp of the entropy of singular values that sum to 1, between 1 and their number; nan for a zero matrix.

    Source: Roy & Vetterli, The effective rank (2007), definition 1.
    """
    shares = s.double() / s.double().sum()
    return float(torch.special.entr(shares).sum().exp())


def energy_in_subspace(gradient: Tensor, prior: Factors, rank: int) -> float:
    """|U U^T G V V^T|^2 / |G|^2 with the prior's first `rank` singular vectors: what a two-sided filter can pass.

    Args:
        gradient: G (m, n).
        prior: of a matrix of that shape.
        rank: directions beyond those that the prior has do not count.
    """
    found = int((prior.s[:rank] > 0).sum())
    u, v, g = prior.u[:, :found].float(), prior.v[:, :found].float(), gradient.detach().float()
    return float((u.T @ g @ v).double().square().sum() / g.double().square().sum())


def energy_kept(gradient: Tensor, prior: Factors, config: SpectralConfig) -> float:
    """|F(G)|^2 / |G|^2 of a filter F, its share of what it reads only: alpha left out.

    Args:
        gradient: G (m, n).
        prior: of a matrix of that shape.
        config: with one of the `FILTER_RULES`.
    """
    gradient, weights = gradient.detach().float(), filter_weights(prior.s, config.tau, config.tau_relative)
    left, right = filtered(config.rule, gradient, prior, weights)
    return float((left @ right).double().square().sum() / gradient.double().square().sum())


def cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of the angle between two gradients of the same parameters, each taken for one vector; nan where one is zero."""
    product = math.fsum(float((one[name].double() * other[name].double()).sum()) for name in one)
    squares = (math.fsum(float(g.double().square().sum()) for g in side.values()) for side in (one, other))
    norm = math.sqrt(math.prod(squares))
    return product / norm if norm else math.nan


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile, without values that are not finite; nan where there are no others."""
    finite = torch.tensor([value for value in values if math.isfinite(value)], dtype=torch.float64)
    if not len(finite):
        return math.nan, math.nan, math.nan
    low, median, high = torch.quantile(finite, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return low, median, high
