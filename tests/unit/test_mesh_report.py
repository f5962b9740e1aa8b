"""`mesh_report()` of runs whose steps and logs do not fall together, and who must call it."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

from hf_meshadapt.reports import mesh_report
from tests.equality import mesh_trainer, tiny_model

ROWS, LENGTH = 4, 16


class ReportAfterEveryStep(TrainerCallback):
    def __init__(self):
        self.reports = []

    def on_step_end(self, args, state, control, **kwargs):
        self.reports.append(self.trainer.mesh_report())


@pytest.mark.parametrize(("logging_steps", "first_measured"), [(1, 2), (2, 3), (500, 4)])
def test_the_report_of_a_run_has_all_its_steps(tmp_path, logging_steps, first_measured):
    options = dict(pipeline_stages=2, max_steps=3, gradient_accumulation_steps=1, eval_strategy="no")
    trainer = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), logging_steps=logging_steps, **options)
    callback = ReportAfterEveryStep()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    # A step's log comes after its callbacks.
    measured = [report["tokens_per_second"] is not None for report in callback.reports]
    assert measured == [step >= first_measured for step in (1, 2, 3)]
    assert trainer.engine.ledger.run.tokens == 3 * ROWS * LENGTH
    assert trainer.mesh_report()["tokens_per_second"] > 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_count_the_bytes_of_their_dtype(tmp_path, replicas):
    def plan_of(dtype, mixed: bool = False):
        options = dict(pipeline_stages=2, data_parallel_replicas=replicas)
        engine = mesh_trainer(tiny_model("llama_tied").to(dtype), ROWS, str(tmp_path), **options).engine
        if mixed:
            engine.parts.model.model.layers[0].mlp.to(torch.float32)
        return engine.plan(ROWS, LENGTH, 1)

    whole, half, mixed = plan_of(torch.float32), plan_of(torch.bfloat16), plan_of(torch.bfloat16, mixed=True)
    hidden, intermediate = 32, 64
    assert whole.axis_bytes("tied") == 2 * half.axis_bytes("tied") == 2 * mixed.axis_bytes("tied") > 0
    assert whole.axis_bytes("data_parallel") == 2 * half.axis_bytes("data_parallel")
    further_bytes = 2 * 3 * hidden * intermediate * 2 * (replicas - 1)  # of the layer's three matrices, both ways
    assert mixed.axis_bytes("data_parallel") == half.axis_bytes("data_parallel") + further_bytes


def test_before_the_first_log_nothing_is_said_of_speed(tmp_path):
    trainer = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), pipeline_stages=2)
    trainer._batch_length = LENGTH  # as in the first step
    report = trainer.mesh_report()
    assert report["tokens_per_second"] is None and report["wait_share"] is None and report["bytes_per_token"] == {}


def test_a_roll_is_called_of_what_a_script_calls_and_not_of_what_training_does(tmp_path, monkeypatch):
    options = dict(pipeline_stages=2, max_steps=1, gradient_accumulation_steps=1, eval_steps=1)
    trainer = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), **options)
    calls = []
    monkeypatch.setattr(trainer.engine, "roll_call", calls.append)
    callback = ReportAfterEveryStep()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    assert callback.reports and any("eval_loss" in log for log in trainer.state.log_history) and calls == []
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.mesh_report()
    assert calls == ["evaluate()", "predict()", "mesh_report()"]


def test_every_axis_that_sent_is_part_of_the_total(tmp_path):
    plan = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), pipeline_stages=2).engine.plan(ROWS, LENGTH, 1)
    sent = {"pipeline": 7.0, "control": 2.0, "save": 0.5, "other": 0.25}
    logs = {f"bytes_per_token_{axis}": count for axis, count in sent.items()}
    report = mesh_report({"tokens_per_second": 1.0, "bytes_per_token": sum(sent.values()), **logs}, plan)
    assert report["bytes_per_token"] == {**sent, "total": 9.75}
