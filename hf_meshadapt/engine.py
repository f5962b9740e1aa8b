"""The mesh as the trainer sees it: one object that owns topology, groups, this rank's model parts and the meter."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from .calibration import calibrate
from .config import BoundaryConfig, DataParallelConfig, MeshConfig
from .devices import finish_kernels
from .drift import DriftCheck
from .fingerprints import Fingerprint, model_fingerprint
from .folder_lock import FolderLock
from .ledger import Ledger
from .memory import RankWeights
from .mesh import MeshGroups, MeshTopology
from .model_shape import shared_shape
from .pipeline.assembly import ModelParts, build_stages
from .pipeline.footprint import check_resident
from .pipeline.intake import take_model
from .pipeline.layout import ModelLayout
from .pipeline.microbatch import Batch, batch_digest, microbatch_keys
from .pipeline.runner import PipelineRunner, Runner
from .pipeline.sequential import SequentialRunner
from .pipeline.stage import LossFunction
from .pipeline_gradients import PipelineGradients
from .planner import AnchorPlan, BytePlan, byte_plan
from .replication import Replication
from .roll_call import leave_world_at_exit
from .waiting import Waiter, within

logger = logging.getLogger(__name__)


class MeshEngine(PipelineGradients):
    """Runs batches over the mesh and agrees on gradients; knows nothing of Trainer.

    Args:
        mesh: shape of the mesh.
        boundary: what crosses a boundary.
        rank: this process's rank; 0 in the emulated mesh.
        data_parallel: what keeps replicas one model; by default the dense all-reduce.
        launch: what must be alike on all ranks before they form groups.
        anchored: priors will travel between replicas.

    Attributes:
        figures: what this stage tells the others of its pipeline with the next gradient norm, float64 (n,).
        figures_of: what every stage of the pipeline told with the last one, in order.

    Raises:
        ValueError: it is not; on all ranks.
    """

    def __init__(
        self,
        mesh: MeshConfig,
        boundary: BoundaryConfig,
        rank: int,
        data_parallel: DataParallelConfig | None = None,
        launch: Fingerprint | None = None,
        anchored: bool = False,
    ):
        self.mesh, self.boundary, self.data_parallel = mesh, boundary, data_parallel or DataParallelConfig()
        self._anchored = anchored
        self.topology = MeshTopology(mesh.stages, mesh.replicas, rank)
        self.ledger, self.folder_lock = Ledger(counts_bytes=mesh.wire_backend == "gloo"), FolderLock()
        self.sockets, self.step_meter = self.ledger.sockets, self.ledger.step_meter
        self.waiter = Waiter(self._describe_stage, mesh.timeout_seconds, self.step_meter.add_wait)
        if not mesh.emulated:
            with self.naming("the process groups shared with"):
                self.groups = within(mesh.timeout_seconds, lambda: self._make_groups(launch or {}))
                self.sockets.resolve_peers(self.groups.save)
            leave_world_at_exit(rank)
        self.parts: ModelParts | None = None
        self.runner: Runner | None = None
        self.replication: Replication | None = None
        self.num_steps: int | None = None  # optimizer steps after which the run ends
        self.calibrated = False
        self.calibration_cost: dict[str, float] | None = None
        self.calibration_interval: int | None = None  # optimizer steps, where nobody chose another
        self.features: torch.Tensor | None = None  # token features, shared by all boundaries
        self.busy_seconds: float | None = None  # of the busiest rank in a pass; None measures, a test gives its own
        self.agreed_lengths = set()
        self.anchor_plan: AnchorPlan | None = None
        self.figures = torch.zeros(0, dtype=torch.float64)
        self.figures_of: list[torch.Tensor] = []
        self._cut: tuple | None = None
        self._adapter: torch.nn.Module | None = None
        self._digest = torch.zeros(2, dtype=torch.long)  # of the batches of the optimizer step so far
        self._step_loss = torch.zeros(())  # of the optimizer step so far, where the last stage is here

    def _make_groups(self, launch: Fingerprint) -> MeshGroups:
        mesh, agree = self.mesh, lambda group: self._refuse_unlike_in(group, launch)
        return MeshGroups(self.topology, mesh.wire_backend, mesh.timeout_seconds, self.sockets, agree, self._anchored)

    # Model -----------------------------------------------------------------------------------------------------------

    def take_model(
        self, model, dtype: str, device: torch.device, optimizer: str, peft_config=None, seed: int = 0
    ) -> torch.nn.Module:
        """Returns this rank's part of a model or of the model of a name; see `pipeline.intake.take_model`.

        Args:
            optimizer: as in `TrainingArguments.optim`; its state counts in what must fit the device.
            peft_config, seed: of adapters to be put on.

        Raises:
            ValueError: the device's memory does not suffice.
        """

        def check_memory(weights: RankWeights, layout: ModelLayout) -> None:
            where = (device, self.topology.describe(), self.data_parallel)
            check_resident(weights, layout, self.mesh, self.boundary, self.topology.stage, optimizer, *where)

        stage, freeze_tied = self.topology.stage, self.data_parallel.freeze_tied
        trained, self._cut = take_model(model, dtype, self.mesh, stage, check_memory, peft_config, seed, freeze_tied)
        self._adapter = trained if trained is not self._cut[0] else None
        return trained

    def build(
        self,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager],
        loss_function: LossFunction | None = None,
        rows_per_example: int = 1,
    ) -> None:
        """Builds stages and runner, once the model is on its device.

        Args:
            loss_function: computes the loss in the model's place.
            rows_per_example: sequences that stay in one microbatch.

        Raises:
            NotImplementedError: the loss is not a sum over tokens divided by their number; on all ranks.
            ValueError: ranks hold different models, or other weights under the same name; on all ranks.
        """
        model, layout, _ = self._cut
        copy = {layout.head_weight: layout.embedding_weight} if layout.tied else {}
        self.refuse_unlike(lambda: model_fingerprint(model.config.to_dict(), model.state_dict(), copy))
        self.parts = build_stages(*self._cut, self.mesh, self.boundary, self.topology.stage, self.share, autocast)
        if self._adapter is not None:
            self.parts.take_adapter(self._adapter)
        if self.data_parallel.freeze_tied:
            self.parts.freeze_tied()
        self._take_loss(loss_function, rows_per_example)
        self.replication = Replication(self.data_parallel, self.mesh, self.groups, self.parts)
        self.drift = DriftCheck(self, self.replication.synchronizer, self.data_parallel.check_every)
        self.sync_cost = self.replication.cost(self.topology.describe())
        group, synchronizer = self.replication.ddp_group, self.replication.synchronizer
        sync = {"data_parallel_group": group, "synchronizer": synchronizer, "rows_per_example": rows_per_example}
        run = (self.parts, self.mesh, self.boundary, device)
        # Data-parallel modules meet when they are made.
        with self.naming("data-parallel set-up with", self._replicas):
            if self.mesh.emulated or self.mesh.num_chunks == 1:
                self.runner = SequentialRunner(*run, local=self.replication.local, **sync)
            else:
                self.runner = PipelineRunner(*run, group=self.groups.pipeline, waiter=self.waiter, **sync)
        self.device = device

    def _take_loss(self, loss_function: LossFunction | None, rows_per_example: int) -> None:
        last = self.parts.stages.get(self.mesh.num_chunks - 1)
        fault = {}
        if last is not None:
            last.loss_function = loss_function
            fault = {0: last.loss_fault(rows_per_example)}
        (reason,) = self.share(fault).values()
        if reason is not None:
            whose, remedy = "compute_loss_func", "Return such a sum"
            if loss_function is None:
                whose = f"the loss of {type(self.parts.model).__name__}"
                remedy = (
                    "Its forward must compute it with self.loss_function(..., **kwargs); or pass compute_loss_func"
                )
            raise NotImplementedError(
                f"{whose} cannot be summed over microbatches and replicas: it must be the sum of token losses divided by "
                f"num_items_in_batch ({reason}). {remedy}"
            )

    # Steps -----------------------------------------------------------------------------------------------------------

    @property
    def local_replicas(self) -> list[int]:
        """Replicas whose batches this process reads."""
        return list(range(self.mesh.replicas)) if self.mesh.emulated else [self.topology.replica]

    def train_batch(
        self, batch: Batch, rows: int, num_items: torch.Tensor, step: int, accumulation: int, sync: bool
    ) -> torch.Tensor:
        """One accumulation step; with `sync` gradients are final afterwards: averaged, tied copies summed.

        Args:
            batch: labels and model inputs of this process's replicas.
            rows: rows per replica.
            num_items: predicted tokens of the whole optimizer step over all replicas.
            step: optimizer steps taken so far.
            accumulation: accumulation steps taken in this optimizer step.

        Returns:
            The loss of the batch over all replicas, times the share of it that this rank computes (see `loss_share`).
        """
        self.waiter.step = step
        self.agree_on_length(batch["labels"].shape[1])
        self._digest = batch_digest(batch) + (self._digest if accumulation else 0)
        self.boundary.check_room(batch["labels"].shape[1], self.parts.layout.hidden_size)
        seed, count = self.boundary.mask_seed, self.mesh.microbatches
        keys = [microbatch_keys(seed, step, accumulation, replica, count) for replica in self.local_replicas]
        # The data-parallel axis averages, the loss is normalised by all replicas' tokens.
        divisor = num_items.to(self.device, torch.float32, non_blocking=True) / self.mesh.replicas
        # Pipeline links name themselves; what is left is DDP's all-reduce, which fails within the backward pass.
        with self.naming("the other replicas' gradients from", self._replicas):
            loss = self.runner.train_batch(batch, rows, keys, divisor, sync)
        self._step_loss = loss if accumulation == 0 else self._step_loss + loss
        if sync:
            self.sum_tied_gradients()
        return loss

    def end_step(self) -> None:
        """To be called when the optimizer has stepped."""
        steps = (self.waiter.step or 0) + 1
        with self._waiting("the other replicas' weights from", self._replicas):
            self.replication.synchronizer.end_step(final=steps == self.num_steps)
        self.drift.end_step(steps)
        if warning := self.sync_cost.end_step():
            logger.warning(warning)
        # The optimizer's kernels are part of the step, and the next one begins by waiting for them.
        finish_kernels(self.device)
        self.step_meter.end_step()
        self.waiter.step = steps

    def finish(self) -> None:
        """To be called when a run has ended, for whatever reason: all replicas' weights are the model's then."""
        with self.naming("the other replicas' last weights from", self._replicas):
            self.replication.synchronizer.finish()

    def outer_weights(self) -> contextlib.AbstractContextManager:
        """Within it the model has the weights to evaluate and to save; others only where replicas step apart."""
        return self.replication.synchronizer.outer_weights()

    def eval_batch(self, batch: Batch, rows: int, on_output: Callable[[object], None] | None = None) -> torch.Tensor:
        """Summed token loss of this process's replicas, unmasked; see `Runner.eval_batch`."""
        self.agree_on_length(batch["labels"].shape[1])
        return self.runner.eval_batch(batch, rows, on_output)

    def calibrate(self, batches: list[Batch], rows: int, accumulation: int) -> None:
        """Fits the boundaries on uncoded passes; see `calibration.calibrate`. `calibration_cost` adds up what it cost."""
        for batch in batches:
            self.boundary.check_room(batch["labels"].shape[1], self.parts.layout.hidden_size)
        with self.outer_weights():  # on which all replicas agree, as they must on the fit
            cost, before = calibrate(self, batches, rows, accumulation), self.calibration_cost or {}
        self.calibrated = True
        self.calibration_cost = {name: before.get(name, 0) + value for name, value in cost.items()}

    def set_budgets(self, budgets: tuple[float, ...]) -> None:
        """Sets the budget of every boundary, on all ranks alike; fits must follow."""
        self.boundary = replace(self.boundary, budgets=budgets)
        self.runner.set_boundary(self.boundary)

    @property
    def needs_calibration(self) -> bool:
        """Whether a boundary predictor has yet to be fitted; all ranks, those without a boundary too, say the same."""
        return self.boundary.needs_calibration and not self.calibrated

    @property
    def loss_share(self) -> int:
        """Factor that makes the mean over all ranks of `train_batch`'s losses the loss itself."""
        return 1 if self.mesh.emulated else self.mesh.stages

    # Figures ---------------------------------------------------------------------------------------------------------

    def take_logs(self) -> dict[str, float]:
        """Speed, waiting and bytes since the last call, equal on all ranks; one small sum over all ranks."""
        stages = 1 if self.mesh.emulated else self.mesh.stages
        return self.ledger.take(self.sum_over_ranks, stages=stages, alone=self.groups is None).logs()

    def plan(self, rows: int, length: int, accumulation: int) -> BytePlan:
        """What one optimizer step sends, from shapes alone. Collective over the pipeline."""
        sync_parts = self.replication.synchronizer.parts()
        return byte_plan(
            shared_shape(self.parts, sync_parts, self.topology.stage, self.share),
            self.mesh,
            self.boundary,
            sequences=rows,
            length=length,
            accumulation=accumulation,
            data_parallel=self.data_parallel,
            anchor=self.anchor_plan,
        )
