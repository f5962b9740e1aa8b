"""`MeshAdaptArguments`: `TrainingArguments` plus the mesh. Flat fields here, frozen sub-configs for everyone else.

Each field's help text is its only description. Everything that can be checked without the model is checked at
construction, before any process group forms, and every error names field, value, constraint and remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from transformers import TrainingArguments

from .config import PREDICTORS, SCHEDULES, WIRE_DTYPE_BYTES, BoundaryConfig, MeshConfig

# What a preset gives to the fields that the user left unset.
PRESETS: dict[str, dict] = {
    "dense": {"mask_ratio": 0.0, "exact_first_token": False, "boundary_predictor": "none"},
    "paper": {"mask_ratio": 0.95, "exact_first_token": False, "boundary_predictor": "none", "wire_dtype": "bfloat16"},
}


def user_error(field_name: str, value, constraint: str, remedy: str) -> ValueError:
    return ValueError(f"{field_name}={value!r}: {constraint}. {remedy}")


@dataclass
class MeshAdaptArguments(TrainingArguments):
    preset: str = field(
        default="dense",
        metadata={
            "help": "Which recipe fills the mesh fields that are not set: `dense` sends every activation whole; `paper` "
            "is random masking at 95% in bfloat16 with zero fill, as arXiv 2609.14339 describes its boundaries (the "
            "paper's anchor circuit and spectral correction are not part of this preset yet).",
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
    mask_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Share of each token's hidden entries that never travels over a boundary, in [0, 1). 0 is dense; "
            "the paper uses 0.9 and 0.95. Evaluation is never masked."
        },
    )
    mask_seed: int | None = field(
        default=None,
        metadata={"help": "Seed of the masks. Default: the training seed."},
    )
    exact_first_token: bool | None = field(
        default=None,
        metadata={
            "help": "Send the first token of every sequence whole. Many models keep a massive activation there, which "
            "masking destroys."
        },
    )
    boundary_predictor: str | None = field(
        default=None,
        metadata={
            "help": "What stands in for entries that did not travel: `none` (zero) or `mean` (the channel's mean over "
            "one unmasked pass at the start of training).",
            "choices": list(PREDICTORS),
        },
    )
    wire_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of activations and gradients on the wire. Default: bfloat16 with preset=paper or bf16=True, "
            "else float32.",
            "choices": list(WIRE_DTYPE_BYTES),
        },
    )
    wire_backend: str | None = field(
        default=None,
        metadata={
            "help": "What carries boundary traffic: `gloo` (TCP, packed tensors staged through pinned host memory; what "
            "internet links and several ranks on one GPU need) or `nccl`. Default: gloo.",
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

    def __post_init__(self):
        self._check_choices()
        preset = PRESETS[self.preset]
        given = {name: getattr(self, name) for name in ("exact_first_token", "boundary_predictor", "mask_seed")}
        if self.wire_dtype is None:
            self.wire_dtype = preset.get("wire_dtype", "bfloat16" if self.bf16 else "float32")
        for name in ("mask_ratio", "exact_first_token", "boundary_predictor"):
            if getattr(self, name) is None:
                setattr(self, name, preset[name])
        self._check_boundary(given)
        self._check_mesh()
        self._check_trainer_options()
        if self.wire_backend == "gloo" and self.ddp_backend is None and not self.emulated:
            # NCCL refuses two ranks on one GPU, and the start-up collectives must not need it either.
            self.ddp_backend = "gloo"
        super().__post_init__()

    def _check_choices(self) -> None:
        if self.wire_backend is None:
            self.wire_backend = "gloo"
        choices = {
            "preset": PRESETS,
            "pipeline_schedule": SCHEDULES,
            "boundary_predictor": (*PREDICTORS, None),
            "wire_dtype": (*WIRE_DTYPE_BYTES, None),
            "wire_backend": ("gloo", "nccl"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                options = ", ".join(str(option) for option in allowed if option is not None)
                raise user_error(name, value, "not a known choice", f"Use one of: {options}")

    def _check_boundary(self, given: dict) -> None:
        ratio = self.mask_ratio
        if not 0.0 <= ratio < 1.0:
            raise user_error(
                "mask_ratio", ratio, "must lie in [0, 1)", "Use 0 for dense, 0.9 or 0.95 as the paper does"
            )
        if ratio > 0.0 and self.num_chunks == 1:
            raise user_error(
                "mask_ratio",
                ratio,
                "has no effect with one stage",
                "Set pipeline_stages to 2 or more, or mask_ratio=0",
            )
        if ratio == 0.0:
            for name, off in (("exact_first_token", False), ("boundary_predictor", "none"), ("mask_seed", None)):
                if given[name] not in (None, off):
                    raise user_error(
                        name, given[name], "has no effect without masking", "Set mask_ratio above 0, or leave it unset"
                    )

    def _check_mesh(self) -> None:
        for name in ("pipeline_stages", "pipeline_chunks_per_rank"):
            if getattr(self, name) < 1:
                raise user_error(name, getattr(self, name), "must be at least 1", "Use 1 for an uncut model")
        if self.link_timeout_seconds <= 0:
            raise user_error("link_timeout_seconds", self.link_timeout_seconds, "must be positive", "Try 600")
        interleaved = self.pipeline_schedule == "interleaved"
        if interleaved and (self.pipeline_chunks_per_rank < 2 or self.pipeline_stages < 2):
            raise user_error(
                "pipeline_schedule",
                self.pipeline_schedule,
                "needs pipeline_chunks_per_rank >= 2 and pipeline_stages >= 2",
                "Set both to 2, or use gpipe or 1f1b",
            )
        if self.pipeline_chunks_per_rank > 1 and not interleaved:
            raise user_error(
                "pipeline_chunks_per_rank",
                self.pipeline_chunks_per_rank,
                f"has no effect under pipeline_schedule={self.pipeline_schedule}",
                "Set pipeline_schedule=interleaved, or leave it at 1",
            )
        self._resolve_replicas()
        self._resolve_microbatches()
        self.layers_per_chunk()

    def _resolve_replicas(self) -> None:
        world, stages, replicas = self.launched_ranks, self.pipeline_stages, self.data_parallel_replicas
        if replicas is not None and replicas < 1:
            raise user_error(
                "data_parallel_replicas", replicas, "must be at least 1", "Leave it unset under a launcher"
            )
        if world > 1 and world % stages:
            raise user_error(
                "pipeline_stages", stages, f"does not divide the {world} ranks that were launched",
                f"Launch a multiple of {stages} processes, or choose a divisor of {world}",
            )  # fmt: skip
        if world > 1 and replicas not in (None, world // stages):
            raise user_error(
                "data_parallel_replicas", replicas, f"{world} launched ranks over {stages} stages make {world // stages}",
                "Leave it unset under a launcher",
            )  # fmt: skip
        self.data_parallel_replicas = world // stages if world > 1 else (replicas or 1)

    def _resolve_microbatches(self) -> None:
        batch, wanted = self.per_device_train_batch_size, self.pipeline_microbatches
        if wanted is None:
            most = 2 * self.num_chunks if self.num_chunks > 1 else 1
            self.pipeline_microbatches = max(n for n in range(1, min(most, batch) + 1) if batch % n == 0)
        elif wanted < 1:
            raise user_error("pipeline_microbatches", wanted, "must be at least 1", "Leave it unset for a default")
        elif batch % wanted:
            raise user_error(
                "pipeline_microbatches", wanted, f"does not divide per_device_train_batch_size={batch}",
                "Change one of them so that every microbatch has the same number of rows",
            )  # fmt: skip
        count, stages = self.pipeline_microbatches, self.pipeline_stages
        if self.pipeline_schedule == "interleaved" and count % max(1, count // stages):
            raise user_error(
                "pipeline_microbatches", count, f"interleaved needs a multiple of {max(1, count // stages)} here",
                f"Use a multiple of pipeline_stages={stages}",
            )  # fmt: skip

    def _check_trainer_options(self) -> None:
        if self.fp16:
            raise NotImplementedError("fp16=True: gradient scaling across stages is not supported. Use bf16=True")
        if self.auto_find_batch_size:
            raise NotImplementedError("auto_find_batch_size=True: ranks could end up with different batch sizes")
        if self.fsdp or self.deepspeed:
            raise NotImplementedError("fsdp and deepspeed cannot be combined with a pipeline mesh. Unset them")
        if not self.average_tokens_across_devices:
            raise NotImplementedError(
                "average_tokens_across_devices=False: the mesh normalises by all replicas' tokens"
            )

    @property
    def launched_ranks(self) -> int:
        """Ranks that the launcher started; 1 without a launcher."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def num_chunks(self) -> int:
        return self.pipeline_stages * self.pipeline_chunks_per_rank

    @property
    def emulated(self) -> bool:
        """Whether the whole mesh runs in this one process."""
        return self.launched_ranks == 1

    def layers_per_chunk(self) -> tuple[int, ...] | None:
        """`pipeline_split` as numbers; None for the automatic balance."""
        if self.pipeline_split is None:
            return None
        parts = self.pipeline_split
        try:
            layers = tuple(int(part) for part in (parts.split(",") if isinstance(parts, str) else parts))
        except ValueError:
            layers = ()
        if len(layers) != self.num_chunks or min(layers) < 1:
            raise user_error(
                "pipeline_split", parts, f"must name at least one layer for each of {self.num_chunks} chunks",
                "Write for example 12,10,8, or leave it unset",
            )  # fmt: skip
        return layers

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
            mask_ratio=self.mask_ratio,
            mask_seed=self.seed if self.mask_seed is None else self.mask_seed,
            exact_first_token=self.exact_first_token,
            predictor=self.boundary_predictor,
            wire_dtype=self.wire_dtype,
        )

    # In the emulated mesh one process reads what all replicas would read.
    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size * (self.data_parallel_replicas if self.emulated else 1)

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size * (self.data_parallel_replicas if self.emulated else 1)
