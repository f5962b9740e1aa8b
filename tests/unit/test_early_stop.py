"""Runs of replicas that step apart and end early: what is evaluated, saved and left is what all steps have made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.equality import mesh_trainer, tiny_model

LAST = 4  # step; no sync is due there
SYNCS = {
    "diloco": {"dp_sync": "diloco", "sync_every": 7},
    "streaming_diloco": {"dp_sync": "streaming_diloco", "sync_every": 6, "num_fragments": 2, "overlap_steps": 2},
}
OPTIONS = {
    "pipeline_stages": 2, "data_parallel_replicas": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant", "warmup_steps": 0, "logging_strategy": "no", "eval_steps": 2,
    "metric_for_best_model": "loss", "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip


class Stop(TrainerCallback):
    """Ends the run after the step LAST."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == LAST


class AtTheEnd(TrainerCallback):
    """Keeps the weights that other callbacks meet when training has ended."""

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def run(folder: Path, sync: str, max_steps: int, callbacks=()) -> tuple[dict, dict, float]:
    """Weights of the checkpoint of LAST and when training has ended, and the last evaluation's loss."""
    end = AtTheEnd()
    trainer = mesh_trainer(
        tiny_model("llama", 2), 2, str(folder), 16, **OPTIONS, **SYNCS[sync], max_steps=max_steps,
        trainer={"callbacks": [*callbacks, end]},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == LAST
    saved = {}
    for file in (folder / f"checkpoint-{LAST}").glob("model*.safetensors"):
        saved |= load_file(file)
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    left = trainer.engine.parts.model.state_dict()
    assert all(torch.equal(left[name], end.weights[name]) for name in saved)
    return saved, end.weights, losses[-1]


@pytest.mark.parametrize("sync", SYNCS)
def test_a_run_that_is_stopped_has_learnt_what_one_of_as_many_steps_has(sync, tmp_path):
    whole, _, loss = run(tmp_path / "whole", sync, LAST)
    saved, ended, stopped_loss = run(tmp_path / "stopped", sync, 10, [Stop()])
    assert stopped_loss == loss
    # This one learns from its last evaluation that it ends.
    stopper = EarlyStoppingCallback(1, early_stopping_threshold=10.0)
    early, early_ended, _ = run(tmp_path / "early", sync, 10, [stopper])
    for name, tensor in whole.items():
        for other in (saved, ended, early, early_ended):
            assert torch.equal(tensor, other[name]), name
