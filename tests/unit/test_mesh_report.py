"""`mesh_report()` of runs whose steps and logs do not fall together."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback

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


def test_before_the_first_log_nothing_is_said_of_speed(tmp_path):
    trainer = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), pipeline_stages=2)
    trainer._batch_length = LENGTH  # as in the first step
    report = trainer.mesh_report()
    assert report["tokens_per_second"] is None and report["wait_share"] is None and report["bytes_per_token"] == {}
