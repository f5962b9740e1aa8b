"""Which part of the anchor circuit a trainer has."""

from __future__ import annotations

import logging

from .base import NoAnchor
from .data import can_read
from .emulated import EmulatedAnchor
from .launch import AnchorLaunch
from .linked import LinkedAnchor

logger = logging.getLogger(__name__)


def make_anchoring(trainer) -> NoAnchor:
    """By the trainer's arguments and its mesh."""
    if not trainer.args.has_anchor:
        return NoAnchor(trainer)
    by_default = trainer.args.anchor is None
    if by_default and trainer.train_dataset is not None and not can_read(trainer.train_dataset):
        logger.warning(
            "preset=paper trains without its anchor: train_dataset can be read once only, and that reads it by itself"
        )
        return NoAnchor(trainer)
    if trainer.args.runs_anchor:
        return AnchorLaunch(trainer)
    return EmulatedAnchor(trainer) if trainer.engine.mesh.emulated else LinkedAnchor(trainer)
