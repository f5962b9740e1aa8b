"""AQ-SGD (Wang et al., Fine-tuning language models over slow networks using activation quantization with guarantees,
NeurIPS 2022, arXiv 2206.01299; first published as AC-SGD): what changed since a sample was last seen travels.

Steps of its algorithm, for a sample xi with activation a(xi) and message m(xi):
1. xi not seen before: a(xi) travels unquantised, and both machines set m(xi) = a(xi).
2. else Q(a(xi) - m(xi)) travels, and both set m(xi) = m(xi) + Q(a(xi) - m(xi)).
3. the receiver computes with m(xi) as its input.
4. the gradient at m(xi) goes back as Q(gradient), by itself: `BoundaryCoder.encode_gradient`.

Q is an input of the algorithm; here `QuantizeCodec`, not rotated: per-token scale by the largest magnitude, rounded to
the nearest. Gradients get twice the bits, as in the authors' examples (DS3Lab/AC-SGD, README: 4 forward, 8 backward).
Their theorem asks for an unbiased Q; the published code rounds to the nearest too.

Where we differ: a sample is known by its real token ids, so that equal sequences are one sample. The pipeline's
buffers have one size, so a batch with an unseen sample travels uncoded as a whole, gradients too (the authors' warm-up
epochs do the same). m is kept in bfloat16 (the published code: float16) in host memory at each end, 2 x length x hidden
bytes per sample; it is not saved with checkpoints, so that a resumed run sends every sample whole once more.

Error law: |a - m| after a visit is Q's for the difference a - m before it, see `quantize.py`; + 2**-8 |m|.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .coder import BoundaryCoder
from .sequence_coder import PADDING

if TYPE_CHECKING:
    from ..pipeline.stage import StageModule


class DeltaCoder(BoundaryCoder):
    """`BoundaryCoder` whose forward direction is coded relative to what was sent for the same sample the last time.

    With a codec that drops most of a difference (`error_feedback` with topk) this is error feedback as in EF21
    (Richtarik et al., arXiv 2106.05203, algorithm 2: g <- g + C(gradient - g), here of a sample's activation): what was
    left out is still in the next difference. It begins with the prediction rather than with a whole visit.
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.messages: dict[bytes, Tensor] = {}  # m: real token ids to (real tokens, H) bfloat16

    def knows(self, token_ids: Tensor, kind: Tensor) -> bool:
        """Whether every sequence of token_ids (B, T) was seen before."""
        return all(name in self.messages for name in sample_names(token_ids, kind))

    def remember(self, hidden: Tensor, token_ids: Tensor, kind: Tensor) -> None:
        """Takes hidden (B, T, H) for what both ends now have of these samples; steps 1 and 2."""
        for row, name in enumerate(sample_names(token_ids, kind)):
            # On the host: a data set's worth of them would fill a GPU.
            self.messages[name] = hidden[row, kind[row] != PADDING].detach().to(torch.bfloat16).cpu()

    def encode(self, hidden: Tensor, token_ids: Tensor, kind: Tensor) -> Tensor:
        """hidden (B, T, H) to uint8 (B, bytes); without error feedback KeyError for a sequence that was never seen."""
        base = self._base(token_ids, kind)
        packed = self.forward.encode(hidden.float(), base, kind)
        self.remember(self.forward.decode(packed, base, kind), token_ids, kind)
        return packed

    def decode(self, packed: Tensor, token_ids: Tensor, kind: Tensor) -> Tensor:
        """m after this visit, (B, T, H) float32."""
        hidden = self.forward.decode(packed, self._base(token_ids, kind), kind)
        self.remember(hidden, token_ids, kind)
        return hidden

    def _base(self, token_ids: Tensor, kind: Tensor) -> Tensor:
        base = torch.zeros(*token_ids.shape, self.hidden_size, device=token_ids.device)
        if self.config.error_feedback:
            base = self.predict(token_ids, kind).clone()
        for row, name in enumerate(sample_names(token_ids, kind)):
            if name in self.messages or not self.config.error_feedback:
                base[row, kind[row] != PADDING] = self.messages[name].to(base.device).float()
        return base


def mark_first_visit(stages: Iterable[StageModule], token_ids: Tensor, kind: Tensor) -> bool:
    """Tells the boundaries of these chunks whether a batch has samples that were never seen, and returns it.

    All ranks of a pipeline decide alike: they read the same batches from the start.

    Args:
        token_ids, kind: (B, T), of one replica.
    """
    ends = [end for stage in stages for end in (stage.receive, stage.send) if end is not None]
    first = not all(end.coder.knows(token_ids, kind) for end in ends)
    for end in ends:
        end.first_visit = first
    return first


def sample_names(token_ids: Tensor, kind: Tensor) -> list[bytes]:
    """One name for each sequence: its real token ids."""
    ids, real = token_ids.cpu(), (kind != PADDING).cpu()
    return [ids[row, real[row]].numpy().tobytes() for row in range(len(ids))]
