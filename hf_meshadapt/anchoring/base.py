"""What a trainer asks of its anchor, and what all runs with one have in common: corrected steps, figures, state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..anchor.budget import LEAST_CHOSEN, unused_warning
from ..anchor.schedule import NO_VERSION, AnchorHistory
from ..gradients import clip_coefficient
from ..spectral.optimizer import SpectralCorrection
from ..spectral.priors import Priors
from .checkpoint import AnchorState, load_anchor_files, save_anchor_files
from .fitting import Fitting
from .prior import Prior
from .sizes import plan_anchor
from .traffic import chosen_interval

logger = logging.getLogger(__name__)


class NoAnchor:
    """A run without an anchor; everything that the trainer calls.

    Attributes:
        calibrates: the boundaries of this run are calibrated by its anchor once it trains.
    """

    calibrates = False

    def __init__(self, trainer):
        self.trainer, self.engine, self.args = trainer, trainer.engine, trainer.args

    def corrected(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to train with, for a new one or, in a further run, the one that it was made into."""
        return optimizer

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around a whole run: what was opened for it is closed after it."""
        done = False
        try:
            yield
            done = True
        finally:
            self.stop(done)

    def start(self, dataloader) -> None:
        """Before the first step, after a checkpoint has been loaded; collective."""

    def stop(self, done: bool) -> None:
        """After the last step; `done` unless an error ended the run."""

    def sum_over_replicas(self, count: Tensor) -> Tensor:
        """Sums a small CPU tensor of whole numbers over the replicas; once before every step."""
        return self.engine.sum_over_replicas(count)

    def begin_step(self, step: int) -> None:
        """Before the passes of step `step` + 1."""

    def one_step(self) -> contextlib.AbstractContextManager:
        """Around the optimizer's step where several replicas of this process take it in turn."""
        return contextlib.nullcontext()

    def end_step(self) -> None:
        """After the optimizer's step."""

    def logs(self) -> dict[str, float]:
        """Figures of the last step, equal on all ranks."""
        return {}

    def phase(self) -> str:
        """How it goes with the anchor, in words that change seldom; on rank 0."""
        return ""

    def status(self) -> str:
        """How it goes with the anchor after the last step, for a progress bar; on rank 0."""
        return ""

    def report(self) -> dict | None:
        """Figures of the run so far; collective."""
        return None

    def save(self, folder: Path) -> None:
        """Writes this stage's state into a checkpoint; called on one replica."""

    def load(self, folder: Path) -> None:
        """Takes over what a checkpoint holds."""


class Anchored(NoAnchor):
    """A run whose steps are corrected by priors, wherever they come from.

    Attributes:
        pending: priors that are there and not in use yet, by version.
        received_version: of the newest prior that the optimizer was given.
        num_batches: of the anchor's data, used for the priors so far.
        reference: what the anchor holds of the weights, by name, and of which version, where a run is continued.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self.config, self.spectral = self.args.anchor_config(), self.args.spectral_config()
        self.named = self.engine.parts.stored_trainable()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.named}
        self.optimizer: SpectralCorrection | None = None
        self.engine.anchor_plan, self._share_corrected = plan_anchor(
            self.engine, self.config, self.spectral, self.shapes
        )
        self.calibrates = self.args.calibrated_by_anchor
        self.fitting = Fitting(self.engine, self.args)
        self.forget()

    def forget(self) -> None:
        """Begins anew: a further run counts its steps from the start, and chooses what it was not given."""
        self._set_interval(self.args.anchor_every)
        self.history = AnchorHistory()
        self.pending: dict[int, Prior] = {}
        self.received_version, self.num_batches = NO_VERSION, 0
        self.reference: tuple[int, dict[str, Tensor]] | None = None
        self.fitting.forget()
        if self.optimizer is not None:
            self.optimizer.priors = Priors(self.named, self.spectral)
            self.optimizer.num_live_steps, self.optimizer.stepped_version = 0, None

    def _set_interval(self, anchor_every: int | None) -> None:
        """None: it is chosen after the first step."""
        self.config = replace(self.config, anchor_every=anchor_every)
        self.schedule = self.config.schedule
        self.engine.anchor_plan = replace(self.engine.anchor_plan, anchor_every=anchor_every or LEAST_CHOSEN)

    # Steps -----------------------------------------------------------------------------------------------------------

    def corrected(self, optimizer):
        if self.optimizer is None:
            try:
                self.optimizer = optimizer = SpectralCorrection(optimizer, self.named, self.spectral)
            except NotImplementedError as error:
                default = "preset=paper has an anchor by default" if self.args.anchor is None else "anchor=True"
                raise NotImplementedError(f"{default}: {error}, or set anchor=False") from None
        self.forget()
        return optimizer

    def begin_step(self, step):
        self.optimizer.num_steps = step  # of the run: its checkpoint may be of a run without an anchor
        every = self.trainer.state.logging_steps  # 0 where logging_strategy=no says so
        self.optimizer.measures = every > 0 and (step + 1) % every == 0

    def weights(self) -> dict[str, Tensor]:
        """What a snapshot is of, by name, not copied: the weights that the replicas last agreed on.

        Those of the model, unless replicas step apart; then they are the outer model's, each part as of its last outer
        step.
        """
        with self.engine.outer_weights():
            return {name: parameter.detach() for name, parameter in self.named}

    def one_step(self):
        return self.optimizer.one_step()

    def receive(self, prior: Prior) -> None:
        """Gives the optimizer a prior, checked already, which it takes in over the coming steps."""
        coefficient = 1.0
        if self.spectral.adds_prior and self.args.max_grad_norm:
            coefficient = clip_coefficient(prior.gradient_norm, self.args.max_grad_norm)
        self.optimizer.priors.receive(
            prior.values, prior.version, prior.version, clip_coefficient=coefficient, checked=True
        )
        self.received_version = prior.version
        self.fitting.apply(prior)

    def end_step(self):
        version = self.optimizer.priors.version
        if version is not None and version != self.history.applied_version:
            self.history.applied(version)
        self.history.stepped(self.optimizer.num_steps - 1, live=self.optimizer.metrics()["weight"] > 0)
        if self.config.anchor_every is None:
            self._set_interval(chosen_interval(self.trainer, self.config, self.spectral))
        if self.history.num_steps == 1 and self.config.deterministic and self.engine.topology.rank == 0:
            lengths = self.trainer.state.max_steps, self.config.anchor_every, self.spectral.refresh_steps
            if warning := unused_warning(*lengths):
                logger.warning(warning)

    # Figures ---------------------------------------------------------------------------------------------------------

    def logs(self):
        """`prior_weight`; `prior_age_steps` and `prior_version`, the step of its snapshot, once there is a prior;
        `share_corrected` of the model's gradient entries; in a corrected step `gradient_in_prior`, the share of the
        gradients' energy in the prior's subspace, and `gradient_prior_cosine`. Collective."""
        metrics = self.optimizer.metrics()
        logs = {"prior_weight": metrics["weight"]}
        logs |= {name: metrics[name] for name in ("prior_age_steps", "prior_version") if name in metrics}
        logs["share_corrected"] = self._share_corrected if metrics["weight"] > 0 else 0.0
        alignment = self.engine.sum_over_ranks(self.optimizer.alignment or [0.0] * 4)
        energy, inside, product, prior = alignment
        if energy and prior:
            logs |= {"gradient_in_prior": inside / energy, "gradient_prior_cosine": product / (energy * prior) ** 0.5}
        return logs

    def phase(self):
        metrics = self.optimizer.metrics()
        if "prior_version" not in metrics:
            return "no prior yet"
        return "its priors are in use" if metrics["weight"] else "its prior is not in use: too old, or being taken in"

    def status(self):
        metrics = self.optimizer.metrics()
        if "prior_version" not in metrics:
            return self.phase()
        return f"prior of step {metrics['prior_version']}, {metrics['prior_age_steps']} steps old"

    def report(self):
        history, traffic = self.history, self.engine.anchor_plan.traffic
        return self.engine.from_judge(
            {
                "rule": self.spectral.rule,
                "anchor_every": self.config.anchor_every,
                "anchor_every_chosen": self.args.anchor_every is None,
                "effective_anchor_every": history.effective_anchor_every,
                "num_snapshots": history.num_snapshots,
                "num_priors": history.num_applied,
                "num_steps": history.num_steps,
                "num_live_steps": history.num_live_steps,
                "mean_prior_age_steps": history.mean_age_steps,
                "snapshot_bytes": sum(traffic.snapshot_bytes),
                "prior_bytes": sum(traffic.prior_bytes),
                "num_calibrations": self.fitting.num_applied,
                "calibration_bytes": sum(traffic.fit_bytes),
            }
        )

    # State -----------------------------------------------------------------------------------------------------------

    def save(self, folder):
        tensors, plain = self.optimizer.spectral_state()
        state = AnchorState(
            spectral=(tensors, plain),
            pending=self.pending if self.config.deterministic else {},
            reference=self.reference_now(),
            plain={
                "anchor_every": self.config.anchor_every,
                "history": self.history.state_dict(),
                "received_version": self.received_version,
                "num_batches": self.num_batches,
                "fitting": self.fitting.state(self.pending.values()),
            },
        )
        save_anchor_files(folder, self.engine.topology.stage, state)

    def reference_now(self) -> tuple[int, dict[str, Tensor]] | None:
        """What `reference` would have to be to continue from here; None where the next snapshot will be whole."""
        return None

    def load(self, folder):
        state = load_anchor_files(folder, set(self.shapes), self.fitting.boundaries)
        if state is None:
            logger.warning("%s was written without an anchor: there is no prior until the first one comes", folder)
            return
        self.optimizer.load_spectral_state(*state.spectral)
        if self.args.anchor_every is None:
            self._set_interval(state.plain.get("anchor_every", LEAST_CHOSEN))
        self.history.load_state_dict(state.plain["history"])
        self.received_version, self.num_batches = state.plain["received_version"], state.plain["num_batches"]
        self.reference = state.reference
        for prior in state.pending.values():
            self.optimizer.priors.check(prior.values, prior.version)
        self.pending = self.fitting.load_state(state.plain.get("fitting"), state.pending)
