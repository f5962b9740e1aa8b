"""What the ranks of a mesh read: one random order of rows for all of them, and every replica its share of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

# Batch entry: how many of its first rows are rows of the data set and no repeats; absent where all are.
REAL_ROWS = "num_real_rows"


class EpochSampler(Sampler[int]):
    """Makes a sampler draw its order from seed and epoch alone.

    transformers' samplers draw it from the process's generator. Dropout leaves that in another state on every stage, so
    that stages would read different rows of the data; and a resumed run would not find its epoch's order again.

    Args:
        sampler: one with a `generator`.
    """

    def __init__(self, sampler: Sampler[int], seed: int):
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(self.sampler)


@dataclass(frozen=True)
class Repeat:
    """An example that fills up a replica's last batch."""

    example: Any


class ReplicaStream(IterableDataset):
    """One replica's rows of a data set without indices, the same on every stage.

    Every rank reads the whole stream, in rounds of `rows` for each replica, so that a round holds what one process with
    the batch of all replicas would read, and every replica has the same number of batches. Where the stream ends within
    a round, the first round's examples fill it up as `Repeat`s.

    Args:
        source: the stream; `set_epoch` and a length are passed on.
        rows: of a replica's batch.
    """

    def __init__(self, source: IterableDataset, rows: int, replicas: int, replica: int):
        self.source, self.rows, self.replicas, self.replica = source, rows, replicas, replica

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.source) // (self.rows * self.replicas)) * self.rows

    def __iter__(self) -> Iterator[Any]:
        everyone, stream = self.rows * self.replicas, iter(self.source)
        mine = slice(self.rows * self.replica, self.rows * (self.replica + 1))
        first = current = list(itertools.islice(stream, everyone))
        while current:
            repeats = itertools.cycle([Repeat(example) for example in first])
            yield from [*current, *itertools.islice(repeats, everyone - len(current))][mine]
            current = list(itertools.islice(stream, everyone))


@dataclass
class CountingCollator:
    """Around the collator of a `ReplicaStream`: notes how many rows are no repeats."""

    collate: Callable[[list], dict]

    def __call__(self, examples: list) -> dict:
        real = sum(not isinstance(example, Repeat) for example in examples)
        batch = self.collate([example.example if isinstance(example, Repeat) else example for example in examples])
        return {**batch, REAL_ROWS: real}
