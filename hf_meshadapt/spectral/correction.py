"""How a prior corrects a gradient: filters, and rules that add the prior. Pure but for the gradient's own memory.

All rules bring a gradient G to (1 - w) G + w T(G), with w the prior's weight and T the rule's target; P = U diag(s) V^T
is the prior, d = s / (s + tau):

    filters            T = alpha G + (1 - alpha) F(G)
      diagonal         F = sum_i d_i <u_i v_i^T, G> u_i v_i^T
      two_sided        F = U D U^T G V D V^T
      left, right      F = U D U^T G,  F = G V D V^T
    blend              T = b P + (1 - b) G |P| / |G|                norms of this tensor
    control_variate    T = G + c P                                  c: what clipping multiplied G by
    anchor_only        T = P, and w = 1

Each is one rank-r update keep G + add (left right). Source: arXiv 2609.14339 names filter, tau and alpha but not F; all
candidates are here. blend: the target has at most the prior's norm, however large masking made G. control_variate: P is
the mean difference of uncoded and coded gradients on the same batch. A filter with P = 0 leaves alpha G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import SpectralConfig
from .factors import Factors


def prior_weight(age_steps: int, num_live_steps: int, max_staleness: int, ramp_steps: int) -> float:
    """Weight of a prior: 1 up to half of `max_staleness`, then falling to 0 at it; at first rising with every use.

    Args:
        age_steps: see `AnchorPrior.age_steps`.
        num_live_steps: earlier steps that a prior corrected.
        max_staleness, ramp_steps: see `SpectralConfig`.
    """
    ramp = min(1.0, (num_live_steps + 1) / ramp_steps) if ramp_steps else 1.0
    return ramp * min(1.0, max(0.0, 2.0 * (1.0 - age_steps / max_staleness)))


def filter_weights(s: Tensor, tau: float, relative: bool) -> Tensor:
    """d (r,) of singular values s (r,), descending: s / (s + tau), 0 where s is."""
    scale = tau * s[:1] if relative else tau
    return torch.where(s > 0, s / (s + scale), torch.zeros_like(s))


def filtered(rule: str, gradient: Tensor, prior: Factors, weights: Tensor) -> tuple[Tensor, Tensor]:
    """F(gradient) as a product left (m, r) @ right (r, n).

    Args:
        gradient: (m, n), of the factors' dtype.
        weights: d (r,).
    """
    u, v = prior.u, prior.v
    if rule == "diagonal":
        coefficients = (u * (gradient @ v)).sum(dim=0)
        return u * (weights * coefficients), v.T
    if rule == "two_sided":
        core = u.T @ (gradient @ v)
        return u * weights @ core * weights, v.T
    if rule == "left":
        return u * weights, u.T @ gradient
    assert rule == "right", rule
    return gradient @ v * weights, v.T


def alignment(gradient: Tensor, prior: Factors) -> Tensor:
    """|G|^2, |U^T G V|^2, <G, P> and |P|^2 of a gradient (m, n) and its prior; float64 (4,), on their device."""
    exact, prior = gradient.float(), prior.to(torch.float32)
    core, s = (prior.u.T @ exact @ prior.v).double(), prior.s.double()
    directions = (s > 0).double()  # of factors that are not full the rest is no direction of the prior
    inside = (directions[:, None] * core * directions).square().sum()
    return torch.stack([exact.double().square().sum(), inside, (core.diagonal() * s).sum(), s.square().sum()])


def correct_(
    gradient: Tensor, prior: Factors | Tensor, config: SpectralConfig, weight: float, clip_coefficient: float = 1.0
) -> None:
    """Corrects a gradient in place, computing in float32 or better.

    Args:
        gradient: (m, n) with factors; any shape with a whole prior of the same shape.
        prior: mean of the anchor gradients, on the gradient's device.
        weight: w, in (0, 1]; 1 for `anchor_only`.
        clip_coefficient: c, for `control_variate`.
    """
    exact = gradient if gradient.dtype == torch.float64 else gradient.float()
    prior = prior.to(exact.dtype)
    if config.filters:
        weights = filter_weights(prior.s, config.tau, config.tau_relative)
        add = weight * (1 - config.alpha)
        left, right = filtered(config.rule, exact, prior, weights)
        exact.addmm_(left, right, beta=1 - add, alpha=add)
    else:
        _add_prior_(exact, prior, config, weight, clip_coefficient)
    if exact is not gradient:
        gradient.copy_(exact)


def _add_prior_(
    gradient: Tensor, prior: Factors | Tensor, config: SpectralConfig, weight: float, clip_coefficient: float
) -> None:
    add = weight
    if config.rule == "anchor_only":
        assert weight == 1, "the fast gradient has no part in it"
        gradient.zero_()
    elif config.rule == "control_variate":
        add = weight * clip_coefficient
    else:
        add = weight * config.blend_weight
        norm, target = gradient.norm(), (prior if isinstance(prior, Tensor) else prior.s).norm()
        ratio = torch.where(norm > 0, target / norm, torch.zeros_like(norm))
        gradient.mul_(1 - weight + weight * (1 - config.blend_weight) * ratio)
    if isinstance(prior, Tensor):
        gradient.add_(prior, alpha=add)
    else:
        gradient.addmm_(prior.u * prior.s, prior.v.T, alpha=add)
