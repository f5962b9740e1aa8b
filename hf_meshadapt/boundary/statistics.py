"""Running sums over unmasked passes, from which a boundary is fitted; no activation is kept."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

FELT_POWER = 1 / 8  # of a token's squared gradient


@dataclass
class BoundaryMoments:
    """Sums over tokens at one boundary, first tokens and padding left out; all float32.

    Attributes:
        features: (F, F), f fᵀ; the last feature is the constant 1, so the last entry counts tokens.
        cross: (F, H), f hᵀ.
        hidden: (H, H), h hᵀ.
        gradients: (H, H), g gᵀ of per-token-normalised gradients of the loss.
        energies: (2, 2), number of tokens and sum of squared gradient entries, of context tokens and of targets.
        felt_features, felt: of context tokens and of targets, (2, F, F), f fᵀ, and (2, F), f |g|^(1/4): how much the loss
            feels a token is heavy-tailed, and only so high a root of it can be regressed on.
        held_features, held_cross, held_energy: the same over held-out tokens; (F, F), (F, H) and (1,), h·h.
    """

    features: Tensor
    cross: Tensor
    hidden: Tensor
    gradients: Tensor
    energies: Tensor
    felt_features: Tensor
    felt: Tensor
    held_features: Tensor
    held_cross: Tensor
    held_energy: Tensor

    @classmethod
    def zeros(cls, num_features: int, hidden_size: int, device: torch.device | str) -> BoundaryMoments:
        shapes = {
            "features": (num_features, num_features),
            "cross": (num_features, hidden_size),
            "hidden": (hidden_size, hidden_size),
            "gradients": (hidden_size, hidden_size),
            "energies": (2, 2),
            "felt_features": (2, num_features, num_features),
            "felt": (2, num_features),
            "held_features": (num_features, num_features),
            "held_cross": (num_features, hidden_size),
            "held_energy": (1,),
        }
        return cls(**{name: torch.zeros(shape, device=device) for name, shape in shapes.items()})

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    @property
    def num_tokens(self) -> int:
        return int(self.features[-1, -1])

    @property
    def gradient_energy(self) -> float:
        """Mean squared norm of a token's gradient: what tells boundaries apart by how much the loss feels them."""
        count, energy = self.energies.double().sum(0).tolist()
        return energy / count if count else 0.0

    def add(self, features: Tensor, hidden: Tensor, tokens: Tensor, held_out: bool) -> None:
        """Adds a microbatch.

        Args:
            features: (B, T, F).
            hidden: (B, T, H).
            tokens: (B, T) bool, those that count.
            held_out: count them among the held-out tokens only.
        """
        f, h = features[tokens].float(), hidden[tokens].float()
        if held_out:
            self.held_features += f.T @ f
            self.held_cross += f.T @ h
            self.held_energy += h.square().sum()
        else:
            self.features += f.T @ f
            self.cross += f.T @ h
            self.hidden += h.T @ h

    def add_gradient(self, features: Tensor, gradient: Tensor, context: Tensor, targets: Tensor) -> None:
        """Adds the loss's gradient (B, T, H) at the boundary; tokens without any gradient count for nothing.

        Args:
            features: (B, T, F).
            context, targets: (B, T) bool, tokens that predict no label and those that do.
        """
        for row, tokens in enumerate((context, targets)):
            f, g = features[tokens].float(), gradient[tokens].float()
            self.energies[row] += torch.stack([g.new_tensor(float(len(g))), g.square().sum()])
            self.felt_features[row] += f.T @ f
            self.felt[row] += g.norm(dim=1).pow(2 * FELT_POWER) @ f
            g = torch.nn.functional.normalize(g, dim=1)
            self.gradients += g.T @ g
