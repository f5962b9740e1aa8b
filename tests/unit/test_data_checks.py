"""Batches that no model could take are refused by name, wherever they come from."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from transformers import default_data_collator

from hf_meshadapt.data_checks import NamingCollator, check_tokens, range_fault, token_range
from hf_meshadapt.pipeline.layout import find_layout
from tests.equality import VOCAB, Rows, collate_fixed, mesh_trainer, tiny_model
from tests.mistakes import ROWS, Stream, Table, plain, run
from tests.runs import collect_warnings

ANCHORED, DENSE = {"pipeline_stages": 2}, {"pipeline_stages": 2, "preset": "dense"}


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Trainer collects garbage in full; what was there before is none."""
    gc.freeze()
    yield
    gc.unfreeze()


def batch(**entries) -> dict:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    return {"input_ids": tokens, "labels": tokens.clone(), **entries}


def test_small_whole_numbers_become_large_ones():
    small = check_tokens(
        batch(input_ids=torch.ones(2, 3, dtype=torch.int32), labels=torch.ones(2, 3, dtype=torch.uint8))
    )
    assert small["input_ids"].dtype == small["labels"].dtype == torch.int64


def test_masks_of_two_and_of_four_dimensions():
    for mask in (torch.ones(2, 3), torch.ones(2, 1, 3, 3)):
        assert check_tokens(batch(attention_mask=mask))["attention_mask"] is mask


UNFIT = [
    ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"input_ids of shape \(2, 0\): must be sequences x tokens"),
    ({"input_ids": torch.zeros(2, 1, 3)}, r"input_ids of shape \(2, 1, 3\): must be"),
    ({"input_ids": torch.zeros(2, 3)}, "input_ids of dtype torch.float32: must be whole numbers"),
    ({"labels": torch.zeros(2, 3)}, "labels of dtype torch.float32: must be whole"),
    ({"labels": torch.zeros(2, 2, dtype=torch.long)}, r"labels of shape \(2, 2\) beside input_ids of shape \(2, 3\)"),
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask of shape \(2, 4\) beside .*Pad both"),
    ({"attention_mask": torch.ones(2, 1, 3, 4)}, r"attention_mask of shape \(2, 1, 3, 4\) beside .*Pad both"),
    ({"position_ids": torch.zeros(2, 1, 3, 3, dtype=torch.long)}, r"position_ids of shape \(2, 1, 3, 3\) beside"),
    ({"position_ids": torch.zeros(2, 3)}, "position_ids of dtype torch.float32"),
    ({"use_cache": torch.ones(2)}, "batch entry use_cache: the mesh sets it itself.*rename the column"),
    ({"kind": torch.ones(2)}, "batch entry kind: the mesh sets it itself"),
]


@pytest.mark.parametrize("entries,says", UNFIT, ids=lambda value: str(value)[:30])
def test_entries_that_do_not_fit(entries, says):
    with pytest.raises(ValueError, match=says):
        check_tokens(batch(**entries))


def test_tokens_and_labels_in_the_vocabulary():
    ignored = torch.full((2, 3), -100)
    for entries in ({}, {"labels": ignored}, {"input_ids": torch.full((2, 3), 10)}):
        assert range_fault(token_range(batch(**entries)), 11, None) is None
    assert token_range(batch(labels=ignored)).tolist() == [5, 10, 0, 0, 0, 2]
    assert range_fault(token_range(batch()), 10, None).startswith("input_ids has 10, which is no entry")
    assert "has -1," in range_fault(token_range(batch(input_ids=torch.tensor([[-1, 5]]))), 10, None)
    fault = range_fault(token_range(batch(labels=torch.tensor([[-100, 11, 3]]))), 11, None)
    assert fault.startswith(
        "labels has 11, which is no entry of the model's vocabulary of 11 (labels that do not count"
    )
    assert "labels has -1," in range_fault(token_range(batch(labels=torch.tensor([[-100, -1, 3]]))), 11, None)


def test_positions_in_a_learned_table():
    extremes = token_range(batch())
    assert range_fault(extremes, 11, 3) is None
    assert range_fault(extremes, 11, 2).startswith(
        "a sequence has position 2, and the model's position table ends at 1."
    )
    packed = token_range(batch(position_ids=torch.tensor([[0, 1, 0], [0, 1, -1]])))
    assert packed.tolist()[4:] == [-1, 1] and "has position -1," in range_fault(packed, 11, 2)
    assert [find_layout(tiny_model(kind)).num_positions for kind in ("llama", "gpt2")] == [None, 64]


def test_a_row_that_is_longer_than_the_position_table(tmp_path):
    trainer = mesh_trainer(tiny_model("gpt2"), 2, str(tmp_path), **DENSE)
    trainer.train_dataset = Table(ROWS["too long"]())
    trainer.data_collator = default_data_collator
    with pytest.raises(
        ValueError, match="has position 99, and the model's position table ends at 63. Truncate the rows"
    ):
        trainer.train()


def test_a_collator_that_fails_is_named():
    def collate_mine(rows):
        return {"n": torch.tensor([row["n"] for row in rows])}

    collate = NamingCollator(collate_mine)
    assert collate([{"n": 1}, {"n": 2}])["n"].tolist() == [1, 2]
    with pytest.raises(
        ValueError, match="the data collator .collate_mine. cannot make a batch of 1 rows: KeyError: 'n'"
    ):
        collate([{}])
    with pytest.raises(ValueError, match="the data collator returned a list: let it return a dict of tensors"):
        NamingCollator(lambda rows: rows)([{}])

    def refuse(rows):
        raise NotImplementedError("of its own")

    with pytest.raises(NotImplementedError, match="of its own"):
        NamingCollator(refuse)([{}])


def collate_twice(rows) -> dict:
    return {name: torch.cat([value, value]) for name, value in collate_fixed(rows).items()}


def collate_joined(rows) -> dict:
    return {name: value.reshape(1, -1)[:, :32] for name, value in collate_fixed(rows).items()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_more_rows_than_there_is_room_for(replicas, tmp_path):
    options = {"pipeline_stages": 2, "data_parallel_replicas": replicas}
    says = (
        f"made a batch of {8 * replicas} rows, and there is room for {4 * replicas}: per_device_train_batch_size, or"
    )
    for preset in ("dense", "anchored"):
        trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 24, collate_twice, preset=preset, **options)
        for action in (trainer.train, trainer.evaluate):
            with pytest.raises(ValueError, match=says):
                action()


def test_batches_of_fewer_rows_warn_once(tmp_path):
    options = {"max_steps": 3, "eval_strategy": "no", **DENSE}
    for collator, action in ((collate_joined, "train"), (collate_joined, "evaluate"), (collate_fixed, "train")):
        # 22 rows: the last batch of the data set is short, and no mistake.
        trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 22, collator, **options)
        warnings = collect_warnings()
        getattr(trainer, action)()
        assert len(warnings) == (collator is collate_joined)
        assert all("a batch of 1 rows where the batch size makes room for 4" in warning for warning in warnings)
    warnings = collect_warnings()
    trainer.evaluate()
    assert not warnings


# Each once ended in a traceback from torch, or in weights that are not finite.
MISTAKES = [
    ("token too large", "table", ANCHORED, f"input_ids has {VOCAB}, which is no entry of .* vocabulary of {VOCAB}"),
    ("token too large", "stream", ANCHORED, f"input_ids has {VOCAB}, which is no entry"),
    ("token too large", "stream", DENSE, f"input_ids has {VOCAB}, which is no entry"),
    ("token below zero", "stream", DENSE, "input_ids has -1, which is no entry"),
    ("label too large", "stream", DENSE, f"labels has {VOCAB}, which is no entry"),
    ("label below zero", "stream", DENSE, "labels has -1, which .* that do not count are -100"),
    ("last token too large", "table", {**DENSE, "train_sampling_strategy": "sequential", "max_steps": 3},
     "input_ids has 1000000, which is no entry"),
    ("ragged", "datasets", DENSE, "data collator .default_data_collator. cannot make a batch of 2 rows.*one length"),
    ("missing column", "table", DENSE, "cannot make a batch of 2 rows: KeyError: 'labels'.*the same columns"),
    ("no tokens", "stream", DENSE, "the batch has no input_ids .only labels.: tokenize the text first"),
    ("text", "table", DENSE, "train_dataset has no input_ids .only text.: the data collator takes tokens"),
    ("tokens as floats", "table", DENSE, "input_ids of dtype torch.float32"),
    ("labels as one number", "table", DENSE, r"labels of shape \(2,\) beside input_ids"),
    ("no token", "table", DENSE, r"input_ids of shape \(2, 0\)"),
    ("no label counts", "table", DENSE, "train_dataset: none of the 6 rows that were looked at has a label that counts"),
    ("only the first token counts", "datasets", DENSE, "none of the 6 rows that were looked at has a label"),
    ("one token", "table", DENSE, "none of the 6 rows that were looked at has a label"),
    ("empty", "stream", ANCHORED, "train_dataset is empty: boundaries cannot be calibrated"),
]  # fmt: skip


@pytest.mark.parametrize("rows,container,args,says", MISTAKES, ids=lambda value: str(value)[:20])
def test_mistakes_in_training_data(rows, container, args, says, tmp_path):
    said = run(str(tmp_path), args=args, rows=rows, container=container, collator="default", evaluates=False)
    assert said.startswith("refused: ") and re.search(says, said, re.DOTALL), said


def test_one_row_with_a_label_is_enough(tmp_path):
    said = run(
        str(tmp_path), args=DENSE, rows="one row counts", container="table", collator="default", evaluates=False
    )
    assert said == "trained"


class OneInTwo(Rows):
    """Every other batch of two rows has no label."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "labels": torch.full_like(row["labels"], -100)} if index // 2 % 2 else row


@pytest.mark.parametrize("options", [{"pipeline_stages": 1}, DENSE, {**ANCHORED, "preset": "anchored"}], ids=str)
def test_a_step_without_labels_leaves_the_weights_as_they_are(options, tmp_path, caplog):
    plain_descent = {"optim": "sgd", "learning_rate": 0.1, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    steps = {"max_steps": 4, "gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = mesh_trainer(
        tiny_model("llama"), 2, str(tmp_path), eval_strategy="no", **plain_descent, **steps, **options
    )
    trainer.train_dataset, weights = OneInTwo(8), []
    head = trainer.engine.parts.model.lm_head.weight
    end_step = trainer.engine.end_step
    trainer.engine.end_step = lambda: (end_step(), weights.append(head.detach().clone()))
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[0] > 0 and losses[1] == 0 and losses[2] > 0 and losses[3] == 0
    assert [torch.equal(a, b) for a, b in zip(weights, weights[1:])] == [True, False, True]
    assert [record.args[0] for record in caplog.records if "no row of any replica" in record.message] == [1, 3]


def test_tokens_outside_the_vocabulary_in_an_evaluation(tmp_path):
    trainer = mesh_trainer(tiny_model("llama"), 2, str(tmp_path), pipeline_stages=2)
    trainer.data_collator = lambda rows: {**collate_fixed(rows), "labels": torch.full((len(rows), 16), VOCAB)}
    with pytest.raises(ValueError, match=f"labels has {VOCAB}, which is no entry"):
        trainer.evaluate()


def test_prediction_without_tokens(tmp_path):
    trainer = mesh_trainer(tiny_model("llama"), 2, str(tmp_path), pipeline_stages=2)
    trainer.data_collator = lambda rows: {"attention_mask": torch.ones(len(rows), 4)}
    with pytest.raises(ValueError, match="the batch has no labels .only attention_mask."):
        trainer.predict(Stream(plain()))


class Once(torch.utils.data.IterableDataset):
    """Goes on where it stands, however often it is iterated over."""

    def __init__(self, rows):
        self.left = iter(rows)

    def __iter__(self):
        return self.left


class OnceByName(Once):
    def __iter__(self):
        return self

    def __next__(self):
        return next(self.left)


def test_a_stream_that_can_be_read_once_is_not_calibrated_on(tmp_path, caplog):
    """Where its class shows it; where it only may be so there is a warning."""
    options = {**ANCHORED, "preset": "anchored", "max_steps": 1, "eval_strategy": "no", "calibration_tokens": 64}
    data = OnceByName(Rows(20))
    trainer = mesh_trainer(tiny_model("llama"), 2, str(tmp_path), trainer={"train_dataset": data}, **options)
    with pytest.raises(NotImplementedError, match="train_dataset is a OnceByName, which can be read once only.*dense"):
        trainer.train()
    assert len(list(data)) == 20
    warned = "train_dataset .Once. keeps an iterator in .left: if it goes on where that stands"
    for data, warns in ((Once(Rows(20)), True), (Stream(list(Rows(20))), False)):
        trainer = mesh_trainer(tiny_model("llama"), 2, str(tmp_path), trainer={"train_dataset": data}, **options)
        caplog.clear()
        trainer.train()
        assert bool(re.search(warned, caplog.text)) == warns
    dense = {**options, "preset": "dense", "calibration_tokens": None}
    trainer = mesh_trainer(
        tiny_model("llama"), 2, str(tmp_path), trainer={"train_dataset": OnceByName(Rows(20))}, **dense
    )
    trainer.train()


TINY = [{"boundary_budget": 1e-6}, {"forward_share": 0.99}, {"boundary_codec": "topk", "boundary_budget": 1e-6},
        {"boundary_codec": "bottleneck", "boundary_budget": 1e-6}]  # fmt: skip


@pytest.mark.parametrize("fields", TINY, ids=str)
def test_a_budget_that_leaves_no_byte(fields, tmp_path):
    args = {**ANCHORED, **fields}
    said = run(str(tmp_path), args=args, rows="plain", container="table", collator="default", evaluates=False)
    assert re.search(
        r"boundary_budget=.* it leaves no byte for the (for|back)ward pass of a sequence of 8 tokens", said
    )
