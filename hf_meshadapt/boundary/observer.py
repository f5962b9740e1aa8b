"""Looks at uncoded hidden states and their gradients as they pass a boundary, and adds them to its moments."""

from __future__ import annotations

import torch
from torch import Tensor

from .predictor import num_features, token_features
from .sequence_coder import TARGET, TOKEN
from .statistics import BoundaryMoments


class Observer:
    """Collects what one boundary's calibration needs.

    Args:
        hidden_size: width of a token.
        table: token features, (vocabulary, size) bfloat16; None where only the channel mean is wanted.
        device: where the chunk computes.
        replicas: replicas whose batches pass here.

    Attributes:
        held_out: whether the passes now are for checking the predictor rather than for fitting.
        replica: which of them passes now. Each has sums of its own, so that they are added in the same order whether
            replicas run in sequence or in processes.
    """

    def __init__(self, hidden_size: int, table: Tensor | None, device: torch.device | str, replicas: int = 1):
        self.table = table
        self.by_replica = [BoundaryMoments.zeros(num_features(table), hidden_size, device) for _ in range(replicas)]
        self.held_out = False
        self.replica = 0

    def moments(self) -> BoundaryMoments:
        """The sums of all replicas here."""
        return BoundaryMoments(*(sum(parts[1:], parts[0]) for parts in zip(*(m.tensors() for m in self.by_replica))))

    def __call__(self, hidden: Tensor, token_ids: Tensor, kind: Tensor) -> Tensor:
        """Returns hidden (B, T, H) as it came; first tokens, whose massive activations would swamp the rest, and
        padding are not looked at."""
        constant = self.table is None
        features = hidden.new_ones(*kind.shape, 1) if constant else token_features(self.table, token_ids)
        return _Observe.apply(hidden, self.by_replica[self.replica], features, kind, self.held_out)


class _Observe(torch.autograd.Function):
    """Lets an uncoded hidden state pass, adding it and its gradient to the moments of a calibration."""

    @staticmethod
    def forward(ctx, hidden: Tensor, moments: BoundaryMoments, features: Tensor, kind: Tensor, held_out: bool):
        moments.add(features, hidden, (kind == TOKEN) | (kind == TARGET), held_out)
        ctx.moments, ctx.features, ctx.kind, ctx.held_out = moments, features, kind, held_out
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if not ctx.held_out:
            ctx.moments.add_gradient(ctx.features, gradient, ctx.kind == TOKEN, ctx.kind == TARGET)
        return gradient, None, None, None, None
