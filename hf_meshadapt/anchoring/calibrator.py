"""Fits the fast circuit's boundaries on what the anchor's own passes see at the same layers, held-out check included.

A calibration looks at the passes of one version alone, so that it is of one model, and depends on nothing but the weights
and the place in the anchor's data: it can be resumed. Where the batches of a prior are too few tokens it takes more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..anchor.attachment import Attachment, detach
from ..anchor.messages import Message, MessageError
from ..anchor.schedule import NO_VERSION
from ..boundary.observer import Observer
from ..boundary.statistics import BoundaryMoments
from ..calibration import HELD_OUT_EVERY, fit_of
from .fits import REMEDY, Fit, boundaries_of, to_tensors, to_wire

if TYPE_CHECKING:
    from ..engine import MeshEngine

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]


class Calibrator:
    """Looks at the passes of the anchor, where boundaries of the fast circuit lie within the layers of this process.

    Every process of an anchor has one. They are told the same and read the same, so that each knows by itself what all of
    them do next.

    Args:
        engine: of this process.
        gradients: one pass: (weights, batch) to gradients.
        num_tokens: that a calibration looks at, at least, unless the data has fewer.
        max_passes: what is in the data once; rows that were seen before tell nothing new.
        gather: brings the fits of all processes to the first; others get none.

    Attributes:
        attachment: what the fast circuit told; None: it wants no fits.
        version: that the newest fits belong to.
    """

    def __init__(
        self,
        engine: MeshEngine,
        gradients: Callable[[Tensors, Any], Tensors],
        num_tokens: int,
        max_passes: float,
        gather: Callable[[dict[int, Fit]], dict[int, Fit]] = lambda fits: fits,
    ):
        self._engine, self._gradients, self._gather = engine, gradients, gather
        self._num_tokens, self._max_passes = num_tokens, max_passes
        self._tokens_seen = self._num_passes = 0
        self.set_up(None)

    def set_up(self, attachment: Attachment | None) -> None:
        """To be called when the fast circuit is there, anew for each attempt of it."""
        self.attachment = attachment
        self.version = NO_VERSION if attachment is None else attachment.version
        self._due = False
        self._observers: dict[int, Observer] = {}

    def take(self, message: Message) -> None:
        """What came with a snapshot.

        Raises:
            MessageError: it is not what is expected.
        """
        attachment = detach(message)
        if attachment is None:
            return
        num_layers, boundary = self._engine.parts.layout.num_layers, self._engine.boundary
        if attachment.cuts[-1] >= num_layers or not boundary.needs_calibration:
            raise MessageError(
                f"the fast circuit asks for fits of boundaries before layers {list(attachment.cuts)}; the anchor has "
                f"{num_layers} layers and codec {boundary.codec!r}, predictor {boundary.predictor!r}: {REMEDY}"
            )
        self.set_up(attachment)

    def begin(self, version: int) -> bool:
        """Whether fits are due with this version; then `gradients` looks at what passes, until `fits`."""
        self._observers, self._tokens_seen, self._num_passes = {}, 0, 0
        told, engine = self.attachment, self._engine
        self._due = told is not None and (self.version == NO_VERSION or version - self.version >= told.every)
        if not self._due:
            return False
        features = None if told.features is None else told.features.to(engine.device)
        self._observers = {
            chunk: Observer(engine.parts.layout.hidden_size, features, engine.device)
            for chunk, layer in enumerate(told.cuts, start=1)
            if any(layer in stage.span for stage in engine.parts.stages.values())
        }
        return True

    @property
    def wants_more(self) -> bool:
        """Too few tokens were seen, or none were held out to check the token predictor."""
        unchecked = self.attachment.features is not None and self._num_passes < 2
        return self._num_passes < self._max_passes and (self._tokens_seen < self._num_tokens or unchecked)

    def gradients(self, weights: Tensors, batch: Any) -> Tensors:
        """One pass that is looked at."""
        for observer in self._observers.values():
            # How many passes there will be is not known, so the second is held out and not the last.
            observer.held_out = self._num_passes % HELD_OUT_EVERY == 1
        self._look_by(self._observers)
        try:
            gradients = self._gradients(weights, batch)
        finally:
            self._look_by({})
        self._num_passes += 1
        self._tokens_seen += batch["labels"].numel()
        return gradients

    def _look_by(self, observers: dict[int, Observer]) -> None:
        before = {self.attachment.cuts[chunk - 1]: observer for chunk, observer in observers.items()}
        for stage in self._engine.parts.stages.values():
            stage.observers = {layer: observer for layer, observer in before.items() if layer in stage.span}

    def fits(self, version: int) -> dict[int, Fit]:
        """Fits of all boundaries as they travel, by receiving chunk; none where none are due or what was seen is no use.

        Collective over the processes of the anchor where fits are due; only the first gets them.
        """
        if not self._due:
            return {}
        self._due, boundary = False, self._engine.boundary
        observers, self._observers = self._observers, {}
        moments = {chunk: observer.moments() for chunk, observer in observers.items()}
        if not all(self._engine.share({chunk: is_useful(seen) for chunk, seen in moments.items()}).values()):
            logger.warning("no calibration with step %d: hidden states or gradients are not finite", version)
            return {}
        self.version = version
        fits = self._gather({c: to_wire(fit_of(seen, boundary).state(), boundary) for c, seen in moments.items()})
        if fits:
            shares = ", ".join(f"chunk {chunk}: {float(fit['explained']):.2f}" for chunk, fit in fits.items())
            logger.info(
                "Boundaries calibrated on %d tokens by the anchor with the weights of step %d; token predictor explains %s",
                self._tokens_seen, version, shares,
            )  # fmt: skip
        return fits

    def tensors_by_stage(self, version: int) -> dict[int, Tensors]:
        """`fits` for the link: what each stage of the fast circuit must know of it."""
        fits, told = self.fits(version), self.attachment
        if not fits:
            return {}
        return {
            stage: to_tensors({chunk: fits[chunk] for chunk in boundaries_of(stage, told.num_stages, told.num_chunks)})
            for stage in range(told.num_stages)
        }


def is_useful(moments: BoundaryMoments) -> bool:
    """A boundary can be fitted to them."""
    return moments.num_tokens > 0 and all(bool(tensor.isfinite().all()) for tensor in moments.tensors())
