"""The anchor of the emulated mesh: in the same process, exactly `anchor_every` steps late, by the same arithmetic."""

from __future__ import annotations

import logging

from ..anchor.circuit import norm, not_finite, run_passes
from ..anchor.snapshot import Layout, SnapshotEncoder
from ..spectral.compressor import GradientCompressor
from .base import Anchored
from .calibrator import Calibrator
from .data import refuse_unreadable
from .passes import AnchorPasses
from .prior import Prior

logger = logging.getLogger(__name__)


class EmulatedAnchor(Anchored):
    """Takes the anchor's part at the step of the snapshot and holds the prior back until it would have come.

    Args:
        exact: snapshots are the weights themselves, not what their transfer would have made of them.
    """

    def __init__(self, trainer, exact: bool = False):
        self.exact = exact
        super().__init__(trainer)
        if trainer.train_dataset is not None:
            refuse_unreadable(trainer.train_dataset)
        self.layout = Layout(self.shapes)
        self.passes = AnchorPasses(trainer)
        # Cold, since a distributed anchor that is started anew has no warm start either.
        self.compressor = GradientCompressor(self.spectral, warm=False)

    def start(self, dataloader):
        self.batches = self.passes.batches(dataloader, self.config.seed, self.num_batches)
        self.calibrator = None
        if self.calibrates:
            size = self.args.calibration_tokens, self.batches.num_per_epoch
            self.calibrator = Calibrator(self.engine, self.passes.gradients, *size)
            self.calibrator.set_up(self.fitting.start(self.pending.values()))
        self.encoder = SnapshotEncoder(stage=0, delta_bits=self.config.snapshot_bits, exact=True)
        if self.reference is not None:
            self.encoder.load_state_tensors(self.layout.state_tensors(*self.reference))

    def begin_step(self, step):
        super().begin_step(step)
        prior = self.pending.pop(self.schedule.due_version(step), None)
        if prior is not None:
            self.receive(prior)
        if self.schedule.snapshot_due(step, self.history.last_version, ()):
            self.history.took_snapshot(step)
            prior = self._answer(step)
            if prior is not None:
                self.pending[step] = prior
        # The anchor is another process of a mesh: its passes are no part of the step.
        self.engine.step_meter.start_step()

    def _answer(self, version: int) -> Prior | None:
        """What the anchor makes of a snapshot taken now."""
        weights = self.weights()
        if not self.exact:
            try:
                self.encoder.encode(version, weights)
            except ValueError as error:
                logger.warning("there is no snapshot of step %d: %s", version, error)
                return None
            weights = self.layout.unpack(self.encoder.reference)
        next_batch, one_pass, calibrator = self.batches.__next__, self.passes.gradients, self.calibrator
        gradients = run_passes(version, weights, next_batch, one_pass, self.config.anchor_batches, calibrator)
        self.num_batches = self.batches.num_taken
        broken = not_finite(gradients)
        if broken:
            logger.warning("no prior of step %d: gradients are not finite: %s", version, ", ".join(broken[:3]))
            return None
        fits = {} if calibrator is None else calibrator.fits(version)
        return Prior(version, norm(gradients), self.num_batches, self.compressor.compress(gradients), fits)

    def reference_now(self):
        if self.encoder.version is None:
            return None
        return self.encoder.version, self.layout.unpack(self.encoder.reference)
