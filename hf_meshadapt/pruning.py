"""How a model bears the loss of its smallest weights: what a noisy training leaves may be more fragile than it looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .spectral.config import kind_of

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@contextlib.contextmanager
def pruned(model: nn.Module, share: float) -> Iterator[None]:
    """Within it that share of the entries of every matrix of the blocks is zero, those of the least magnitude.

    Unstructured, matrix by matrix, as in Han et al., Learning both weights and connections (2015), without retraining.
    """
    kept = {}
    for name, parameter in model.named_parameters():
        count = int(share * parameter.numel())
        if count and kind_of(name, tuple(parameter.shape)) == "matrix":
            kept[parameter] = parameter.data
            smallest = parameter.data.abs().flatten().topk(count, largest=False, sorted=False).indices
            parameter.data = parameter.data.flatten().index_fill(0, smallest, 0.0).view_as(parameter)
    try:
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


@torch.no_grad()
def pruned_losses(model: nn.Module, batches: Iterable[dict], shares: Iterable[float] = SHARES) -> dict[float, float]:
    """Mean loss over batches, each counted alike, by the share of weights that is zero.

    Args:
        model: a causal language model, on the batches' device.
        batches: with labels.
    """
    model.eval()
    batches, losses = list(batches), {}
    for share in shares:
        with pruned(model, share):
            losses[share] = sum(float(model(**batch, use_cache=False).loss) for batch in batches) / len(batches)
    return losses
