"""What an anchor sends of its gradients: warm-started factors of matrices, vectors whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .config import SpectralConfig, prior_rank
from .factors import Factors, compress


class GradientCompressor:
    """Compresses the gradients of one pass after another; what it found last time is where it starts.

    Args:
        config: of the correction, the same as on the fast side.
        embeddings: see `config.kind_of`.
        dtype: of what is sent.
        warm: start so; without it, what is sent depends on nothing but the gradients, at the cost of more iterations.
    """

    def __init__(
        self,
        config: SpectralConfig,
        embeddings: Collection[str] = (),
        dtype: torch.dtype = torch.bfloat16,
        warm: bool = True,
    ) -> None:
        self.config = config
        self.embeddings = frozenset(embeddings)
        self.dtype = dtype
        self.warm = warm
        self.warm_starts: dict[str, Factors] = {}

    @torch.no_grad()
    def compress(self, gradients: Mapping[str, Tensor]) -> dict[str, Factors | Tensor]:
        """Gradients by parameter name to what `Priors.receive` takes; parameters without a prior are left out."""
        sent: dict[str, Factors | Tensor] = {}
        for name, gradient in gradients.items():
            rank = prior_rank(self.config, name, tuple(gradient.shape), self.embeddings)
            if rank is None:
                continue
            value = gradient
            if rank:
                value = compress(gradient, rank, name, self.warm_starts.get(name))
                if self.warm:
                    self.warm_starts[name] = value
            sent[name] = value.to(self.dtype)
        return sent
