"""`MeshAdaptArguments`: `TrainingArguments` plus the mesh. Flat fields here, frozen sub-configs for everyone else.

Each field's help text is its only description. Everything that can be checked without the model is checked at
construction, before any process group forms, and every error names field, value, constraint and remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from .anchor_arguments import AnchorArguments
from .argument_checks import ArgumentChecks, mesh_annotations
from .config import CODECS, PREDICTORS, SCHEDULES, WIRE_DTYPE_BYTES, BoundaryConfig, MeshConfig
from .presets import PRESETS
from .waiting import join_world


@dataclass
class MeshAdaptArguments(AnchorArguments, ArgumentChecks, TrainingArguments):
    preset: str = field(
        default="anchored",
        metadata={
            "help": "Which recipe fills the boundary fields that are not set: `anchored` codes activations and "
            "gradients by what was learnt from a few uncoded passes (predictor and transform codec at 0.05 of the "
            "dense bytes); `dense` sends every activation whole; `paper` is random masking of 0.95 in bfloat16 with zero "
            "fill, an anchor (see there) and, between replicas, dp_sync=streaming_diloco with outer_wire=powersgd: our "
            "reading of arXiv 2609.14339.",
            "choices": list(PRESETS),
        },
    )
    pipeline_stages: int = field(
        default=1,
        metadata={"help": "Ranks that one copy of the model is cut over. The launcher must start a multiple of it."},
    )
    data_parallel_replicas: int | None = field(
        default=None,
        metadata={
            "help": "Copies of the pipeline. Under a launcher it is world size / pipeline_stages and need not be given; "
            "in a single process it asks for the emulated mesh with that many replicas (default 1)."
        },
    )
    pipeline_chunks_per_rank: int = field(
        default=1,
        metadata={"help": "Model chunks on every rank: 1, or 2 and more with pipeline_schedule=interleaved."},
    )
    pipeline_microbatches: int | None = field(
        default=None,
        metadata={
            "help": "Microbatches that per_device_train_batch_size is cut into; must divide it. Default: the largest "
            "divisor of it that is at most 2 x pipeline_stages x pipeline_chunks_per_rank."
        },
    )
    pipeline_schedule: str = field(
        default="gpipe",
        metadata={
            "help": "Order of forward and backward passes: `gpipe` (all forward, then all backward), `1f1b` (same time, "
            "fewer activations held) or `interleaved` (several chunks per rank, smaller bubble, more traffic).",
            "choices": list(SCHEDULES),
        },
    )
    pipeline_split: str | None = field(
        default=None,
        metadata={
            "help": "Layers of every model chunk in order, comma-separated (`12,10,8`). Default: the split with the "
            "smallest slowest chunk, counting the output head by its true cost."
        },
    )
    boundary_codec: str | None = field(
        default=None,
        metadata={
            "help": "How activations and gradients are coded in training: `none`, `random_mask` (a random share of the "
            "entries travels) or `transform` (decorrelated, quantised to the bits that the loss feels); to compare with, "
            "at the bytes of boundary_budget `subspace` (leading principal components), `bottleneck` (random "
            "projection), `topk` (largest entries; `topk_free_indices` leaves what their places cost out of the budget), "
            "and at their own bytes `quantize` (boundary_bits per entry), `tah_quant` (TAH-Quant) and `aq_sgd` (AQ-SGD: "
            "changes since a sample was last seen). Default: by preset, or random_mask when mask_ratio is given. "
            "Evaluation is never coded.",
            "choices": list(CODECS),
        },
    )
    boundary_budget: float | None = field(
        default=None,
        metadata={
            "help": "Bytes of both directions over those of dense bfloat16, headers, gains and exact tokens included. "
            "Default: 0.05. With random_mask it is 1 - mask_ratio."
        },
    )
    boundary_target_step_seconds: float | None = field(
        default=None,
        metadata={
            "help": "transform: seconds that an optimizer step may take for its passes and what they send over the "
            "boundaries; gradient synchronisation and the optimizer come on top. The calibration measures links and "
            "passes and raises the budget of each boundary above boundary_budget, its floor, where the loss gains most, as "
            "far as the predicted step fits. Default: boundary_budget everywhere."
        },
    )
    link_bits_per_second: float | None = field(
        default=None,
        metadata={
            "help": "Rate of every link between stages, each way, for boundary_target_step_seconds. Default: measured, "
            "which the emulated mesh cannot."
        },
    )
    forward_share: float | None = field(
        default=None,
        metadata={
            "help": "Share of the budget that activations get, gradients the rest. Default: 0.8 with transform, "
            "else 0.75."
        },
    )
    loss_weighted: bool | None = field(
        default=None,
        metadata={
            "help": "Spend the transform codec's bits where the loss feels them (default), not where the energy is.",
            "nargs": "?",
            "const": True,
        },
    )
    entropy_coded: bool | None = field(
        default=None,
        metadata={
            "help": "Code the transform's components with a range coder at one quantiser step (default): bits go where a "
            "token is large, in fractions. Without it every component has a fixed number of whole bits.",
            "nargs": "?",
            "const": True,
        },
    )
    boundary_bits: int | None = field(
        default=None,
        metadata={
            "help": "quantize, aq_sgd: bits of an entry, 1, 2, 3, 4 or 8 (default 4); gradients of aq_sgd get twice as "
            "many."
        },
    )
    boundary_rotated: bool | None = field(
        default=None,
        metadata={
            "help": "quantize: rotate each token by random signs and a Hadamard transform first (default), which spreads "
            "outliers over all entries.",
            "nargs": "?",
            "const": True,
        },
    )
    boundary_error_feedback: bool | None = field(
        default=None,
        metadata={
            "help": "topk: send the largest entries of what changed since a sample was last sent, so that what is left out "
            "is not lost. Both ends keep every sample's hidden states in memory. Default: off.",
            "nargs": "?",
            "const": True,
        },
    )
    calibration_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of the training set (over all replicas, padding included) that the start-up calibration of "
            "the boundaries looks at, uncoded. Default: 16384."
        },
    )
    calibration_every: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps after which boundaries are calibrated anew, by the anchor or on the same tokens: the "
            "model drifts away from the one that they fit. 0: only before the first step. Default: as often as it costs a "
            "quarter of the coded bytes; without an anchor, 4 x calibration_tokens / (boundary_budget x step's tokens)."
        },
    )
    mask_ratio: float | None = field(
        default=None,
        metadata={
            "help": "random_mask: share of each token's hidden entries that never travels over a boundary, in [0, 1). 0 is "
            "dense; the paper uses 0.9 and 0.95. Evaluation is never masked."
        },
    )
    mask_seed: int | None = field(default=None, metadata={"help": "Seed of the masks. Default: the training seed."})
    exact_first_token: bool | None = field(
        default=None,
        metadata={
            "help": "Send the first token of every sequence whole (of packed ones as many as take half of a row's bytes). "
            "Many models keep a massive activation there, which masking destroys.",
            "nargs": "?",  # a bare --exact_first_token means True
            "const": True,
        },
    )
    boundary_predictor: str | None = field(
        default=None,
        metadata={
            "help": "What stands in for what did not travel: `none` (zero), `mean` (the channel's mean) or `token` (a "
            "linear function of this and the previous token, checked on held-out tokens, else the mean); learnt from "
            "the calibration. Default: token with transform and subspace, else none.",
            "choices": list(PREDICTORS),
        },
    )
    wire_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of activations and gradients on the wire. Default: bfloat16 with preset=anchored or paper or "
            "with bf16=True, else float32.",
            "choices": list(WIRE_DTYPE_BYTES),
        },
    )
    wire_backend: str | None = field(
        default=None,
        metadata={
            "help": "What carries boundary traffic: `gloo` (TCP, packed tensors staged through pinned host memory; what "
            "internet links and several ranks on one GPU need) or `nccl`, with which logs tell no bytes. Default: gloo.",
            "choices": ["gloo", "nccl"],
        },
    )
    model_dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype of the weights when the trainer is given a model's name: `auto` keeps the checkpoint's own.",
            "choices": ["auto", "float32", "bfloat16"],
        },
    )
    link_timeout_seconds: float = field(
        default=600.0,
        metadata={"help": "Deadline of every wait between ranks; past it the run ends and names who waited for whom."},
    )
    ddp_timeout: int | None = field(
        default=None,
        metadata={
            "help": "Deadline in seconds of the start-up, in which all ranks meet, and of Trainer's own exchanges over "
            "all ranks. Default: link_timeout_seconds. Set it where ranks start far apart or wait long for one that "
            "prepares data."
        },
    )

    def __post_init__(self):
        self._check_fields(mesh_annotations(MeshAdaptArguments))
        self._resolve_circuit()
        self._resolve_boundary()
        self._check_mesh()
        self._resolve_calibration()
        self._resolve_anchor()
        self._check_trainer_options()
        if not self.emulated and not torch.accelerator.is_available():
            # accelerate's launcher keeps a YAML's use_cpu to itself: each rank would take itself for the only one.
            self.use_cpu = True
        if self.wire_backend == "gloo" and self.ddp_backend is None and not self.emulated:
            # NCCL refuses two ranks on one GPU, and the start-up collectives must not need it either.
            self.ddp_backend = "gloo"
        if self.ddp_timeout is None:
            self.ddp_timeout = math.ceil(self.link_timeout_seconds)
        if not self.emulated:
            # TrainingArguments would do it, but on the CPU without a deadline.
            join_world(self.ddp_backend, self.ddp_timeout)
        super().__post_init__()

    def to_dict(self) -> dict:
        # TrainingArguments takes whatever ends in `_token` for a secret and writes a placeholder.
        return super().to_dict() | {"exact_first_token": self.exact_first_token}

    def mesh_config(self) -> MeshConfig:
        return MeshConfig(
            stages=self.pipeline_stages,
            replicas=self.data_parallel_replicas,
            chunks_per_rank=self.pipeline_chunks_per_rank,
            microbatches=self.pipeline_microbatches,
            schedule=self.pipeline_schedule,
            layers_per_chunk=self.layers_per_chunk(),
            emulated=self.emulated,
            wire_backend=self.wire_backend,
            timeout_seconds=self.link_timeout_seconds,
        )

    def boundary_config(self) -> BoundaryConfig:
        return BoundaryConfig(
            codec=self.boundary_codec,
            mask_ratio=self.mask_ratio,
            mask_seed=self.seed if self.mask_seed is None else self.mask_seed,
            exact_first_token=self.exact_first_token,
            predictor=self.boundary_predictor,
            wire_dtype=self.wire_dtype,
            budget=self.boundary_budget or 0.0,
            target_step_seconds=self.boundary_target_step_seconds,
            link_bits_per_second=self.link_bits_per_second,
            forward_share=0.75 if self.forward_share is None else self.forward_share,
            loss_weighted=self.loss_weighted is not False,
            entropy_coded=self.entropy_coded is not False,
            error_feedback=bool(self.boundary_error_feedback),
            bits=4 if self.boundary_bits is None else self.boundary_bits,
            rotated=self.boundary_rotated is True,
        )

    # In the emulated mesh one process reads what all replicas would read.
    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size * (self.data_parallel_replicas if self.emulated else 1)

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size * (self.data_parallel_replicas if self.emulated else 1)
