"""Runs the chunks of a pipeline one after the other in this process: the emulated mesh, and meshes of one stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from .local_replicas import LocalReplicas
from .microbatch import Batch, pad_rows
from .runner import Runner


class SequentialRunner(Runner):
    """All chunks in this process, one after the other: the emulated mesh, and meshes of one stage.

    Replicas run in sequence; each gets gradients of its own, which the synchronizer averages unless replicas step
    apart.

    Args:
        local: the replicas of this process; by default there is one alone.
    """

    def __init__(self, *args, local: LocalReplicas | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.local = local or LocalReplicas(self.parts.named_trainable(), 1, apart=False)
        self.replicas = self.local.num_replicas
        self.module = next(iter(self.modules.values()))

    def _train(self, batch, rows, keys, num_items, sync):
        loss = torch.zeros((), device=self.device)
        parts = self._replica_batches(batch, rows)
        for replica in self.local.passes():
            loss += self._train_replica(parts[replica], keys[replica], num_items, sync)
        if self.replicas > 1 and sync and not self.local.apart:
            self._average()
        return loss / self.replicas

    def _train_replica(self, batch: Batch, keys: torch.Tensor, num_items: torch.Tensor, sync: bool) -> torch.Tensor:
        count = self.mesh.microbatches
        total = torch.zeros((), device=self.device)
        inputs = self._model_inputs(batch)
        self._first_visit(batch)
        for index, microbatch in enumerate(split_rows({"input_ids": batch["input_ids"], **inputs}, count)):
            microbatch |= {"key": keys[index : index + 1], "num_items": num_items}
            last = index == count - 1
            no_sync = isinstance(self.module, DistributedDataParallel) and not (sync and last)
            with self.module.no_sync() if no_sync else contextlib.nullcontext():
                loss = self._forward(microbatch)
                loss.backward()
            total += loss.detach()
        return total

    def _eval(self, batch, rows):
        total = torch.zeros((), device=self.device)
        for microbatch in self._uncoded(batch, rows):
            total += self._forward(microbatch)
        return total

    def _backward(self, batch, rows, num_items):
        inputs = {"input_ids": batch["input_ids"], **self._model_inputs(batch)}
        for microbatch in split_rows(inputs, self._num_uncoded(rows)):
            self._forward(microbatch | {"num_items": num_items}).backward()

    def _observe(self, batch, rows):
        for microbatch in self._uncoded(batch, rows):
            self._forward(microbatch).backward()

    def _uncoded(self, batch: Batch, rows: int) -> Iterator[Batch]:
        count = self._num_uncoded(rows)
        for replica, part in enumerate(self._replica_batches(batch, rows)):
            for stage in self.parts.stages.values():
                for observer in stage.observers.values():
                    observer.replica = replica
            inputs = {"input_ids": part["input_ids"], **self._model_inputs(part)}
            for microbatch in split_rows(inputs, count):
                yield microbatch | {"num_items": torch.ones((), device=self.device)}

    def _forward(self, microbatch: Batch) -> torch.Tensor:
        passing = (microbatch.pop("input_ids"),)
        if isinstance(self.module, DistributedDataParallel) and torch.is_grad_enabled():
            return self.module(*passing, **microbatch)
        for stage in self.parts.stages.values():
            passing = stage(*passing, **microbatch)
        return passing

    def _replica_batches(self, batch: Batch, rows: int) -> list[Batch]:
        batch = pad_rows(batch, rows * self.replicas)
        return split_rows(batch, self.replicas)

    def _average(self) -> None:
        gradients = self.local.take_gradients()
        for chunk in self.parts.stages:
            for name, average in self.synchronizer.average(chunk, gradients).items():
                self.parts.model.get_parameter(name).grad = average


def split_rows(batch: Batch, count: int) -> list[Batch]:
    """Cuts a batch into `count` equal parts along its rows."""
    pieces = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(count)]
