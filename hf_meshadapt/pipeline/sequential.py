"""Runs the chunks of a pipeline one after the other in this process: the emulated mesh, and meshes of one stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from .microbatch import Batch, largest_divisor, pad_rows
from .replicas import wrap_data_parallel
from .runner import Runner


class SequentialRunner(Runner):
    """All chunks in this process, one after the other: the emulated mesh, and meshes of one stage.

    Replicas run in sequence; each gets gradients of its own, which are averaged as DDP would: divided by the number
    of replicas, then summed in replica order.
    """

    def __init__(self, parts, mesh, boundary, device, *, data_parallel_group=None):
        super().__init__(parts, mesh, boundary, device)
        self.replicas = mesh.replicas if mesh.emulated else 1
        self.module = next(iter(parts.stages.values()))
        if data_parallel_group is not None:
            self.module = wrap_data_parallel(self.module, data_parallel_group)
        self._gradients: list[dict[str, torch.Tensor | None]] = [{} for _ in range(self.replicas)]

    def _train(self, batch, rows, keys, num_items, sync):
        loss = torch.zeros((), device=self.device)
        for replica, part in enumerate(self._replica_batches(batch, rows)):
            self._swap_in(replica)
            loss += self._train_replica(part, keys[replica], num_items, sync)
            self._swap_out(replica)
        if self.replicas > 1 and sync:
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

    def _observe(self, batch, rows):
        for microbatch in self._uncoded(batch, rows):
            self._forward(microbatch).backward()

    def _uncoded(self, batch: Batch, rows: int) -> Iterator[Batch]:
        count = largest_divisor(rows, self.mesh.microbatches)
        for replica, part in enumerate(self._replica_batches(batch, rows)):
            for stage in self.parts.stages.values():
                if stage.observer is not None:
                    stage.observer.replica = replica
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

    # One set of parameters serves all replicas, so `.grad` changes hands between them.
    def _swap_in(self, replica: int) -> None:
        if self.replicas > 1:
            for name, parameter in self.parts.named_trainable():
                parameter.grad = self._gradients[replica].get(name)

    def _swap_out(self, replica: int) -> None:
        if self.replicas > 1:
            for name, parameter in self.parts.named_trainable():
                self._gradients[replica][name], parameter.grad = parameter.grad, None

    def _average(self) -> None:
        for name, parameter in self.parts.named_trainable():
            parts = [gradients.pop(name) for gradients in self._gradients]
            parts = [part / self.replicas for part in parts if part is not None]
            parameter.grad = torch.stack(parts).sum(0) if parts else None


def split_rows(batch: Batch, count: int) -> list[Batch]:
    """Cuts a batch into `count` equal parts along its rows."""
    pieces = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(count)]
