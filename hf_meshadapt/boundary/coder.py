"""Both directions of a calibrated boundary, put together from its fit: what is coded, relative to what, in how many bytes.

Forward, hidden minus prediction is coded and the first token of every sequence travels whole. Backward, the gradient
at the decoded hidden state is coded by itself (straight-through), in a budget of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import BoundaryConfig
from .fitting import BoundaryFit
from .predictor import token_features
from .sensitivity import TokenSensitivity
from .sequence_coder import FIRST, SequenceCoder
from .token_codecs import make_token_codec
from .transform import product_dtype


class BoundaryCoder:
    """Codes hidden states and their gradients at one boundary; both ends hold one, made from the same fit.

    Args:
        config: budgets.
        hidden_size: width of a token.
        fit: what calibration found out.
        table: token features, (vocabulary, size) bfloat16, None where the predictor needs none.
    """

    def __init__(self, config: BoundaryConfig, hidden_size: int, fit: BoundaryFit, table: Tensor | None):
        self.config, self.hidden_size, self.fit, self.table = config, hidden_size, fit, table
        self.dtype = product_dtype(config.wire_dtype)
        self.weights = fit.weights.to(self.dtype)
        self.forward = self.backward = None
        if config.straight_through:
            self.forward, self.backward = (self._sequence_coder(way) for way in ("forward", "backward"))

    def _sequence_coder(self, direction: str) -> SequenceCoder:
        config, fit, forward = self.config, self.fit, direction == "forward"

        def sequence_bytes(length: int) -> int:
            return config.sequence_bytes(length, self.hidden_size, direction)

        # A bottleneck's gradient has the support of its activation, first tokens included.
        exact_first = config.exact_first_token and (forward or config.codec == "bottleneck")
        tables = fit.forward if forward else fit.backward
        if config.fits_transforms and tables is None:
            raise ValueError(
                f"boundary_codec={config.codec!r}: the calibration that was loaded is of another codec and holds no "
                "transform. Resume with the codec of that run, or start anew"
            )
        if config.codec == "transform" and config.entropy_coded:
            # Coded as they are, gradients that are felt more are larger: they need no sensitivity.
            sensitivity = TokenSensitivity(fit, self.table) if forward else None
            from .entropy_coder import EntropySequenceCoder  # numba takes time to import

            return EntropySequenceCoder(tables, self.hidden_size, sequence_bytes, exact_first, sensitivity, self.dtype)
        codec = make_token_codec(config, self.hidden_size, direction, tables)
        return SequenceCoder(codec, self.hidden_size, sequence_bytes, exact_first, fit.sensitivity)

    def predict(self, token_ids: Tensor, kind: Tensor | None) -> Tensor:
        """What both ends expect at the boundary: (B, T, H) float32."""
        if len(self.fit.weights) == 1:  # the channel mean
            # Codecs without a calibration are made before the model is on its device.
            self.fit.weights = self.fit.weights.to(token_ids.device)
            return self.fit.weights.expand(*token_ids.shape, -1)
        starts = None if kind is None else (kind == FIRST).to(token_ids.device, non_blocking=True)
        return (token_features(self.table, token_ids, starts, self.dtype) @ self.weights).float()

    def encode(self, hidden: Tensor, token_ids: Tensor, kind: Tensor) -> Tensor:
        """hidden (B, T, H) to uint8 (B, bytes)."""
        return self.forward.encode(hidden.float(), self.predict(token_ids, kind), kind, token_ids)

    def decode(self, packed: Tensor, token_ids: Tensor, kind: Tensor) -> Tensor:
        """The hidden states as far as they were coded, (B, T, H) float32."""
        return self.forward.decode(packed, self.predict(token_ids, kind), kind, token_ids)

    def encode_gradient(self, gradient: Tensor, kind: Tensor) -> Tensor:
        """gradient (B, T, H) to uint8 (B, bytes)."""
        return self.backward.encode(gradient.float(), None, kind)

    def decode_gradient(self, packed: Tensor, kind: Tensor) -> Tensor:
        """The gradient as far as it was coded, (B, T, H) float32."""
        return self.backward.decode(packed, None, kind)


class SendCoded(torch.autograd.Function):
    """hidden -> (payload, carrier). The payload travels forward; nothing of the carrier does but its gradient, which
    comes back as the coded gradient of hidden: bytes, looked at as bfloat16 since autograd moves floats."""

    @staticmethod
    def forward(ctx, hidden: Tensor, coder: BoundaryCoder, token_ids: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        ctx.coder, ctx.kind, ctx.dtype = coder, kind, hidden.dtype
        payload = coder.encode(hidden, token_ids, kind)
        ctx.mark_non_differentiable(payload)
        return payload, empty_carrier(coder.config, coder.hidden_size, *kind.shape, hidden.device)

    @staticmethod
    def backward(ctx, _, coded: Tensor):
        return ctx.coder.decode_gradient(coded.view(torch.uint8), ctx.kind).to(ctx.dtype), None, None, None


class ReceiveCoded(torch.autograd.Function):
    """(payload, carrier) -> hidden; the carrier's gradient is the coded gradient of hidden."""

    @staticmethod
    def forward(ctx, payload, carrier, coder: BoundaryCoder, token_ids: Tensor, kind: Tensor, dtype: torch.dtype):
        ctx.coder, ctx.kind = coder, kind
        return coder.decode(payload, token_ids, kind).to(dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return None, ctx.coder.encode_gradient(gradient, ctx.kind).view(torch.bfloat16), None, None, None, None


def empty_carrier(
    config: BoundaryConfig, hidden_size: int, batch: int, length: int, device: torch.device | str
) -> Tensor:
    """bfloat16 (B, bytes of a coded gradient / 2): the shape matters, the values never do."""
    values = config.sequence_bytes(length, hidden_size, "backward") // 2
    return torch.zeros(batch, values, dtype=torch.bfloat16, device=device)
