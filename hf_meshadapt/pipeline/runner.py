"""Runs one batch of a replica through the mesh: over processes, or in sequence within this one.

Both runners give the same numbers: same microbatches, same boundary modules, same order of summation.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..boundary.aq_sgd import mark_first_visit
from ..boundary.module import wire_tensors
from ..boundary.observer import Observer
from ..config import BoundaryConfig, MeshConfig
from .assembly import ModelParts
from .microbatch import Batch, largest_divisor, pad_rows, token_kinds
from .schedule import Waiter, make_schedule
from .torch_internals import fix_buckets
from .wire_stage import WireStage


class Runner(ABC):
    """Forward and backward of one batch on this rank.

    Args:
        parts: this rank's chunks.
        mesh: shape of the mesh.
        boundary: what crosses a boundary.
        device: where the chunks compute.
    """

    def __init__(self, parts: ModelParts, mesh: MeshConfig, boundary: BoundaryConfig, device: torch.device):
        self.parts, self.mesh, self.boundary, self.device = parts, mesh, boundary, device

    def train_batch(
        self, batch: Batch, rows: int, keys: list[torch.Tensor], num_items: torch.Tensor, sync: bool
    ) -> torch.Tensor:
        """Forward and backward; gradients are left in `.grad`, averaged over replicas if `sync`.

        Args:
            batch: `labels` (B, T) and model inputs of this process's replicas, padded to `rows` rows each.
            rows: rows per replica.
            keys: microbatch keys for each replica of this process, (microbatches,) each.
            num_items: what the summed token loss of every replica is divided by, scalar.
            sync: last accumulation step: average the gradients over replicas.

        Returns:
            Summed token loss / num_items, averaged over this process's replicas; 0 where the last chunk is elsewhere.
        """
        self._set_mode(training=True)
        return self._train(batch, rows, keys, num_items, sync)

    @torch.no_grad()
    def eval_batch(self, batch: Batch, rows: int) -> torch.Tensor:
        """Summed token loss of this process's replicas, unmasked; 0 where the last chunk is elsewhere."""
        self._set_mode(training=False)
        return self._eval(batch, rows)

    def observe_batch(self, batch: Batch, rows: int, observers: dict[int, Observer], gradients: bool) -> None:
        """One uncoded pass in evaluation mode whose hidden states, and gradients if wanted, the observers look at.

        Args:
            observers: by chunk; those of this rank that receive.
        """
        self._set_mode(training=False)
        for chunk, stage in self.parts.stages.items():
            stage.observer = observers.get(chunk)
        try:
            if gradients:
                self._observe(batch, rows)
                for _, parameter in self.parts.named_trainable():
                    parameter.grad = None
            else:
                with torch.no_grad():
                    self._eval(batch, rows)
        finally:
            for stage in self.parts.stages.values():
                stage.observer = None

    def _set_mode(self, training: bool) -> None:
        for stage in self.parts.stages.values():
            if stage.training != training or stage.model.training != training:
                stage.train(training)

    def _first_visit(self, batch: Batch) -> bool:
        """aq_sgd: the batch of a replica has samples that were never seen, and travels whole."""
        if self.boundary.codec != "aq_sgd":
            return False
        return mark_first_visit(self.parts.stages.values(), batch["input_ids"], token_kinds(batch))

    def _model_inputs(self, batch: Batch) -> Batch:
        """Tensors that every chunk gets, beside what arrives at it."""
        inputs = {name: value for name, value in batch.items() if name != "input_ids"}
        if self.boundary.coded:
            inputs |= {"token_ids": batch["input_ids"], "kind": token_kinds(batch)}
        return inputs

    @property
    def trained(self) -> nn.Module:
        """What Trainer takes for the model that it trains and zeroes: all chunks of this rank."""
        return nn.ModuleList(self.parts.stages.values())

    @abstractmethod
    def _train(self, batch, rows, keys, num_items, sync) -> torch.Tensor: ...

    @abstractmethod
    def _eval(self, batch, rows) -> torch.Tensor: ...

    @abstractmethod
    def _observe(self, batch, rows) -> None: ...


class PipelineRunner(Runner):
    """This rank's chunks of a pipeline over processes.

    torch sizes a stage's buffers once, so there is one stage and schedule per batch shape and mode, all over the same
    modules.
    """

    def __init__(self, parts, mesh, boundary, device, *, group, data_parallel_group, waiter: Waiter):
        super().__init__(parts, mesh, boundary, device)
        self.group, self.waiter = group, waiter
        self.modules: dict[int, nn.Module] = {
            chunk: wrap_data_parallel(stage, data_parallel_group) for chunk, stage in parts.stages.items()
        }
        self._schedules: dict[tuple, tuple] = {}

    def _train(self, batch, rows, keys, num_items, sync):
        count = self.mesh.microbatches
        mode = "first visit" if self._first_visit(batch) else "train"
        schedule, stages = self._schedule(rows, batch["labels"].shape[1], count, mode)
        for stage in stages:
            stage.sync_gradients = sync
        inputs = self._model_inputs(batch)
        inputs |= {"key": keys[0], "num_items": num_items.expand(count)}
        return self._step(schedule.step, batch, inputs)

    def _eval(self, batch, rows):
        schedule, inputs = self._uncoded(batch, rows, "eval")
        return self._step(schedule.eval, batch, inputs)

    def _observe(self, batch, rows):
        schedule, inputs = self._uncoded(batch, rows, "observe")
        self._step(schedule.step, batch, inputs)

    def _uncoded(self, batch: Batch, rows: int, mode: str) -> tuple:
        count = largest_divisor(rows, self.mesh.microbatches)
        schedule, _ = self._schedule(rows, batch["labels"].shape[1], count, mode)
        return schedule, self._model_inputs(batch) | {"num_items": torch.ones(count, device=self.device)}

    def _step(self, step, batch: Batch, inputs: Batch) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        arriving = (batch["input_ids"],) if 0 in self.parts.stages else ()
        target = batch["labels"] if self.parts.num_chunks - 1 in self.parts.stages else None
        step(*arriving, target=target, losses=losses, return_outputs=False, **inputs)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))

    def _schedule(self, rows: int, length: int, count: int, mode: str) -> tuple:
        shape = (rows, length, count, mode)
        if shape not in self._schedules:
            self._schedules[shape] = self._build_schedule(rows // count, length, count, mode)
        return self._schedules[shape]

    def _build_schedule(self, rows: int, length: int, count: int, mode: str) -> tuple:
        """Stages and schedule of one shape; mode is train (coded), first visit (uncoded, trains), eval (uncoded) or
        observe (uncoded, with backward)."""
        layout, last = self.parts.layout, self.parts.num_chunks - 1
        backward = mode != "eval"
        wire = wire_tensors(self.boundary, layout.hidden_size, rows, length, mode == "train", "meta")
        wire = tuple(tensor.requires_grad_(backward and tensor.is_floating_point()) for tensor in wire)
        gradients = tuple(tensor.detach() if tensor.is_floating_point() else None for tensor in wire)
        tokens = torch.empty((rows, length), dtype=torch.long, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=backward)
        stages = [
            WireStage(
                # Only training passes go through DDP, whose reducer must see no others.
                self.modules[chunk] if mode in ("train", "first visit") else self.parts.stages[chunk],
                chunk,
                self.parts.num_chunks,
                self.device,
                input_args=tokens if chunk == 0 else wire,
                output_args=loss if chunk == last else wire,
                input_grads=None if chunk == 0 else gradients,
                output_grads=None if chunk == last else gradients,
                group=self.group,
                host_wire=self.mesh.wire_backend == "gloo",
            )
            for chunk in self.parts.stages
        ]
        return make_schedule(self.mesh.schedule, stages, count, loss_output, self.waiter), stages


def loss_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last chunk's output is the loss already: the model's own forward computed it."""
    return output


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


def wrap_data_parallel(stage: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """DDP over the replicas of this chunk; the bare chunk where there is one replica or nothing to train."""
    if group is None or dist.get_world_size(group) == 1 or not any(p.requires_grad for p in stage.parameters()):
        return stage
    # Replicas start from the same checkpoint, and boundaries' buffers are agreed on elsewhere: nothing to broadcast.
    with warnings.catch_warnings():
        # The suggested successor would still broadcast buffers once.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped = DistributedDataParallel(stage, process_group=group, broadcast_buffers=False, init_sync=False)
    fix_buckets(wrapped)
    return wrapped
