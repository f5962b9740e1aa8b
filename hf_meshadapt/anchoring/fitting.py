"""The fast circuit's side of a calibration by the anchor: how often, what it takes, and what a checkpoint keeps of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..anchor.attachment import Attachment
from ..anchor.schedule import NO_VERSION
from ..boundary.predictor import num_features
from ..calibration import set_fit
from ..mesh_checkpoint import fitted_for, layers_of
from .fits import boundaries_of, check_fits, fit_bytes
from .prior import Prior

if TYPE_CHECKING:
    from ..engine import MeshEngine

logger = logging.getLogger(__name__)


class Fitting:
    """Sets the fits that come with priors at the ends of boundaries that are here.

    Args:
        engine: of the fast circuit.
        args: `MeshAdaptArguments`.

    Attributes:
        boundaries: receiving chunks of the boundaries that end here.
        num_applied: versions that brought fits.
        version: the newest of them.
    """

    def __init__(self, engine: MeshEngine, args):
        self._engine, self._args = engine, args
        self._calibrates = args.calibrated_by_anchor
        stages = range(engine.mesh.stages) if engine.mesh.emulated else [engine.topology.stage]
        self.boundaries = sorted({chunk for stage in stages for chunk in self._boundaries_of(stage)})
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        self.num_applied, self.version = 0, NO_VERSION

    def start(self, pending: Iterable[Prior]) -> Attachment:
        """To be called once the boundaries are calibrated for the first time: plans the bytes, says what an anchor must
        know."""
        engine, mesh = self._engine, self._engine.mesh
        size = fit_bytes(engine.boundary, engine.parts.layout.hidden_size, num_features(engine.features))
        self._every = self._interval(size)
        stage_bytes = tuple(size * len(self._boundaries_of(stage)) for stage in range(mesh.stages))
        traffic = replace(engine.anchor_plan.traffic, fit_bytes=stage_bytes, calibration_every=self._every)
        engine.anchor_plan = replace(engine.anchor_plan, traffic=traffic)
        return self.attachment(pending)

    def _boundaries_of(self, stage: int) -> list[int]:
        return boundaries_of(stage, self._engine.mesh.stages, self._engine.mesh.num_chunks)

    def _interval(self, size: int) -> int:
        """Optimizer steps between calibrations: as asked for, or so many that fits cost as much of the coded boundaries'
        bytes as the mesh's own calibrations would (`calibration.calibration_interval`)."""
        engine, given = self._engine, self._args.calibration_every
        if given is not None or engine.calibration_interval is None:
            return given or 1
        # Of one boundary: its two ends on every replica; activations and gradients of a pass of the mesh.
        sent_bytes = 2 * size * engine.mesh.replicas
        token_bytes = 2 * engine.parts.layout.hidden_size * engine.boundary.wire_bytes
        share = sent_bytes / (self._args.calibration_tokens * token_bytes)
        return max(1, math.ceil(engine.calibration_interval * share))

    def attachment(self, pending: Iterable[Prior]) -> Attachment:
        """What an anchor that comes now must know; `pending` are priors that are not in use yet."""
        cuts = tuple(span.start for span in self._engine.parts.spans[1:])
        return Attachment(self._every, self._newest(pending), cuts, self._engine.mesh.stages, self._engine.features)

    def _newest(self, pending: Iterable[Prior]) -> int:
        return max((prior.version for prior in pending if prior.fits), default=self.version)

    def check(self, prior: Prior) -> None:
        """Raises ValueError for fits that do not fit the boundaries here."""
        if prior.fits and not self._calibrates:
            raise ValueError(f"the prior of step {prior.version} brings fits of boundaries that nobody asked for")
        engine = self._engine
        sizes = engine.parts.layout.hidden_size, num_features(engine.features)
        check_fits(prior.fits, self.boundaries, engine.boundary, *sizes)

    def apply(self, prior: Prior) -> None:
        """Sets what came, for the passes to come; all ranks do so before the same step, or both ends would differ."""
        if not prior.fits:
            return
        for chunk, fit in prior.fits.items():
            set_fit(self._engine, chunk, {name: tensor.float() for name, tensor in fit.items()})
        self.num_applied += 1
        self.version = prior.version
        logger.info("boundaries are coded by what the anchor saw of the weights of step %d", prior.version)

    def state(self, pending: Iterable[Prior]) -> dict:
        """For a checkpoint, JSON-able."""
        return {"num_applied": self.num_applied, "version": self._newest(pending), "made_for": self._made_for()}

    def load_state(self, state: dict | None, pending: dict[int, Prior]) -> dict[int, Prior]:
        """Puts a saved state in place; returns the priors, without fits where boundaries are others now."""
        if self._calibrates and state is not None and state["made_for"] == self._made_for():
            self.num_applied, self.version = state["num_applied"], state["version"]
            return pending
        return {version: replace(prior, fits={}) for version, prior in pending.items()}

    def _made_for(self) -> list:
        return [layers_of(self._engine), fitted_for(self._engine.boundary)]
