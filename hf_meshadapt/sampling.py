"""One random order of rows for all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


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
