"""Checkpoints of a mesh run are evaluated beside it, and what came out is on the card that is uploaded."""

from __future__ import annotations

import os
from pathlib import Path

from hf_meshadapt.checkpoint_folder import read_json
from hf_meshadapt.evaluation import callback, harness
from hf_meshadapt.evaluation.callback import EvalCallback
from tests.equality import mesh_trainer, tiny_model
from tests.hub_cards import card_faults
from tests.hub_client import client_environment
from tests.hub_server import serving
from tests.hub_state import TOKEN
from tests.runs import DENSE, ROWS, SaveAt, fork


def train_and_evaluate(rank: int, *, folder: Path, url: str) -> list[dict]:
    os.environ.update(client_environment(url, folder / "home", TOKEN))
    # In place of lm-eval, whose start takes longer than this run.
    found = {"results": {"sciq": {"acc": {"value": 0.5, "stderr": 0.25}}}, "samples": {"sciq": 4}, "datasets": {}}
    callback.require_lm_eval = lambda: None
    harness.run_harness = lambda model, options: found
    harness.importlib.metadata.version = lambda name: "0.4.13"
    options = dict(push_to_hub=True, hub_model_id="me/tiny", hub_strategy="end", pipeline_stages=2, save_total_limit=1)
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder / "run"), **DENSE | options | {"max_steps": 4})
    trainer.add_callback(SaveAt((2, 4)))
    trainer.add_callback(EvalCallback(["sciq"]))
    trainer.train()
    trainer.save_model()
    return [log for log in trainer.state.log_history if "lm_eval/sciq/acc" in log]


def test_results_of_the_last_checkpoint_are_on_the_uploaded_card(tmp_path):
    with serving() as server:
        logs = fork(train_and_evaluate, 2, folder=tmp_path, url=server.url)
        card = server.repos["me/tiny"].files()["README.md"].decode()
    assert logs[0][-1] == {"step": 4, "lm_eval/sciq/acc": 0.5} and logs[1] == []
    assert card_faults(card) == [] and "| sciq | acc | 4 | 0.5000 ± 0.2500 |" in card
    assert read_json(tmp_path / "run" / "evaluation.json")["step"] == 4
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    assert not list((tmp_path / "run").glob(".staged-*"))
