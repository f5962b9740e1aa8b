"""What the anchor reads: the training set in an order of its own, without an end, from any position on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.trainer_utils import has_length


class AnchorBatches(Iterator[dict]):
    """Batches of equally many rows; every epoch is another permutation, and batches run on over its end.

    The order, and what a collator draws of torch's random numbers, depends on seed and position alone.

    Args:
        dataset: rows by index.
        collate: makes a batch of rows.
        rows: of a batch.
        seed: of the order.
        num_taken: batches that were taken before.

    Raises:
        NotImplementedError: the data set cannot be read by index.
        ValueError: it has no rows.
    """

    def __init__(self, dataset: Sequence, collate: Callable[[list], Any], rows: int, seed: int, num_taken: int = 0):
        refuse_stream(dataset)
        if not len(dataset):
            raise ValueError("train_dataset is empty: the anchor needs at least one row")
        self.dataset, self.collate, self.rows, self.seed, self.num_taken = dataset, collate, rows, seed, num_taken
        self._epoch, self._order = -1, []

    def __next__(self) -> Any:
        first = self.num_taken * self.rows
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_mixed(self.seed, self.num_taken))
            batch = self.collate([self.dataset[self._index(first + i)] for i in range(self.rows)])
        self.num_taken += 1
        return batch

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(_mixed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(len(self.dataset), generator=generator).tolist()
        return self._order[place]


def refuse_stream(dataset) -> None:
    """Raises NotImplementedError for a data set that cannot be read by index."""
    if not (hasattr(dataset, "__getitem__") and has_length(dataset)):
        raise NotImplementedError(
            f"anchor=True with a {type(dataset).__name__}: the anchor reads the training set in an order of its own. Use "
            "a data set with a length and indices"
        )


def _mixed(seed: int, number: int) -> int:
    # Not a sum: seed + 1 would bring the next epoch's order of the fast circuit.
    return (seed * 1_000_003 + number) % 2**63
