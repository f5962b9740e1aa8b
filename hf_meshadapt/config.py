"""Frozen configuration of a mesh run: what `MeshAdaptArguments` resolves to and every other module reads.

Pure data: no torch, no transformers. Values are validated where a user can still see the field's name, in
`arguments.py`; the checks here guard invariants for callers that build a config by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WIRE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
CODECS = ("none", "random_mask", "transform")
PREDICTORS = ("none", "mean", "token")


@dataclass(frozen=True)
class MeshConfig:
    """Shape of the mesh and how microbatches run through it.

    Attributes:
        stages: ranks per pipeline.
        replicas: data-parallel copies of the pipeline.
        chunks_per_rank: model chunks per rank (2 or more only under the interleaved schedule).
        microbatches: microbatches that one per-replica batch is cut into.
        schedule: one of `SCHEDULES`.
        layers_per_chunk: number of layers of every model chunk in order, or None for the automatic balance.
        emulated: the whole mesh runs in this one process.
        wire_backend: `gloo` or `nccl`.
        timeout_seconds: deadline of every wait between ranks.
    """

    stages: int = 1
    replicas: int = 1
    chunks_per_rank: int = 1
    microbatches: int = 1
    schedule: str = "gpipe"
    layers_per_chunk: tuple[int, ...] | None = None
    emulated: bool = False
    wire_backend: str = "gloo"
    timeout_seconds: float = 600.0

    @property
    def num_chunks(self) -> int:
        """Model chunks in one pipeline; chunk c runs on stage c % stages."""
        return self.stages * self.chunks_per_rank

    @property
    def num_boundaries(self) -> int:
        return self.num_chunks - 1

    @property
    def num_ranks(self) -> int:
        return self.stages * self.replicas


@dataclass(frozen=True)
class BoundaryConfig:
    """What crosses a boundary between two model chunks, in training; evaluation sends everything.

    Attributes:
        codec: one of `CODECS`.
        mask_ratio: random_mask: share of each token's hidden entries that never travels, in [0, 1).
        mask_seed: seed of the masks' pseudo-random function.
        exact_first_token: the first token of every sequence travels whole.
        predictor: what stands where nothing travelled, one of `PREDICTORS`.
        wire_dtype: dtype of uncoded values on the wire, a key of `WIRE_DTYPE_BYTES`.
        budget: transform: bytes of both directions over those of dense bfloat16, everything included.
        forward_share: transform: share of the budget that the forward direction gets.
        loss_weighted: transform: spend bits where the loss feels them rather than where the energy is.
    """

    codec: str = "none"
    mask_ratio: float = 0.0
    mask_seed: int = 0
    exact_first_token: bool = False
    predictor: str = "none"
    wire_dtype: str = "float32"
    budget: float = 0.0
    forward_share: float = 0.75
    loss_weighted: bool = True

    @property
    def coded(self) -> bool:
        return self.codec != "none"

    @property
    def straight_through(self) -> bool:
        """Forward and backward are coded apart, each into bytes of its own."""
        return self.codec == "transform"

    @property
    def needs_calibration(self) -> bool:
        return self.coded and (self.straight_through or self.predictor != "none")

    @property
    def wire_bytes(self) -> int:
        """Bytes of one uncoded value on the wire."""
        return WIRE_DTYPE_BYTES[self.wire_dtype]

    def num_kept(self, hidden_size: int) -> int:
        """random_mask: entries of a token that travel: floor(keep x hidden + 0.5), at least one."""
        return max(1, math.floor((1.0 - self.mask_ratio) * hidden_size + 0.5))

    def values_per_sequence(self, length: int, hidden_size: int) -> int:
        """random_mask: values that one sequence of `length` tokens puts on the wire in each direction."""
        kept = self.num_kept(hidden_size)
        return (length - 1) * kept + hidden_size if self.exact_first_token else length * kept

    def sequence_bytes(self, length: int, hidden_size: int, direction: str) -> int:
        """Bytes that one sequence of `length` tokens puts on the wire; `direction` is forward or backward."""
        if self.straight_through:
            share = self.forward_share if direction == "forward" else 1.0 - self.forward_share
            return math.floor(2 * self.budget * share * length * hidden_size) * 2
        values = self.values_per_sequence(length, hidden_size) if self.coded else length * hidden_size
        return values * self.wire_bytes
