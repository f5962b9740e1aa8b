"""What the anchor reads: the training set, or a shard of a stream, without an end, from any position on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        ValueError: the data set has no rows.
    """

    def __init__(self, dataset: Sequence, collate: Callable[[list], Any], rows: int, seed: int, num_taken: int = 0):
        if not len(dataset):
            raise ValueError("train_dataset is empty: the anchor needs at least one row")
        self.dataset, self.collate, self.rows, self.seed, self.num_taken = dataset, collate, rows, seed, num_taken
        self._epoch, self._order = -1, []

    @property
    def num_per_epoch(self) -> int:
        """Whole batches in the data set, at least one."""
        return max(1, len(self.dataset) // self.rows)

    def __next__(self) -> Any:
        first = self.num_taken * self.rows
        with drawing(self.seed, self.num_taken):
            batch = self.collate([self.dataset[self._index(first + i)] for i in range(self.rows)])
        self.num_taken += 1
        return batch

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(_mixed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(len(self.dataset), generator=generator).tolist()
        return self._order[place]


class StreamBatches(Iterator[dict]):
    """Batches of one shard of a data set without indices: of every n-th row. The stream begins anew where it ends.

    What was taken before is read past, so that rows, and what a collator draws of torch's random numbers, depend on seed
    and position alone, provided that the stream gives the same rows whenever it is read.

    Args:
        dataset: gives its rows from the first on whenever it is iterated over; its `set_epoch`, if any, is called on a
            copy, since the fast circuit may read the same object.
        collate, rows, num_taken: as for `AnchorBatches`.
        every: n.
        seed: chooses the shard, and what is drawn.

    Raises:
        NotImplementedError: the data set can be read once only.
        ValueError: while reading: the shard has no rows.
    """

    def __init__(
        self, dataset, collate: Callable[[list], Any], rows: int, seed: int, num_taken: int = 0, every: int = 1
    ):
        refuse_unreadable(dataset)
        self.dataset = copy.deepcopy(dataset) if hasattr(dataset, "set_epoch") else dataset
        self.collate, self.rows, self.seed, self.num_taken, self.every = collate, rows, seed, num_taken, every
        self._examples, self._num_read = self._read(), 0

    def __next__(self) -> Any:
        while self._num_read < self.num_taken:
            with drawing(self.seed, self._num_read):
                self._next_rows()
        with drawing(self.seed, self.num_taken):
            batch = self.collate(self._next_rows())
        self.num_taken += 1
        return batch

    @property
    def num_per_epoch(self) -> float:
        """Not known before its end."""
        return math.inf

    def _next_rows(self) -> list:
        self._num_read += 1
        return [next(self._examples) for _ in range(self.rows)]

    def _read(self) -> Iterator[Any]:
        for epoch in itertools.count():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            shard = itertools.islice(iter(self.dataset), self.seed % self.every, None, self.every)
            empty = True
            for example in shard:
                empty = False
                yield example
            if empty:
                raise ValueError(
                    f"train_dataset ended before the anchor's first row: of {self.every} it reads one. Give the stream "
                    "so many rows at least, or set anchor_every lower"
                )


def anchor_batches(
    dataset, collate, rows: int, seed: int, num_taken: int, every: int
) -> AnchorBatches | StreamBatches:
    """What the anchor reads of a data set; `every` is that of streams.

    Raises:
        NotImplementedError, ValueError: as the two classes.
    """
    if has_indices(dataset):
        return AnchorBatches(dataset, collate, rows, seed, num_taken)
    return StreamBatches(dataset, collate, rows, seed, num_taken, every)


def has_indices(dataset) -> bool:
    """It can be read in any order."""
    return hasattr(dataset, "__getitem__") and has_length(dataset)


def can_read(dataset) -> bool:
    """It can be read beside the fast circuit, and again."""
    return has_indices(dataset) or (isinstance(dataset, Iterable) and not isinstance(dataset, Iterator))


def refuse_unreadable(dataset) -> None:
    """Raises NotImplementedError for a data set that the anchor cannot read beside the fast circuit, or again."""
    if not can_read(dataset):
        raise NotImplementedError(
            f"anchor=True with a {type(dataset).__name__}: the anchor reads the training set by itself, from the beginning "
            "after every restart. Use a data set with a length and indices, or one that can be iterated over again"
        )


@contextlib.contextmanager
def drawing(seed: int, position: int) -> Iterator[None]:
    """Within it torch's random numbers depend on these two alone; outside, nothing was drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_mixed(seed, position))
        yield


def _mixed(seed: int, number: int) -> int:
    # Not a sum: seed + 1 would bring the next epoch's order of the fast circuit.
    return (seed * 1_000_003 + number) % 2**63
