"""What every chunk knows about the positions of a batch."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.pipeline.microbatch import batch_digest, largest_divisor, mask_rows, pad_rows, token_kinds

NAMES = {PADDING: ".", TOKEN: "t", FIRST: "F", TARGET: "T"}


def kinds(labels: list[list[int]], **inputs) -> list[str]:
    """One letter per position; a label of 0 stands for none."""
    labels = torch.tensor(labels)
    batch = {"labels": labels.masked_fill(labels == 0, -100)}
    kind = token_kinds(batch | {name: torch.tensor(value) for name, value in inputs.items()})
    assert kind.dtype == torch.int8 and kind.shape == labels.shape
    return ["".join(NAMES[k] for k in row) for row in kind.tolist()]


def test_a_position_is_a_target_where_the_next_one_has_a_label():
    assert kinds([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]) == ["FTTt", "FTTt", "Fttt"]


def test_padding_on_either_side():
    mask = [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert kinds([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], attention_mask=mask) == ["FTt..", "..FTt"]
    # A row that is all padding, as a collator may leave it.
    assert kinds([[0, 0]], attention_mask=[[0, 0]]) in (["F."], [".."])


def test_a_mask_of_pairs_says_by_its_diagonal_what_is_padding():
    """As booleans, as 0 and the lowest number that models add, and of one head or several."""
    labels, mask = [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]).bool()
    seen = torch.ones(5, 5, dtype=torch.bool).tril() & mask[:, None, None]
    added = torch.zeros(2, 3, 5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
    for pairs in (seen, seen.long(), added, added.to(torch.bfloat16)):
        assert kinds(labels, attention_mask=pairs.tolist()) == ["FTt..", "..FTt"]


def test_packed_rows_have_a_first_token_per_sequence():
    positions = [[0, 1, 2, 0, 1], [2, 3, 0, 1, 2]]
    assert kinds([[0, 1, 1, 0, 1], [1, 1, 0, 1, 1]], position_ids=positions) == ["FTtFt", "TtFTt"]


def test_what_fills_a_packed_row_up_is_padding():
    """As is a sequence of one token, which looks the same; not one that predicts a label."""
    positions = [[0, 1, 2, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]
    assert kinds([[0, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0] * 5], position_ids=positions) == ["FTt..", ".FtFt", "....."]
    assert kinds([[0, 1, 0, 0, 0]], position_ids=[[0, 0, 0, 0, 0]]) == ["F...."]


def test_positions_of_padding_are_no_sequence():
    packed = dict(position_ids=[[0, 0, 0, 1, 2]], attention_mask=[[0, 0, 1, 1, 1]])
    assert kinds([[0, 0, 1, 1, 1]], **packed) == ["..FTt"]


def test_rows_that_fill_a_batch_up_have_no_label():
    batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([[1, 2], [3, 4]])}
    padded = pad_rows(batch, 4)
    assert padded["input_ids"].tolist() == [[1, 2], [3, 4], [1, 2], [1, 2]]
    assert padded["labels"].tolist() == [[1, 2], [3, 4], [-100, -100], [-100, -100]]
    assert pad_rows(batch, 2) is batch
    with pytest.raises(
        ValueError, match="made a batch of 2 rows, and there is room for 1: per_device_train_batch_size"
    ):
        pad_rows(batch, 1)
    assert mask_rows(batch, 1)["labels"].tolist() == [[1, 2], [-100, -100]]
    assert batch["labels"].tolist() == [[1, 2], [3, 4]]


def test_largest_divisor():
    assert [largest_divisor(number, 4) for number in (1, 4, 6, 7, 8)] == [1, 4, 3, 1, 4]


def test_digests_tell_equal_tokens_in_another_order_apart():
    """As a data set makes that shuffles the answers of a question by a generator of its own."""
    ids = torch.randint(150_000, (4, 32), generator=torch.Generator().manual_seed(0))
    orders = [ids, ids.flip(0), ids.flip(1), ids.roll(1, dims=1), ids.T.reshape(4, 32), ids.view(8, 16)]
    digests = [tuple(batch_digest({"input_ids": order}).tolist()) for order in orders]
    assert len(set(digests[:5])) == 5 and digests[5] == digests[0]
    oracle = sum(int(token) * (place * 2_654_435_761 % 2**31) % 2**31 for place, token in enumerate(ids.flatten(), 1))
    assert digests[0] == (128, oracle % 2**31)
