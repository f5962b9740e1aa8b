"""What `MeshAdaptArguments` refuses at construction: every error names field, value, constraint and remedy."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from pathlib import Path

import torch
from transformers import TrainingArguments

from .config import SCHEDULES, WIRE_DTYPE_BYTES
from .field_checks import RANGES, check_range, check_type
from .pipeline.microbatch import largest_divisor
from .presets import BOUNDARY_FIELDS, PRESETS, resolve_boundary, user_error
from .sync_arguments import SyncArguments

DEFAULT_CALIBRATION_TOKENS = 16384

# Trainer's options that a mesh would ignore or get wrong, and what to do instead.
UNSUPPORTED = {
    "fp16": "gradient scaling across stages is not supported. Use bf16=True",
    "auto_find_batch_size": "ranks could end up with different batch sizes. Set per_device_train_batch_size instead",
    "fsdp": "cannot be combined with a pipeline mesh. Unset it",
    "deepspeed": "cannot be combined with a pipeline mesh. Unset it",
    "torch_compile": "stages are not compiled. Unset it",
    "use_liger_kernel": "it replaces the forward pass that stages are cut from. Unset it",
    "bf16_full_eval": "evaluation runs on the stages that train. Load the model in bfloat16, or set bf16=True",
    "fp16_full_eval": "evaluation runs on the stages that train. Set bf16=True for less memory",
    "eval_use_gather_object": "what metrics need travels as tensors. Unset it",
    "parallelism_config": "cannot be combined with a pipeline mesh. Unset it",
    "enable_jit_checkpoint": "ranks could be stopped at different steps. Set save_steps instead",
    "ddp_find_unused_parameters": "what a pass does not use is averaged as a gradient of zeros. Unset it",
    "ddp_bucket_cap_mb": "the mesh lays out the gradients' buckets itself. Unset it",
    "ddp_broadcast_buffers": "replicas agree on their buffers already. Unset it",
    "ddp_static_graph": "the mesh wraps the stages itself. Unset it",
}


def mesh_annotations(cls: type) -> dict[str, str]:
    """Fields that `MeshAdaptArguments`, or a mixin of it, adds to Trainer's or declares anew, and their types as written.

    HfArgumentParser replaces those of `dataclasses.fields`; and subclasses have fields that are not ours to check.
    """
    own = [base for base in cls.__mro__ if base not in TrainingArguments.__mro__]
    return {name: written for base in own for name, written in vars(base).get("__annotations__", {}).items()}


class ArgumentChecks(SyncArguments):
    """Mixin of `MeshAdaptArguments`: checks its fields and fills in those that follow from others."""

    def _check_fields(self, annotations: dict[str, str]) -> None:
        """Types, ranges and choices of single fields.

        Args:
            annotations: see `mesh_annotations`.
        """
        trainers_own = {field.name for field in fields(TrainingArguments)}
        for name, annotation in annotations.items():
            value = getattr(self, name)
            listed = name == "pipeline_split" and isinstance(value, (list, tuple))  # numbers instead of a text
            if name not in trainers_own and not listed:
                check_type(name, value, annotation)
        for name in RANGES:
            check_range(name, getattr(self, name))
        self._check_choices()

    def _check_choices(self) -> None:
        if self.wire_backend is None:
            self.wire_backend = "gloo"
        choices = {
            "preset": PRESETS,
            "pipeline_schedule": SCHEDULES,
            "wire_dtype": (*WIRE_DTYPE_BYTES, None),
            "wire_backend": ("gloo", "nccl"),
            "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
            "model_dtype": ("auto", "float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                options = ", ".join(str(option) for option in allowed if option is not None)
                raise user_error(name, value, "not a known choice", f"Use one of: {options}")

    def _resolve_boundary(self) -> None:
        """Fills in the boundary's fields; what was given and what follows are kept apart, so that both can be checked."""
        names = ("boundary_codec", *BOUNDARY_FIELDS)
        resolved = resolve_boundary(self.preset, {name: getattr(self, name) for name in names}, self.num_chunks)
        default_dtype = PRESETS[self.preset][1] or ("bfloat16" if self.bf16 else "float32")
        if self.num_chunks == 1 and self.wire_dtype not in (None, default_dtype):
            raise user_error(
                "wire_dtype", self.wire_dtype, "has no effect with one stage: nothing crosses a boundary",
                "Set pipeline_stages to 2 or more, or leave it unset",
            )  # fmt: skip
        target = resolved["boundary_target_step_seconds"]
        if target is not None and resolved["link_bits_per_second"] is None and self.emulated and not self.runs_anchor:
            raise user_error(
                "boundary_target_step_seconds", target, "one process has no links whose rate could be measured",
                "Set link_bits_per_second too, for example 100e6 for 100 Mbit/s",
            )  # fmt: skip
        self.wire_dtype = self.wire_dtype or default_dtype
        for name in names:
            setattr(self, name, resolved[name])

    def _resolve_calibration(self) -> None:
        needed = self.boundary_config().needs_calibration
        for name, least in (("calibration_tokens", 1), ("calibration_every", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise user_error(name, value, f"must be at least {least}", f"Use {least} or more, or leave it unset")
            if value is not None and not needed:
                raise user_error(
                    name, value, "has no effect: this boundary needs no calibration",
                    "Use it with a predictor or with boundary_codec=transform, or leave it unset",
                )  # fmt: skip
        if needed and self.calibration_tokens is None:
            self.calibration_tokens = DEFAULT_CALIBRATION_TOKENS

    def _check_mesh(self) -> None:
        for name in ("pipeline_stages", "pipeline_chunks_per_rank"):
            if getattr(self, name) < 1:
                raise user_error(name, getattr(self, name), "must be at least 1", "Use 1 or more")
        for name in ("link_timeout_seconds", "ddp_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise user_error(name, seconds, "must be a positive number of seconds", "Try 600")
        if self.wire_backend == "nccl" and not self.emulated and (self.use_cpu or not torch.cuda.is_available()):
            raise user_error("wire_backend", "nccl", "needs a GPU for every rank", "Use gloo")
        if self.pipeline_schedule == "1f1b" and self.pipeline_stages == 1:
            raise user_error(
                "pipeline_schedule", "1f1b", "has no effect with one stage: there is nothing to take turns with",
                "Set pipeline_stages to 2 or more, or leave it unset",
            )  # fmt: skip
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
        self._check_checkpointing()
        self._resolve_sync()
        self._resolve_microbatches()
        self.layers_per_chunk()
        if self.data_parallel_replicas > 1 and (self.boundary_codec == "aq_sgd" or self.boundary_error_feedback):
            what = "boundary_codec='aq_sgd'" if self.boundary_codec == "aq_sgd" else "boundary_error_feedback=True"
            raise NotImplementedError(
                f"{what}: a sample may come to another replica, which has not seen it. Use one replica"
            )

    def _check_checkpointing(self) -> None:
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):  # the latter is its old name
            options = getattr(self, name)
            if isinstance(options, str) and options.startswith("{"):  # of a command line
                options = json.loads(options)
            if self.data_parallel_replicas > 1 and isinstance(options, dict) and options.get("use_reentrant"):
                raise user_error(
                    name, options, "replicas average a gradient once a pass, and a reentrant pass brings it twice",
                    "Set use_reentrant to False",
                )  # fmt: skip

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
            counts = range(1, min(most, batch) + 1)
            self.pipeline_microbatches = max(n for n in counts if batch % n == 0 and self._schedule_takes(n))
        elif wanted < 1:
            raise user_error("pipeline_microbatches", wanted, "must be at least 1", "Leave it unset for a default")
        elif batch % wanted:
            raise user_error(
                "pipeline_microbatches", wanted, f"does not divide per_device_train_batch_size={batch}",
                "Change one of them so that every microbatch has the same number of rows",
            )  # fmt: skip
        elif not self._schedule_takes(wanted):
            raise user_error(
                "pipeline_microbatches", wanted, "the interleaved schedule cannot run so many in equal rounds",
                f"Use a multiple of pipeline_stages={self.pipeline_stages}",
            )  # fmt: skip
        rows = self.per_device_eval_batch_size
        if not self._schedule_takes(largest_divisor(rows, self.pipeline_microbatches)):
            raise user_error(
                "per_device_eval_batch_size", rows, "the interleaved schedule cannot cut it into equal rounds",
                f"Use a multiple of pipeline_stages={self.pipeline_stages}",
            )  # fmt: skip

    def _schedule_takes(self, count: int) -> bool:
        return self.pipeline_schedule != "interleaved" or count % max(1, count // self.pipeline_stages) == 0

    def _check_trainer_options(self) -> None:
        for name, reason in UNSUPPORTED.items():
            if getattr(self, name):
                raise NotImplementedError(f"{name}={getattr(self, name)!r}: {reason}")
        if self.push_to_hub and self.save_on_each_node:
            raise NotImplementedError(
                "push_to_hub=True with save_on_each_node=True: rank 0's machine has the weights of its own stages only, "
                "and half a model would be uploaded. Leave one of them out"
            )
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
            if os.environ.get(name, "false").lower() in ("1", "true"):
                raise NotImplementedError(f"{name}={os.environ[name]}: {UNSUPPORTED['fsdp']} in accelerate's config")
        if self.label_names not in (None, ["labels"]):
            raise NotImplementedError(
                f"label_names={self.label_names!r}: the last stage reads `labels`. Rename the column"
            )
        fused = (
            "lomo",
            "adalomo",
            "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
        )
        if self.optim in (*fused, "apollo_adamw_layerwise"):
            raise NotImplementedError(
                f"optim={str(self.optim)!r}: it steps within the backward pass, before microbatches are summed. "
                "Use another, such as adamw_torch"
            )
        self._check_accelerator_config()
        if self.train_sampling_strategy == "batch_rebalance":
            raise NotImplementedError(
                "train_sampling_strategy='batch_rebalance': it deals rows out to ranks, and the stages of a pipeline "
                "must read the same. Use group_by_length or random"
            )
        if not self.average_tokens_across_devices:
            raise NotImplementedError(
                "average_tokens_across_devices=False: the mesh normalises by all replicas' tokens. Leave it at True"
            )

    def _check_accelerator_config(self) -> None:
        config = self.accelerator_config
        if isinstance(config, str):
            config = json.loads(Path(config).read_text())
        config = config if isinstance(config, dict) or config is None else config.to_dict()
        for name, fixed in (("split_batches", False), ("dispatch_batches", False), ("even_batches", True)):
            value = (config or {}).get(name)
            if value not in (None, fixed):
                raise NotImplementedError(
                    f"accelerator_config={{{name!r}: {value}}}: replicas read batches of their own, equally many. Leave it "
                    "unset"
                )

    def layers_per_chunk(self) -> tuple[int, ...] | None:
        """`pipeline_split` as numbers; None for the automatic balance."""
        if self.pipeline_split is None:
            return None
        parts = self.pipeline_split
        try:
            layers = tuple(int(part) for part in (parts.split(",") if isinstance(parts, str) else parts))
        except (ValueError, TypeError):
            layers = ()
        if len(layers) != self.num_chunks or min(layers) < 1:
            raise user_error(
                "pipeline_split", parts, f"must name at least one layer for each of {self.num_chunks} chunks",
                "Write for example 12,10,8, or leave it unset",
            )  # fmt: skip
        return layers

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
