"""Fits the fast circuit's boundaries on what the anchor's own passes see at the same cuts, held-out check included.

A calibration looks at the passes of one version alone, so that it is of one model, and depends on nothing but the weights
and the place in the anchor's data: it can be resumed. Where the batches of a prior are too few tokens it takes more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..anchor.attachment import Attachment, detach
from ..anchor.messages import Message
from ..anchor.schedule import NO_VERSION
from ..boundary.observer import Observer
from ..calibration import HELD_OUT_EVERY, fit_of
from .fits import Fit, boundaries_of, to_tensors, to_wire

if TYPE_CHECKING:
    from ..engine import MeshEngine

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]


class NoFits:
    """In the place of a `Calibrator` where no process holds all stages: fits nothing, and says so."""

    wants_more = False

    def take(self, message: Message) -> None:
        if detach(message) is not None:
            logger.warning(
                "an anchor of several processes does not calibrate the boundaries: they stay as the mesh calibrated them. "
                "Set anchor_calibrates=False for the fast circuit, which then repeats that, or launch one process"
            )

    def begin(self, version: int) -> bool:
        return False

    def tensors_by_stage(self, version: int) -> dict[int, Tensors]:
        return {}


class Calibrator:
    """Looks at the passes of the anchor, whose process holds all stages.

    Args:
        engine: of that process.
        gradients: one pass: (weights, batch) to gradients.
        num_tokens: that a calibration looks at, at least, unless the data has fewer.
        max_passes: what is in the data once; rows that were seen before tell nothing new.

    Attributes:
        attachment: what the fast circuit told; None: it wants no fits.
        version: that the newest fits belong to.
    """

    def __init__(
        self, engine: MeshEngine, gradients: Callable[[Tensors, Any], Tensors], num_tokens: int, max_passes: float
    ):
        self._engine, self._gradients = engine, gradients
        self._num_tokens, self._max_passes = num_tokens, max_passes
        self._observers: dict[int, Observer] = {}
        self._tokens_seen = self._num_passes = 0
        self.set_up(None)

    def set_up(self, attachment: Attachment | None) -> None:
        """To be called when the fast circuit is there, anew for each attempt of it."""
        self.attachment = attachment
        self.version = NO_VERSION if attachment is None else attachment.version
        self._observers = {}

    def take(self, message: Message) -> None:
        """What came with a snapshot.

        Raises:
            MessageError: it is not what is expected.
        """
        attachment = detach(message)
        if attachment is not None:
            self.set_up(attachment)

    def begin(self, version: int) -> bool:
        """Whether fits are due with this version; then `gradients` looks at what passes, until `fits`."""
        self._observers, self._tokens_seen, self._num_passes = {}, 0, 0
        if self.attachment is None:
            return False
        if self.version != NO_VERSION and version - self.version < self.attachment.every:
            return False
        engine, features = self._engine, self.attachment.features
        features = None if features is None else features.to(engine.device)
        self._observers = {
            chunk: Observer(engine.parts.layout.hidden_size, features, engine.device)
            for chunk, stage in engine.parts.stages.items()
            if stage.receive is not None
        }
        return True

    @property
    def wants_more(self) -> bool:
        """Too few tokens were seen, or none were held out to check the token predictor."""
        unchecked = self.attachment.features is not None and self._num_passes < 2
        return self._num_passes < self._max_passes and (self._tokens_seen < self._num_tokens or unchecked)

    def gradients(self, weights: Tensors, batch: Any) -> Tensors:
        """One pass that is looked at."""
        stages = self._engine.parts.stages
        for chunk, observer in self._observers.items():
            # How many passes there will be is not known, so the second is held out and not the last.
            observer.held_out = self._num_passes % HELD_OUT_EVERY == 1
            stages[chunk].observer = observer
        try:
            gradients = self._gradients(weights, batch)
        finally:
            for chunk in self._observers:
                stages[chunk].observer = None
        self._num_passes += 1
        self._tokens_seen += batch["labels"].numel()
        return gradients

    def fits(self, version: int) -> dict[int, Fit]:
        """Fits of all boundaries as they travel, by receiving chunk; none where none are due or what was seen is no use."""
        observers, self._observers = self._observers, {}
        fits = {}
        for chunk, observer in observers.items():
            moments = observer.moments()
            if not all(bool(tensor.isfinite().all()) for tensor in moments.tensors()) or not moments.num_tokens:
                logger.warning("no calibration with step %d: hidden states or gradients are not finite", version)
                return {}
            fits[chunk] = to_wire(fit_of(moments, self._engine.boundary).state(), self._engine.boundary)
        if fits:
            self.version = version
            shares = ", ".join(f"chunk {chunk}: {float(fit['explained']):.2f}" for chunk, fit in fits.items())
            logger.info(
                "Boundaries calibrated on %d tokens by the anchor with the weights of step %d; token predictor explains %s",
                self._tokens_seen, version, shares,
            )  # fmt: skip
        return fits

    def tensors_by_stage(self, version: int) -> dict[int, Tensors]:
        """`fits` for the link: what each stage must know of it."""
        fits, mesh = self.fits(version), self._engine.mesh
        if not fits:
            return {}
        return {
            stage: to_tensors({chunk: fits[chunk] for chunk in boundaries_of(stage, mesh)})
            for stage in range(mesh.stages)
        }
