"""Training runs on freshly forked ranks that save and resume, and what must be equal between them."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_meshadapt.calibration import boundary_state
from tests.equality import mesh_trainer, summary, tiny_model
from tests.launch import run_ranks

ROWS, NUM_ROWS = 4, 21  # an epoch ends on a partial batch and on a partial accumulation
DENSE = dict(num_rows=NUM_ROWS, max_steps=7, learning_rate=1e-2, eval_strategy="no")
MASKED = dict(**DENSE, mask_ratio=0.9, exact_first_token=True, boundary_predictor="mean")
TWO_STAGES = dict(pipeline_stages=2)
INTERLEAVED = dict(pipeline_stages=2, pipeline_chunks_per_rank=2, pipeline_schedule="interleaved")


def fork(function, num_ranks: int, **options) -> list:
    """Runs `function(rank, **options)` on newly started ranks and returns their results."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(functools.partial(function, **options), num_ranks, Path(folder))


class SaveAt(TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step in self.steps


def train(rank: int, *, folder: Path, kind: str, resume=None, save_at=(), machine_size=None, **options) -> dict:
    """One run on this rank.

    Args:
        resume: True or a checkpoint.
        save_at: steps after which it saves a checkpoint.
        machine_size: ranks per machine with a disk of its own, `folder / "machine-i"`; all share `folder` by default.
        options: `dropout`, `rows`, `busy_seconds` (of the engine), and what `mesh_trainer` takes.

    Returns:
        Losses, this rank's weights with its copy of a tied head, its boundaries' fits and budgets, how often it
        calibrated, its bytes to save, and what was warned of.
    """
    if machine_size:
        os.environ.update(LOCAL_RANK=str(rank % machine_size), LOCAL_WORLD_SIZE=str(machine_size))
        folder = folder / f"machine-{rank // machine_size}"
    warnings = collect_warnings()
    model = tiny_model(kind, dropout=options.pop("dropout", 0.0))
    busy_seconds = options.pop("busy_seconds", None)
    trainer = mesh_trainer(model, options.pop("rows", ROWS), str(folder), **options)
    trainer.engine.busy_seconds = busy_seconds
    trainer.add_callback(SaveAt(save_at))
    calibrate, calibrated = trainer.engine.calibrate, []
    trainer.engine.calibrate = lambda *args: calibrated.append(calibrate(*args))
    at_start = sum(trainer.engine.sockets.read().get("save", {}).values())  # agreements when ranks meet
    trainer.train(resume_from_checkpoint=resume if resume in (None, True) else str(resume))
    save_bytes = sum(trainer.engine.sockets.read().get("save", {}).values()) - at_start
    return outcome(trainer) | {"calibrations": len(calibrated), "warnings": warnings, "save_bytes": save_bytes}


def outcome(trainer) -> dict:
    parts = trainer.engine.parts
    state = parts.model.state_dict()
    weights = {name: state[name] for name in [*parts.saved_names(), *parts.stored_name_of_copy()]}
    return summary(trainer, weights) | {
        "fits": boundary_state(trainer.engine),
        "budgets": trainer.engine.boundary.budgets,
    }


def collect_warnings(level: int = logging.WARNING) -> list[str]:
    """The texts of all that this process will log of this level and above; that the mesh is emulated, and that
    its boundaries send less than a tied embedding, is meant here."""
    messages: list[str] = []
    handler = logging.Handler(level)
    meant = ("the mesh is emulated", "gradient of the tied embedding")
    handler.addFilter(lambda record: not any(text in record.getMessage() for text in meant))
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_meshadapt").addHandler(handler)
    return messages


def assert_same_run(ranks: list[dict], others: list[dict]) -> None:
    """Bit for bit."""
    assert len(ranks) == len(others)
    for run, other in zip(ranks, others):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert run[name] == other[name], name
        for part in ("weights", "fits"):
            assert run[part].keys() == other[part].keys()
            for name, tensor in run[part].items():
                assert torch.equal(tensor, other[part][name]), name


def assert_plain_load(folder: Path, ranks: list[dict]) -> torch.nn.Module:
    """transformers alone loads the folder; its weights are those of the stages."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    stages = {name: tensor for run in ranks for name, tensor in run["weights"].items()}
    state = model.state_dict()
    assert state.keys() <= stages.keys() | {"lm_head.weight"}
    for name, tensor in stages.items():
        assert torch.equal(tensor, state[name]), name
    return model
