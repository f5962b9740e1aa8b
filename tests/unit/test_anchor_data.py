"""The anchor's batches: every row once an epoch, an order of their own, any position to begin at."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.anchoring.data import AnchorBatches


def take(count: int, **options) -> list[list[int]]:
    batches = AnchorBatches(**{"dataset": list(range(7)), "collate": list, "rows": 3, "seed": 5, **options})
    return [next(batches) for _ in range(count)]


def test_every_epoch_has_every_row_once_in_another_order():
    rows = [row for batch in take(14) for row in batch]
    epochs = [rows[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert take(14, seed=6) != take(14) == take(14)


def test_batches_may_be_larger_than_the_data_set():
    assert [sorted(batch) for batch in take(1, dataset=[0, 1], rows=4)] == [[0, 0, 1, 1]]


@pytest.mark.parametrize("position", [0, 2, 3, 9])
def test_any_position_can_be_begun_at(position):
    assert take(4, num_taken=position) == take(position + 4)[position:]


def test_what_a_collator_draws_depends_on_the_position_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    drawn = take(3, collate=lambda rows: torch.rand(()).item())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert take(1, collate=lambda rows: torch.rand(()).item(), num_taken=2) == drawn[2:]
    assert len(set(drawn)) == 3


def test_streams_and_empty_data_sets_are_refused():
    with pytest.raises(NotImplementedError, match="generator.*indices"):
        take(1, dataset=(row for row in range(3)))
    with pytest.raises(ValueError, match="train_dataset is empty"):
        take(1, dataset=[])
