"""Looks at uncoded hidden states and their gradients as they pass a boundary, and adds them to its moments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

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
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Nothing before it is trained, but its gradient is wanted all the same.
            hidden = hidden.detach().requires_grad_()
        constant = self.table is None
        with torch.autocast(hidden.device.type, enabled=False):  # sums keep their precision
            features = hidden.new_ones(*kind.shape, 1) if constant else token_features(self.table, token_ids)
            return _Observe.apply(hidden, self.by_replica[self.replica], features, kind, self.held_out)


@contextlib.contextmanager
def observing(
    layers: Mapping[str, nn.Module], observers: Mapping[int, Observer], token_ids: Tensor, kind: Tensor
) -> Iterator[None]:
    """Within it, while a microbatch passes forward, observers look at the hidden state that enters their layers.

    Hooks of a layer run outside of what gradient checkpointing repeats.

    Args:
        layers: decoder layers by their index.
        observers: by the layer that each stands before.
        token_ids, kind: the microbatch's, (B, T).
    """
    hooks = [
        layers[str(index)].register_forward_pre_hook(partial(_look, observer, token_ids, kind), with_kwargs=True)
        for index, observer in observers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(observer: Observer, token_ids: Tensor, kind: Tensor, layer: nn.Module, args: tuple, kwargs: dict):
    if args:
        return (observer(args[0], token_ids, kind), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": observer(kwargs["hidden_states"], token_ids, kind)}


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
