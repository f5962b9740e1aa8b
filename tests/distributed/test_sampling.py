"""Stages of a pipeline read the same rows, whatever draws the order."""

from __future__ import annotations

import functools

import pytest

from tests.equality import mesh_trainer, tiny_model
from tests.launch import run_ranks

ORDERS = {
    "random": {},
    "grouped": dict(train_sampling_strategy="group_by_length"),
    "unseeded": dict(accelerator_config={"use_seedable_sampler": False}),
    "sequential": dict(train_sampling_strategy="sequential"),
}


def read_rows(rank: int, folder: str, order: dict) -> list[list[int]]:
    """First tokens of every batch over two epochs and a bit; dropout draws more numbers on one stage."""
    model = tiny_model("gpt2", dropout=0.2)
    trainer = mesh_trainer(model, 4, folder, 24, max_steps=7, pipeline_stages=2, pipeline_split="3,1", **order)
    step, rows = trainer.training_step, []

    def note_rows(model, inputs, num_items=None):
        rows.append(inputs["input_ids"][:, 0].tolist())
        return step(model, inputs, num_items)

    trainer.training_step = note_rows
    trainer.train()
    return rows


@pytest.mark.parametrize("order", ORDERS)
def test_stages_read_the_same_rows_and_every_epoch_has_its_order(tmp_path, order):
    function = functools.partial(read_rows, folder=str(tmp_path / "run"), order=ORDERS[order])
    first, second = run_ranks(function, 2, tmp_path / "ranks")
    assert first == second
    epochs = [sum(first[i : i + 6], []) for i in (0, 6)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert (epochs[0] == epochs[1]) == (order == "sequential")


def test_rows_dealt_out_to_ranks_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="batch_rebalance.*Use group_by_length"):
        mesh_trainer(tiny_model("gpt2"), 4, str(tmp_path), train_sampling_strategy="batch_rebalance")
