"""Comparing replicas over processes: a planted difference ends the run on all ranks, equal replicas pass, bytes are as
planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_meshadapt.drift import ReplicaDriftError
from hf_meshadapt.link_bytes import GLOO_MESSAGE_BYTES
from hf_meshadapt.sync_plan import check_links
from tests.equality import mesh_trainer, tiny_model
from tests.runs import DENSE, TWO_STAGES, collect_warnings, fork

POWERSGD = dict(dp_sync="powersgd", matrix_rank=4)
DILOCO = dict(dp_sync="diloco", sync_every=3, outer_wire="int8")
EVERY, PLANTED_AFTER = 2, 3


class Plant(TrainerCallback):
    """Changes one entry of what replicas must hold alike, after a step at which nothing is compared."""

    def __init__(self, trainer, name: str):
        self.trainer, self.name = trainer, name

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == PLANTED_AFTER:
            self.trainer.engine.replication.synchronizer.agreed()[self.name].view(-1)[0] += 0.1


def train_planted(rank: int, *, folder: Path, planted: dict[int, str], **sync) -> str:
    trainer = mesh_trainer(
        tiny_model("llama_tied"), 4, str(folder), check_replicas_every=EVERY, **TWO_STAGES, **DENSE, **sync
    )
    if rank in planted:
        trainer.add_callback(Plant(trainer, planted[rank]))
    try:
        trainer.train()
    except ReplicaDriftError as error:
        return str(error)
    return ""


LAYER, NORM = "model.layers.2.self_attn.q_proj.weight", "model.norm.weight"
CASES = {
    "a layer": ({3: LAYER}, POWERSGD, "the replicas of stage 1 (ranks 1, 3) hold different weights"),
    "the outer model": ({1: NORM}, DILOCO, "the replicas of stage 1 (ranks 1, 3) hold different weights"),
    # Both replicas' last stage alike: only the other copy tells.
    "tied copies": (
        dict.fromkeys((1, 3), "lm_head.weight"),
        POWERSGD,
        "the copies of the tied embedding on stages 0 and",
    ),
}


@pytest.mark.parametrize(
    "name", [*list(CASES)[:1], *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[1:])]
)
def test_a_planted_difference_ends_the_run_on_all_ranks(tmp_path, name):
    planted, sync, message = CASES[name]
    errors = fork(train_planted, 4, folder=tmp_path, planted=planted, **sync)
    for rank, error in enumerate(errors):
        assert f"rank {rank} (stage {rank % 2} of replica {rank // 2}): after step 4 (alike at step 2)" in error
        assert message in error
    for rank in (1, 3) if len(planted) == 1 else ():
        (parameter,) = planted.values()
        assert f" 1 differ: {parameter} (replica 0 | replica 1)" in errors[rank]


def train_checked(rank: int, *, folder: Path, **sync) -> dict:
    """What a comparison added to the control bytes of a step, measured and planned; and what was found."""
    warnings, settings = collect_warnings(), DENSE | dict(max_steps=9, logging_steps=1, num_rows=400)
    options = settings | TWO_STAGES | sync
    trainer = mesh_trainer(tiny_model("llama_tied"), 4, str(folder), check_replicas_every=EVERY, **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log][2:8]  # the first steps make schedules
    plan = trainer.engine.plan(4, 16, 2)
    sent = [log["bytes_per_token_control"] * plan.tokens for log in logs]
    links = list(check_links([[0, 1], [2, 3]], [[0, 2], [1, 3]], check_every=1))
    return {
        "passed_step": trainer.engine.drift.passed_step,
        "measured": (sum(sent[1::EVERY]) - sum(sent[::EVERY])) / 3,
        "planned": sum(link.bytes + link.messages * GLOO_MESSAGE_BYTES for link in links),
        "warnings": warnings,
    }


@pytest.mark.parametrize("sync", [POWERSGD, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_equal_replicas_pass_and_the_plan_knows_the_bytes(tmp_path, sync):
    for found in fork(train_checked, 4, folder=tmp_path, **sync):
        assert found["passed_step"] == 8 and not found["warnings"]
        assert found["measured"] == pytest.approx(found["planned"], rel=0.02)


def test_weights_are_left_as_they_are(tmp_path):
    """Checking changes no bit of a run."""
    runs = []
    for check in (None, 1):
        settings = dict(data_parallel_replicas=2, **TWO_STAGES, **DENSE, **DILOCO)
        trainer = mesh_trainer(tiny_model("llama_tied"), 4, str(tmp_path), check_replicas_every=check, **settings)
        trainer.train()
        runs.append({name: tensor.clone() for name, tensor in trainer.engine.parts.model.state_dict().items()})
    assert all(torch.equal(tensor, runs[1][name]) for name, tensor in runs[0].items())
