"""Deterministic runs with an anchor of their own launch: resumed they are the uninterrupted ones, whatever is trained."""

from __future__ import annotations

import pytest
import torch

from ..adapters import lora
from ..circuits import NUM_ROWS, run_both, train_fast
from ..equality import Rows
from .test_circuits import ANCHOR, SLOW, assert_same_run


class RowStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from Rows(NUM_ROWS)


def lose_gradients(trainer) -> None:
    """A hook: in every other step one matrix, and throughout one vector, has no gradient."""
    clip_gradients = trainer.engine.clip_gradients

    def lose_and_clip(max_norm: float) -> torch.Tensor:
        lost = ["2.input_layernorm.weight", "2.self_attn.v_proj.lora_A.default.weight"]
        if trainer.state.global_step % 2:
            lost += ["1.mlp.up_proj.weight", "1.self_attn.v_proj.lora_A.default.weight"]
        for _ in trainer.engine.replication.local.turns():
            for name, parameter in trainer.engine.parts.named_trainable():
                if name.endswith(tuple(lost)):
                    parameter.grad = None
        return clip_gradients(max_norm)

    trainer.engine.clip_gradients = lose_and_clip


# Of replicas that step apart; after step 4 a part of the model is on its way between them.
STREAMING = dict(dp_sync="streaming_diloco", sync_every=4, num_fragments=2, overlap_steps=1, matrix_rank=4)
# Step 4: a prior is being taken in. Step 6: a snapshot is due, and the prior before it has come.
RESUMED = {
    "1x2+1, streaming": (
        2, 4, "llama",
        dict(pipeline_stages=1, mask_ratio=None, outer_wire="powersgd", correction_rule="blend", **STREAMING),
    ),
    "2x2+1, paper": (4, 4, "llama_tied", dict(pipeline_stages=2, preset="paper", sync_every=4, matrix_rank=4)),
    "2x2+1, diloco, calibrated": (
        4, 4, "llama_tied",
        dict(
            pipeline_stages=2, dp_sync="diloco", sync_every=3, outer_wire="int8", gradient_accumulation_steps=2, bf16=True,
            preset="anchored", calibration_tokens=300, calibration_every=3,
        ),
    ),
    "2x2+1, streaming, adapters": (
        4, 6, "llama_tied", dict(pipeline_stages=2, adapter=True, hook=lose_gradients, outer_wire="int8", **STREAMING),
    ),
    "1x2+2, diloco, anchor_only": (
        2, 6, "gpt2",
        dict(
            pipeline_stages=1, num_anchors=2, correction_rule="anchor_only", mask_ratio=None, tolerance=1e-3,
            dp_sync="diloco", sync_every=2,
        ),
    ),
    "3x1+2": (
        3, 4, "llama_tied",
        dict(
            pipeline_stages=3, num_anchors=2, correction_rule="blend", anchor_batches=2, boundary_predictor="mean",
            calibration_tokens=300, calibration_every=3,
        ),
    ),
    "2x1, dropout": (
        2, 13, "llama_tied",
        dict(pipeline_stages=2, dropout=0.2, anchor_every=None, anchor_budget=0.42, max_steps=17),
    ),
    # Of nobody's interval, which is 15: a prior is being taken in.
    "2x2+1, accumulation, bf16": (
        4, 16, "llama_tied",
        dict(
            pipeline_stages=2, gradient_accumulation_steps=2, bf16=True, preset="anchored", calibration_tokens=300,
            anchor_every=None, max_steps=20,
        ),
    ),
    # Of one cut: where boundaries lie elsewhere, bfloat16 is rounded elsewhere.
    "2x1+2, bf16, no gradients, stream": (
        2, 6, "llama_tied",
        dict(
            pipeline_stages=2, num_anchors=2, bf16=True, hook=lose_gradients, trainer={"train_dataset": RowStream()},
            boundary_predictor="mean", calibration_tokens=300, calibration_every=1,
        ),
    ),
    "3x1+2, adapters, accumulation": (
        3, 4, "llama_tied",
        dict(pipeline_stages=3, num_anchors=2, gradient_accumulation_steps=2, adapter=True, hook=lose_gradients),
    ),
    # One stage has one microbatch, the anchor several: now and then a value of a prior is rounded to its neighbour.
    "1x2+2, anchor_only": (
        2, 4, "gpt2",
        dict(pipeline_stages=1, num_anchors=2, correction_rule="anchor_only", mask_ratio=None, tolerance=1e-3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ["1x2+1, streaming", *(pytest.param(name, marks=SLOW) for name in [*RESUMED][1:])])
def test_a_deterministic_run_resumes_exactly_and_is_that_of_one_process(case, tmp_path):
    """Bit for bit; but an anchor's stages add up rounding that differs from one process's."""
    torch.set_num_threads(1)
    num_ranks, step, kind, options = RESUMED[case]
    options = {**ANCHOR, "mask_ratio": 0.5, "anchor_deterministic": True, **options}
    if options.get("preset") == "anchored":
        del options["mask_ratio"]
    if options.pop("adapter", False):
        options["trainer"] = {"peft_config": lora(target_modules=["q_proj", "v_proj"])}
    tolerance = options.pop("tolerance", 1e-6 if "num_anchors" in options else 0.0)
    whole = run_both(tmp_path, num_ranks, kind, save_at=(step,), **options)
    resumed = run_both(tmp_path, num_ranks, kind, resume=tmp_path / f"checkpoint-{step}", **options)
    for one, other in zip(resumed, whole):
        assert_same_run([one], other | {"metrics": other["metrics"][step:]})
    if "dropout" in options:  # which every process draws by itself
        return
    for name in ("num_anchors", "anchor_deterministic"):
        options.pop(name, None)
    replicas = num_ranks // options["pipeline_stages"]
    emulated = train_fast(0, folder=tmp_path / "one", kind=kind, data_parallel_replicas=replicas, **options)
    assert any(row["weight"] > 0 for row in emulated["metrics"])
    assert_same_run(whole, emulated, tolerance)
