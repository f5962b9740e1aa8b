"""Frozen configuration of a mesh run: what `MeshAdaptArguments` resolves to and every other module reads.

Pure data: no torch, no transformers. Values are validated where a user can still see the field's name, in
`arguments.py`; the checks here guard invariants for callers that build a config by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WIRE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
PREDICTORS = ("none", "mean")


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
    """What crosses a boundary between two model chunks.

    Attributes:
        mask_ratio: share of each token's hidden entries that never travels, in [0, 1); 0 is dense.
        mask_seed: seed of the masks' pseudo-random function.
        exact_first_token: the first token of every sequence travels whole.
        predictor: what fills the entries that did not travel, one of `PREDICTORS`.
        wire_dtype: dtype of the values on the wire, a key of `WIRE_DTYPE_BYTES`.
    """

    mask_ratio: float = 0.0
    mask_seed: int = 0
    exact_first_token: bool = False
    predictor: str = "none"
    wire_dtype: str = "float32"

    @property
    def masked(self) -> bool:
        return self.mask_ratio > 0.0

    @property
    def wire_bytes(self) -> int:
        """Bytes of one value on the wire."""
        return WIRE_DTYPE_BYTES[self.wire_dtype]

    def num_kept(self, hidden_size: int) -> int:
        """Entries of a token that travel: floor(keep x hidden + 0.5), at least one."""
        return max(1, math.floor((1.0 - self.mask_ratio) * hidden_size + 0.5))

    def values_per_sequence(self, length: int, hidden_size: int, masked: bool = True) -> int:
        """Values that one sequence of `length` tokens puts on the wire in one direction."""
        if not (masked and self.masked):
            return length * hidden_size
        kept = self.num_kept(hidden_size)
        return (length - 1) * kept + hidden_size if self.exact_first_token else length * kept
