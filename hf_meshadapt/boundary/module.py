"""The two in-graph ends of a boundary: the last module of one chunk and the first of the next.

Training mode codes, evaluation mode sends everything: `module.train()` and `module.eval()` choose, and both ends must
be in the same mode. What travels forward is the first tensor that `BoundarySend` returns; a second one, the carrier,
exists for its gradient, which travels back. The pipeline asks `wire_tensors` how large its buffers are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_meshadapt.boundary.aq_sgd import DeltaCoder
from hf_meshadapt.boundary.codecs import make_codec
from hf_meshadapt.boundary.coder import BoundaryCoder, ReceiveCoded, SendCoded, empty_carrier
from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.prf import boundary_key
from hf_meshadapt.boundary.sequence_coder import FIRST
from hf_meshadapt.config import BoundaryConfig


def wire_tensors(
    config: BoundaryConfig, hidden_size: int, batch: int, length: int, coded: bool, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Empty tensors like those that one microbatch puts on the wire: payload, and carrier where there is one.

    Args:
        config: of this boundary (`BoundaryConfig.at`).
    """
    if coded and config.straight_through:
        payload = torch.empty(batch, config.sequence_bytes(length, hidden_size, "forward"), dtype=torch.uint8)
        return payload.to(device), empty_carrier(config, hidden_size, batch, length, device)
    codec = make_codec(config, hidden_size, coded)
    return (torch.empty(codec.packed_shape(batch, length), dtype=codec.wire_dtype, device=device),)


class _BoundaryEnd(nn.Module):
    """What both ends share. `boundary` b lies between chunk b and chunk b + 1."""

    def __init__(self, config: BoundaryConfig, boundary: int, hidden_size: int) -> None:
        super().__init__()
        self.config, self.boundary, self.hidden_size = config.at(boundary), boundary, hidden_size
        self._codecs = {coded: make_codec(config, hidden_size, coded) for coded in (False, True)}
        self.coder: BoundaryCoder | None = None
        self.first_visit = False  # the runner's word that this batch has samples that aq_sgd must send whole
        if config.straight_through and not config.needs_calibration:
            self.set_fit(BoundaryFit.empty(hidden_size), None)

    def set_config(self, config: BoundaryConfig) -> None:
        """Takes other budgets; a fit must follow, since the coder of the old ones is gone."""
        self.config, self.coder = config.at(self.boundary), None

    def set_fit(self, fit: BoundaryFit, table: Tensor | None) -> None:
        """Takes what calibration found out; both ends must get the same. What they remember of samples stays."""
        kind = DeltaCoder if self.config.remembers_samples else BoundaryCoder
        earlier, self.coder = self.coder, kind(self.config, self.hidden_size, fit, table)
        if isinstance(earlier, DeltaCoder) and isinstance(self.coder, DeltaCoder):
            self.coder.messages = earlier.messages

    @property
    def coded(self) -> bool:
        """Whether the next forward codes."""
        return self.training and self.config.coded and not self.first_visit

    def _fitted(self) -> BoundaryCoder:
        if self.coder is None:
            raise RuntimeError(
                f"boundary {self.boundary} needs a calibration before it can code (codec {self.config.codec}, predictor "
                f"{self.config.predictor}): run one, or load the state of a run that did"
            )
        return self.coder

    def extra_repr(self) -> str:
        return f"boundary={self.boundary}, hidden_size={self.hidden_size}, {self.config}"


class BoundarySend(_BoundaryEnd):
    """Packs a chunk's output for the wire."""

    def forward(
        self, hidden: Tensor, key: int = 0, token_ids: Tensor | None = None, kind: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Pack hidden (B, T, H), any float dtype.

        Args:
            hidden: the chunk's output.
            key: the microbatch's, from `prf.microbatch_key`.
            token_ids: (B, T); needed by predictors.
            kind: (B, T), what every position is (`sequence_coder`); None is a first token followed by others.

        Returns:
            Tensors like `wire_tensors`. The gradient of a masked hidden is zero on every entry that was not sent.
        """
        if self.coded and self.config.straight_through:
            return SendCoded.apply(hidden, self._fitted(), token_ids, kind)
        packed = self._codecs[self.coded].encode(hidden, boundary_key(key, self.boundary), sequence_starts(kind))
        if self.first_visit and self.training:
            self.coder.remember(packed, token_ids, kind)
        return (packed,)


class BoundaryReceive(_BoundaryEnd):
    """Unpacks what the previous chunk sent."""

    def forward(
        self,
        packed: tuple[Tensor, ...],
        key: int,
        token_ids: Tensor | None,
        kind: Tensor | None,
        length: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Unpack what `BoundarySend` of the same boundary made from the same key, token_ids and kind.

        Args:
            packed: tensors like `wire_tensors`.
            length: padded tokens per sequence, T.
            dtype: of the result, the dtype in which this chunk computes.

        Returns:
            Hidden (B, T, H).

        Raises:
            ValueError: packed does not have this mode's shape, as when the two ends differ in train/eval mode.
            RuntimeError: a calibration is needed first.
        """
        self._check_shape(packed, length)
        if self.coded and self.config.straight_through:
            return ReceiveCoded.apply(*packed, self._fitted(), token_ids, kind, dtype)
        fill = packed[0].new_zeros((), dtype=dtype).expand(packed[0].shape[0], length, self.hidden_size)
        if self.coded and self.config.predictor != "none":
            fill = self._fitted().predict(token_ids, kind).to(dtype)
        key = boundary_key(key, self.boundary)
        if self.first_visit and self.training:
            self.coder.remember(packed[0], token_ids, kind)
        return self._codecs[self.coded].decode(packed[0], key, sequence_starts(kind), fill)

    def _check_shape(self, packed: tuple[Tensor, ...], length: int) -> None:
        expected = wire_tensors(self.config, self.hidden_size, len(packed[0]), length, self.coded, "meta")
        if [p.shape for p in packed] != [e.shape for e in expected]:
            mode = "train" if self.training else "eval"
            raise ValueError(
                f"boundary {self.boundary} received tensors of shapes {[tuple(p.shape) for p in packed]}, expected "
                f"{[tuple(e.shape) for e in expected]} in {mode} mode for sequences of {length} tokens: check that both "
                "ends are in the same mode, with the same config and padded length"
            )


def sequence_starts(kind: Tensor | None) -> Tensor | None:
    """First tokens of sequences, bool like kind (B, T)."""
    return None if kind is None else kind == FIRST
