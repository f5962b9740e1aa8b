"""What a run says before it trains."""

from __future__ import annotations

import pytest
from transformers.trainer_callback import PrinterCallback

from hf_meshadapt.announcement import mesh_line
from hf_meshadapt.config import BoundaryConfig, MeshConfig

from ..equality import mesh_trainer, tiny_model

CODED = BoundaryConfig("transform", budget=0.05)


@pytest.mark.parametrize(
    "mesh,layers,boundary,line",
    [
        (MeshConfig(stages=1), [4], BoundaryConfig(), None),
        (
            MeshConfig(stages=1, replicas=2), [4], CODED,
            "mesh: 1 stage x 2 replicas: nothing crosses a boundary. Set pipeline_stages to cut the model",
        ),
        (
            MeshConfig(stages=2, replicas=2), [16, 14], CODED,
            "mesh: 2 stages (16+14 layers) x 2 replicas, boundaries: transform at 5% of the bytes",
        ),
        (
            MeshConfig(stages=2, chunks_per_rank=2, schedule="interleaved"), [1, 1, 1, 1],
            BoundaryConfig("random_mask", mask_ratio=0.95),
            "mesh: 2 stages of 2 chunks (1+1+1+1 layers) x 1 replica, boundaries: random masks of 95%",
        ),
        (MeshConfig(stages=2), [2, 2], BoundaryConfig(), "mesh: 2 stages (2+2 layers) x 1 replica, boundaries: uncoded"),
    ],
)  # fmt: skip
def test_the_mesh_in_one_line(mesh, layers, boundary, line):
    assert mesh_line(mesh, layers, boundary) == line


@pytest.mark.parametrize(
    ("shown", "log_level"), [(True, "passive"), (True, "warning"), (True, "error"), (False, "passive")]
)
def test_a_run_says_what_it_is_before_it_trains_unless_told_to_be_silent(shown, log_level, tmp_path, capsys):
    options = dict(pipeline_stages=2, preset="anchored", calibration_tokens=64, max_steps=1, eval_strategy="no")
    trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 16, log_level=log_level, **options)
    if not shown:
        trainer.remove_callback(PrinterCallback)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "mesh:" in line or "calibrat" in line]
    if not shown or log_level == "error":
        assert not lines
        return
    mesh, before, after = lines
    assert mesh == "mesh: 2 stages (2+2 layers) x 1 replica, boundaries: transform at 5% of the bytes"
    assert before == "calibrating the boundaries on 64 tokens" and after.startswith("boundaries calibrated in ")
