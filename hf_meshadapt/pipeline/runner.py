"""Runs one batch of a replica through the mesh: over processes here, in sequence within one process in `sequential`.

Both runners give the same numbers: same microbatches, same boundary modules, same order of summation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ..boundary.aq_sgd import mark_first_visit
from ..boundary.module import wire_tensors
from ..boundary.observer import Observer
from ..config import BoundaryConfig, MeshConfig
from ..data_parallel.base import GradientSynchronizer
from .assembly import ModelParts
from .microbatch import Batch, largest_divisor, token_kinds
from .replicas import wrap_data_parallel
from .schedule import Waiter, make_schedule
from .shape_cache import ShapeCache
from .torch_internals import forget_passes
from .trainable import TrainableSet
from .wire_stage import WireStage


class Runner(ABC):
    """Forward and backward of one batch on this rank.

    Args:
        parts: this rank's chunks.
        mesh: shape of the mesh.
        boundary: what crosses a boundary.
        device: where the chunks compute.
        data_parallel_group: of the replicas whose gradients DDP averages; None where it does not.
        synchronizer: between replicas; only where there is one alone it is not needed.
        rows_per_example: sequences that stay in one microbatch; batches have a multiple of it.
    """

    def __init__(
        self,
        parts: ModelParts,
        mesh: MeshConfig,
        boundary: BoundaryConfig,
        device: torch.device,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        synchronizer: GradientSynchronizer | None = None,
        rows_per_example: int = 1,
    ):
        self.parts, self.mesh, self.boundary, self.device = parts, mesh, boundary, device
        self.synchronizer, self.rows_per_example = synchronizer, rows_per_example
        self._trainable = TrainableSet(parts.named_owned())
        self.modules: dict[int, nn.Module] = {
            chunk: wrap_data_parallel(stage, data_parallel_group, synchronizer and synchronizer.hook(chunk))
            for chunk, stage in parts.stages.items()
        }

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

        Raises:
            ValueError: parameters were frozen or thawed since there are replicas.
        """
        if self.mesh.replicas > 1:
            self._trainable.refuse_changes()
        self._set_mode(training=True)
        return self._train(batch, rows, keys, num_items, sync)

    @torch.no_grad()
    def eval_batch(self, batch: Batch, rows: int, on_output: Callable[[object], None] | None = None) -> torch.Tensor:
        """Summed token loss of this process's replicas, unmasked; 0 where the last chunk is elsewhere.

        Args:
            on_output: is shown the model's output of every microbatch, in order of rows, where the last chunk is.
        """
        self._set_mode(training=False)
        last = self.parts.stages.get(self.parts.num_chunks - 1)
        if last is None or on_output is None:
            return self._eval(batch, rows)
        last.on_output = on_output
        try:
            return self._eval(batch, rows)
        finally:
            last.on_output = None

    def observe_batch(self, batch: Batch, rows: int, observers: dict[int, Observer], gradients: bool) -> None:
        """One uncoded pass in evaluation mode whose hidden states, and gradients if wanted, the observers look at.

        Args:
            observers: by chunk; those of this rank that receive.
        """
        self._set_mode(training=False)
        for chunk, stage in self.parts.stages.items():
            stage.observers = {stage.span.start: observers[chunk]} if chunk in observers else {}
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
                stage.observers = {}

    def backward_uncoded(self, batch: Batch, rows: int, num_items: torch.Tensor) -> None:
        """One replica's batch, uncoded and without dropout; adds the gradient of its loss to `.grad`.

        Without dropout, since the pass shall see what is there and draw none of the training passes' random numbers.

        Args:
            num_items: what the summed token loss is divided by, scalar.
        """
        self._set_mode(training=False)
        self._backward(batch, rows, num_items)

    def set_boundary(self, boundary: BoundaryConfig) -> None:
        """Takes other budgets, at the ends too, which then need a fit; on all ranks together."""
        self.boundary = boundary
        for stage in self.parts.stages.values():
            for end in (stage.receive, stage.send):
                if end is not None:
                    end.set_config(boundary)

    def _set_mode(self, training: bool) -> None:
        for stage in self.parts.stages.values():
            if stage.training != training or stage.model.training != training:
                stage.train(training)

    def _first_visit(self, batch: Batch) -> bool:
        """aq_sgd: the batch of a replica has samples that were never seen, and travels whole."""
        if self.boundary.codec != "aq_sgd":
            return False
        return mark_first_visit(self.parts.stages.values(), batch["input_ids"], token_kinds(batch).cpu())

    def _num_uncoded(self, rows: int) -> int:
        """Microbatches of a pass that need not have as many as a training step."""
        return largest_divisor(rows // self.rows_per_example, self.mesh.microbatches)

    def _model_inputs(self, batch: Batch) -> Batch:
        """Tensors that every chunk gets, beside what arrives at it."""
        inputs = {name: value for name, value in batch.items() if name != "input_ids"}
        if self.boundary.coded:
            # What a boundary lays out follows from the kinds: it looks at them on the host, and would wait there each time.
            inputs |= {"token_ids": batch["input_ids"], "kind": token_kinds(batch).cpu()}
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

    @abstractmethod
    def _backward(self, batch, rows, num_items) -> None: ...


class PipelineRunner(Runner):
    """This rank's chunks of a pipeline over processes.

    torch sizes a stage's buffers once, so there is one stage and schedule per batch shape and mode, all over the same
    modules. The stages of a pipeline see the same shapes in the same order, so they drop the same ones.
    """

    def __init__(self, *args, group: dist.ProcessGroup, waiter: Waiter, **kwargs):
        super().__init__(*args, **kwargs)
        self.group, self.waiter = group, waiter
        self._schedules: ShapeCache[tuple] = ShapeCache()

    def set_boundary(self, boundary):
        super().set_boundary(boundary)
        # Buffers of coded passes have the old budgets' sizes.
        self._schedules.keep(lambda shape: shape[-1] != "train")

    def _train(self, batch, rows, keys, num_items, sync):
        count = self.mesh.microbatches
        mode = "first visit" if self._first_visit(batch) else "train"
        made = self._schedule(rows, batch["labels"].shape[1], count, mode)
        for stage in made[1]:
            stage.sync_gradients = sync
        inputs = self._model_inputs(batch)
        inputs |= {"key": keys[0], "num_items": num_items.expand(count)}
        return self._step(made, batch, inputs)

    def _eval(self, batch, rows):
        return self._step(*self._uncoded(batch, rows, "eval"), evaluates=True)

    def _observe(self, batch, rows):
        self._backward(batch, rows, torch.ones((), device=self.device))

    def _backward(self, batch, rows, num_items):
        made, batch, inputs = self._uncoded(batch, rows, "observe")
        self._step(made, batch, inputs | {"num_items": num_items.expand(self._num_uncoded(rows))})

    def _uncoded(self, batch: Batch, rows: int, mode: str) -> tuple:
        count = self._num_uncoded(rows)
        made = self._schedule(rows, batch["labels"].shape[1], count, mode)
        return made, batch, self._model_inputs(batch) | {"num_items": torch.ones(count, device=self.device)}

    def _step(self, made: tuple, batch: Batch, inputs: Batch, evaluates: bool = False) -> torch.Tensor:
        (schedule, stages), losses = made, []
        step = schedule.eval if evaluates else schedule.step
        arriving = (batch["input_ids"],) if 0 in self.parts.stages else ()
        target = batch["labels"] if self.parts.num_chunks - 1 in self.parts.stages else None
        step(*arriving, target=target, losses=losses, return_outputs=False, **inputs)
        for stage in stages:
            forget_passes(stage)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))

    def _schedule(self, rows: int, length: int, count: int, mode: str) -> tuple:
        return self._schedules.get(
            (rows, length, count, mode), lambda: self._build_schedule(rows // count, length, count, mode)
        )

    def _build_schedule(self, rows: int, length: int, count: int, mode: str) -> tuple:
        """Stages and schedule of one shape; mode is train (coded), first visit (uncoded, trains), eval (uncoded) or
        observe (uncoded, with backward)."""
        layout, last = self.parts.layout, self.parts.num_chunks - 1
        backward = mode != "eval"

        def wire(index: int) -> tuple[torch.Tensor, ...]:
            config = self.boundary.at(index)
            tensors = wire_tensors(config, layout.hidden_size, rows, length, mode == "train", "meta")
            return tuple(tensor.requires_grad_(backward and tensor.is_floating_point()) for tensor in tensors)

        def gradients(index: int) -> tuple[torch.Tensor | None, ...]:
            return tuple(tensor.detach() if tensor.is_floating_point() else None for tensor in wire(index))

        tokens = torch.empty((rows, length), dtype=torch.long, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=backward)
        stages = [
            WireStage(
                # Only training passes go through DDP, whose reducer must see no others.
                self.modules[chunk] if mode in ("train", "first visit") else self.parts.stages[chunk],
                chunk,
                self.parts.num_chunks,
                self.device,
                input_args=tokens if chunk == 0 else wire(chunk - 1),
                output_args=loss if chunk == last else wire(chunk),
                input_grads=None if chunk == 0 else gradients(chunk - 1),
                output_grads=None if chunk == last else gradients(chunk),
                group=self.group,
                host_wire=self.mesh.wire_backend == "gloo",
            )
            for chunk in self.parts.stages
        ]
        return make_schedule(self.mesh.schedule, stages, count, loss_output, self.waiter), stages


def loss_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last chunk's output is the loss already: the model's own forward computed it."""
    return output
