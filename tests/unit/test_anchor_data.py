"""The anchor's batches: every row once an epoch, an order of their own, any position to begin at."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.anchoring.data import AnchorBatches, StreamBatches, anchor_batches


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


def test_empty_data_sets_are_refused():
    with pytest.raises(ValueError, match="train_dataset is empty"):
        take(1, dataset=[])


# Streams -------------------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    """Rows 0 to n - 1, in every epoch from another one on; what it draws by the way is part of a row."""

    def __init__(self, num_rows: int = 11):
        self.num_rows, self.epoch = num_rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for row in range(self.num_rows):
            yield (row + self.epoch) % self.num_rows, torch.rand(()).item()


def stream(count: int, dataset=None, num_taken: int = 0, every: int = 1, seed: int = 0, collate=list) -> list:
    dataset = Stream() if dataset is None else dataset
    batches = anchor_batches(dataset, collate, 3, seed, num_taken, every)
    return [next(batches) for _ in range(count)]


def test_a_stream_is_read_in_order_and_begins_anew():
    rows = [row for batch in stream(6) for row, _ in batch]
    assert rows == [*range(11), *((row + 1) % 11 for row in range(7))]
    assert [row for batch in stream(2, dataset=Plain()) for row in batch] == [0, 1, 2, 0, 1, 2]


class Plain(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_shard_is_every_nth_row_from_one_that_the_seed_chooses():
    assert [row for batch in stream(2, every=4, seed=6) for row, _ in batch] == [2, 6, 10, 3, 7, 0]
    with pytest.raises(ValueError, match="of 20 it reads one"):
        stream(1, every=20, seed=15)


@pytest.mark.parametrize("position", [0, 1, 5])
def test_a_stream_can_be_continued_at_any_position(position):
    def collate(rows):
        return [*rows, torch.rand(()).item()]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole = stream(position + 3, collate=collate, every=2, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert stream(3, collate=collate, every=2, seed=3, num_taken=position) == whole[position:]


def test_the_fast_circuits_data_set_stays_in_its_epoch():
    dataset = Stream()
    dataset.set_epoch(5)
    assert isinstance(anchor_batches(dataset, list, 3, 0, 0, 1), StreamBatches)
    assert stream(5, dataset=dataset) == stream(5) and dataset.epoch == 5


def test_what_can_be_read_once_only_is_refused():
    with pytest.raises(NotImplementedError, match="generator.*iterated over again"):
        stream(1, dataset=(row for row in range(3)))
