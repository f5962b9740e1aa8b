"""What the spectral correction must compute, the slow way: dense priors, full SVDs, float64, one singular pair a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_meshadapt.spectral.config import SpectralConfig


def random_matrix(rows: int, columns: int, rank: int, seed: int, decay: float = 0.7) -> Tensor:
    """(rows, columns) float32 with singular values 1, decay, decay^2, ... up to `rank` of them."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(columns, rank, generator=generator, dtype=torch.float64)).Q
    return ((u * decay ** torch.arange(rank)) @ v.T).float()


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """Best approximation of that rank, float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def filter_oracle(gradient: Tensor, prior: Tensor, config: SpectralConfig) -> Tensor:
    """F(gradient) from the full SVD of a dense prior."""
    gradient = gradient.double()
    u, s, vh = torch.linalg.svd(prior.double(), full_matrices=False)
    tau = config.tau * s[0] if config.tau_relative else torch.tensor(config.tau)
    left, right = torch.zeros(len(u), len(u)).double(), torch.zeros(vh.shape[1], vh.shape[1]).double()
    diagonal = torch.zeros_like(gradient)
    for i in range(len(s)):
        if s[i] < 1e-6 * s[0]:
            continue  # a direction that is not there
        d = s[i] / (s[i] + tau)
        left += d * torch.outer(u[:, i], u[:, i])
        right += d * torch.outer(vh[i], vh[i])
        pair = torch.outer(u[:, i], vh[i])
        diagonal += d * (pair * gradient).sum() * pair
    return {
        "diagonal": diagonal,
        "left": left @ gradient,
        "right": gradient @ right,
        "two_sided": left @ gradient @ right,
    }[config.rule]


def correction_oracle(
    gradient: Tensor, prior: Tensor, config: SpectralConfig, weight: float, clip_coefficient: float = 1.0
) -> Tensor:
    """(1 - weight) G + weight T(G), float64."""
    gradient, prior = gradient.double(), prior.double()
    if config.filters:
        target = config.alpha * gradient + (1 - config.alpha) * filter_oracle(gradient, prior, config)
    elif config.rule == "blend":
        matched = gradient * (prior.norm() / gradient.norm())
        target = config.blend_weight * prior + (1 - config.blend_weight) * matched
    elif config.rule == "control_variate":
        target = gradient + clip_coefficient * prior
    else:
        return prior
    return (1 - weight) * gradient + weight * target
