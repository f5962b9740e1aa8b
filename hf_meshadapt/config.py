"""Frozen configuration of a mesh run: what `MeshAdaptArguments` resolves to and every other module reads.

Pure data: no torch, no transformers. Values are validated where a user can still see the field's name, in
`arguments.py`; the checks here guard invariants for callers that build a config by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WIRE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
CODECS = (
    "none",
    "random_mask",
    "transform",
    "subspace",
    "bottleneck",
    "topk",
    "topk_free_indices",
    "quantize",
    "tah_quant",
    "aq_sgd",
)
PREDICTORS = ("none", "mean", "token")
DP_SYNCS = ("allreduce", "powersgd", "diloco", "streaming_diloco")
OUTER_WIRES = ("float32", "bfloat16", "int8", "powersgd")


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
        budget: bytes of both directions over those of dense bfloat16, everything included; for `topk_free_indices`
            all but the indices. Without effect on codecs that have a size of their own.
        budgets: of every boundary, where they differ; see `at`.
        target_step_seconds: the calibration raises budgets above `budget` as long as a step fits in this time.
        link_bits_per_second: rate of every link where it shall not be measured.
        forward_share: share of the budget that the forward direction gets; bottleneck shares equally.
        loss_weighted: transform: spend bits where the loss feels them rather than where the energy is.
        entropy_coded: transform: one quantiser step and a range coder rather than whole bits per component.
        bits: quantize, aq_sgd: bits of an entry; gradients of aq_sgd get twice as many.
        rotated: quantize: rotate before quantising.
        error_feedback: topk: code what changed since a sample was last sent, so that what is left out is not lost.
    """

    codec: str = "none"
    mask_ratio: float = 0.0
    mask_seed: int = 0
    exact_first_token: bool = False
    predictor: str = "none"
    wire_dtype: str = "float32"
    budget: float = 0.0
    budgets: tuple[float, ...] | None = None
    target_step_seconds: float | None = None
    link_bits_per_second: float | None = None
    forward_share: float = 0.75
    loss_weighted: bool = True
    entropy_coded: bool = True
    bits: int = 4
    rotated: bool = True
    error_feedback: bool = False

    @property
    def remembers_samples(self) -> bool:
        """Both ends keep what was last sent of every sample."""
        return self.codec == "aq_sgd" or self.error_feedback

    @property
    def coded(self) -> bool:
        return self.codec != "none"

    @property
    def straight_through(self) -> bool:
        """Forward and backward are coded apart, each into bytes of its own."""
        return self.codec not in ("none", "random_mask")

    @property
    def fits_transforms(self) -> bool:
        """The codec needs the covariances of what it codes, gradients included."""
        return self.codec in ("transform", "subspace")

    @property
    def needs_calibration(self) -> bool:
        return self.coded and (self.fits_transforms or self.predictor != "none")

    @property
    def wire_bytes(self) -> int:
        """Bytes of one uncoded value on the wire."""
        return WIRE_DTYPE_BYTES[self.wire_dtype]

    @property
    def adaptive(self) -> bool:
        """The calibration chooses a budget for every boundary."""
        return self.target_step_seconds is not None

    def at(self, boundary: int) -> BoundaryConfig:
        """What crosses one boundary, its own budget in `budget`: what sizes and coders are made from."""
        return self if self.budgets is None else replace(self, budget=self.budgets[boundary], budgets=None)

    def num_kept(self, hidden_size: int) -> int:
        """random_mask: entries of a token that travel: floor(keep x hidden + 0.5), at least one."""
        return max(1, math.floor((1.0 - self.mask_ratio) * hidden_size + 0.5))

    def values_per_sequence(self, length: int, hidden_size: int) -> int:
        """random_mask: values that one sequence of `length` tokens puts on the wire in each direction."""
        kept = self.num_kept(hidden_size)
        return (length - 1) * kept + hidden_size if self.exact_first_token else length * kept

    def sequence_bytes(self, length: int, hidden_size: int, direction: str) -> int:
        """Bytes that one sequence of `length` tokens puts on the wire; `direction` is forward or backward."""
        assert self.budgets is None, "boundaries differ: ask at(boundary)"
        if self.straight_through:
            return 2 * self._coded_values(length, hidden_size, direction)
        values = self.values_per_sequence(length, hidden_size) if self.coded else length * hidden_size
        return values * self.wire_bytes

    def check_room(self, length: int, hidden_size: int) -> None:
        """Raises ValueError where the budget leaves a sequence of `length` tokens no byte in a direction."""
        if not self.coded:
            return
        least = replace(self, budgets=None)  # of all boundaries
        for direction in ("forward", "backward"):
            if not least.sequence_bytes(length, hidden_size, direction):
                raise ValueError(
                    f"boundary_budget={self.budget:g}: with forward_share={self.forward_share:g} it leaves no byte for the "
                    f"{direction} pass of a sequence of {length} tokens of width {hidden_size}. Raise boundary_budget, or "
                    "pad to longer sequences"
                )

    def token_bytes(self, hidden_size: int, direction: str) -> int | None:
        """Bytes of a coded token where the codec alone decides them; None where the budget does.

        Raises:
            ValueError: tah_quant: the hidden size is not divisible by 8.
        """
        if self.codec == "quantize":
            return quantized_bytes(hidden_size, self.bits)
        if self.codec == "aq_sgd":
            return quantized_bytes(hidden_size, self.bits if direction == "forward" else min(8, 2 * self.bits))
        if self.codec == "tah_quant":
            return tah_quant_bytes(hidden_size) if direction == "forward" else tah_gradient_bytes(hidden_size)
        return None

    def _coded_values(self, length: int, hidden_size: int, direction: str) -> int:
        """Straight-through codecs: bytes of a sequence in pairs, since autograd moves them as bfloat16."""
        token_bytes = self.token_bytes(hidden_size, direction)
        if token_bytes is not None:
            exact_bytes = 2 * hidden_size if self.exact_first_token and direction == "forward" else 0
            return -(-(length * token_bytes + exact_bytes) // 2)
        forward_share = 0.5 if self.codec == "bottleneck" else self.forward_share
        share = forward_share if direction == "forward" else 1.0 - forward_share
        values = math.floor(2 * self.budget * share * length * hidden_size)
        if self.codec == "topk_free_indices":
            values = values * (16 + index_bits(hidden_size)) // 16
        return values


@dataclass(frozen=True)
class DataParallelConfig:
    """How the replicas of a stage stay one model.

    Attributes:
        sync: one of `DP_SYNCS`.
        matrix_rank: of the factors of powersgd, of outer_wire powersgd, and of what keeps tied embeddings equal unless
            the sync is allreduce.
        factor_dtype: dtype in which PowerSGD's messages travel, `float32` or `bfloat16`.
        outer_wire: diloco, streaming_diloco: how pseudo-gradients travel, one of `OUTER_WIRES`.
        sync_every: optimizer steps between two outer steps of a parameter; 1 where gradients are averaged.
        outer_learning_rate, outer_momentum: of the outer Nesterov SGD.
        num_fragments: streaming_diloco: parts of a stage that are synchronised in turn.
        overlap_steps: streaming_diloco: optimizer steps between the sending of a fragment and its outer step.
        mixing: streaming_diloco: share of a replica's own weights in what it goes on with.
        chunk_bytes: streaming_diloco: pieces in which a fragment travels.
        check_every: optimizer steps between two comparisons of what replicas must hold alike; None: never.
        freeze_tied: a matrix that is input embedding and output head at once is not trained.
    """

    sync: str = "allreduce"
    matrix_rank: int = 32
    factor_dtype: str = "bfloat16"
    outer_wire: str = "bfloat16"
    sync_every: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    num_fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    chunk_bytes: int = 256 * 1024
    check_every: int | None = None
    freeze_tied: bool = False

    @property
    def steps_apart(self) -> bool:
        """Replicas train weights of their own between syncs."""
        return self.sync in ("diloco", "streaming_diloco")

    @property
    def low_rank(self) -> bool:
        """Matrices travel as factors."""
        return self.sync == "powersgd" or (self.steps_apart and self.outer_wire == "powersgd")


# How large codes are; the codecs in boundary/ read it here, since the planner must know it without torch.
SCALE_BYTES = 2  # a bfloat16
TAH_BITS = (4, 3)  # of a tile with much entropy, and of the others


def quantized_bytes(num_values: int, bits: int) -> int:
    """Bytes of values quantised to `bits` each with one scale."""
    return SCALE_BYTES + -(-num_values * bits // 8)


def index_bits(hidden_size: int) -> int:
    """Bits that name an entry of a token."""
    return (hidden_size - 1).bit_length()


def tile_size(hidden_size: int, largest: int) -> int:
    """Largest power of two up to `largest` (itself one) that divides the hidden size.

    Raises:
        ValueError: it is below 8.
    """
    size = math.gcd(hidden_size, largest)
    if size < 8:
        raise ValueError(f"hidden size {hidden_size} has no tiles of 8 entries or more: use another boundary_codec")
    return size


def tah_high_tiles(num_tiles: int) -> int:
    """tah_quant: tiles of a token that get the more bits, 80%."""
    return math.floor(0.8 * num_tiles + 0.5)


def tah_quant_bytes(hidden_size: int) -> int:
    """tah_quant: bytes of a token's activation.

    Per tile scale, zero-point, precision bit, transform bit and the outlier's place.
    """
    size = tile_size(hidden_size, 64)
    tiles = hidden_size // size
    high = tah_high_tiles(tiles)
    tile_bits = 8 * 2 * SCALE_BYTES + 2 + index_bits(size)
    return -(-(size * (TAH_BITS[0] * high + TAH_BITS[1] * (tiles - high)) + tiles * tile_bits) // 8)


def tah_gradient_bytes(hidden_size: int) -> int:
    """tah_quant: bytes of a token's gradient, 6 bits with one scale per 32 entries."""
    size = tile_size(hidden_size, 32)
    return hidden_size // size * quantized_bytes(size, 6)
