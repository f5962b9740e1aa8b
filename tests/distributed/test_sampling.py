"""Stages of a pipeline read the same rows, whatever draws the order."""

from __future__ import annotations

import functools
import random
import re
import tempfile

import numpy as np
import pytest
import torch

from tests.equality import VOCAB, collate, mesh_trainer, tiny_model
from tests.launch import run_ranks


def collate_drawing(rows) -> dict:
    """Replaces all but first tokens at random, as masked language modelling and random crops do."""
    batch = collate(rows, multiple=16)
    drawn = torch.randint(3, VOCAB, batch["input_ids"].shape)
    drawn[:, 1], drawn[:, 2] = random.randrange(3, VOCAB), int(np.random.randint(3, VOCAB))
    drawn[:, 0] = batch["input_ids"][:, 0]
    return {**batch, "input_ids": drawn}


CALIBRATED = dict(preset="anchored", boundary_budget=0.5, calibration_tokens=256)
ORDERS = {
    "random": {},
    "grouped": dict(train_sampling_strategy="group_by_length"),
    "unseeded": dict(accelerator_config={"use_seedable_sampler": False}),
    "sequential": dict(train_sampling_strategy="sequential"),
    "drawn": dict(collator=collate_drawing, calibration_every=2, **CALIBRATED),
}


def read_rows(rank: int, folder: str, order: dict) -> tuple[list, list, list]:
    """First tokens of every batch over two epochs and a bit, and all of every calibration's batches; dropout draws more
    numbers on one stage, whose other generators have drawn something too."""
    model = tiny_model("gpt2", dropout=0.2)
    trainer = mesh_trainer(model, 4, folder, 24, max_steps=7, pipeline_stages=2, pipeline_split="3,1", **order)
    step, rows, seen, calibrations = trainer.training_step, [], [], []
    calibrate = trainer.engine.calibrate

    def note_rows(model, inputs, num_items=None):
        rows.append(inputs["input_ids"][:, 0].tolist())
        seen.append(inputs["input_ids"].tolist())
        return step(model, inputs, num_items)

    def note_calibration(batches, *args):
        calibrations.extend(batch["input_ids"].flatten().tolist() for batch in batches)
        calibrate(batches, *args)

    trainer.training_step, trainer.engine.calibrate = note_rows, note_calibration
    random.seed(rank)  # as of a rank that is new since the checkpoint
    np.random.seed(rank)
    trainer.train()
    return rows, calibrations, seen


@pytest.mark.parametrize("order", ORDERS)
def test_stages_read_the_same_rows_and_every_epoch_has_its_order(tmp_path, order):
    function = functools.partial(read_rows, folder=str(tmp_path / "run"), order=ORDERS[order])
    first, second = run_ranks(function, 2, tmp_path / "ranks")
    assert first == second
    rows, calibrations, _ = first
    assert len(calibrations) == (4 * 4 if order == "drawn" else 0)  # before steps 0, 2, 4 and 6
    epochs = [sum(rows[i : i + 6], []) for i in (0, 6)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert (epochs[0] == epochs[1]) == (order == "sequential")


def test_rows_dealt_out_to_ranks_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="batch_rebalance.*Use group_by_length"):
        mesh_trainer(tiny_model("gpt2"), 4, str(tmp_path), train_sampling_strategy="batch_rebalance")


def collate_by_rank(rows, what: str, rank: int) -> dict:
    batch = collate(rows, multiple=16 << rank if what == "lengths" else 16)
    return {**batch, "input_ids": batch["input_ids"].roll((what == "order") * rank, dims=1)}


def read_differently(rank: int) -> list[str]:
    said = []
    for what in ("lengths", "order"):
        for action in ("train", "evaluate"):
            collator = functools.partial(collate_by_rank, what=what, rank=rank)
            mesh = {"pipeline_stages": 2, "link_timeout_seconds": 20.0}
            trainer = mesh_trainer(tiny_model("llama"), 4, tempfile.mkdtemp(), collator=collator, **mesh)
            with pytest.raises(ValueError) as caught:
                getattr(trainer, action)()
            said.append(str(caught.value))
    trainer = mesh_trainer(tiny_model("llama"), 4, tempfile.mkdtemp(), collator=collator, **mesh, **CALIBRATED)
    with pytest.raises(ValueError) as caught:
        trainer.train()
    return [*said, str(caught.value)]


def test_stages_that_read_different_batches(tmp_path):
    """gloo lets a message pass that is shorter than expected, and aborts the process that gets a longer one."""
    first, second = run_ranks(read_differently, 2, tmp_path / "ranks")
    assert first == second
    assert "have batches of different lengths (16 on stage 0, 32 on stage 1). Give all ranks the same" in first[0]
    assert first[0] == first[1]
    found = r"have read different batches {} \(stage 0: {} positions, digest \d+; stage 1: {} positions"
    assert re.search(found.format("in step 0", 128, 128), first[2]), first[2]
    assert re.search(found.format("in an evaluation", 352, 352), first[3]), first[3]
    assert re.search(found.format("for the calibration before step 0", 256, 256), first[4]), first[4]
