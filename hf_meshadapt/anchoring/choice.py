"""Which part of the anchor circuit a trainer has."""

from __future__ import annotations

from .base import NoAnchor
from .emulated import EmulatedAnchor
from .launch import AnchorLaunch
from .linked import LinkedAnchor


def make_anchoring(trainer) -> NoAnchor:
    """By the trainer's arguments and its mesh."""
    if not trainer.args.anchor:
        return NoAnchor(trainer)
    if trainer.args.runs_anchor:
        return AnchorLaunch(trainer)
    sync = trainer.engine.data_parallel
    if sync.steps_apart:
        raise NotImplementedError(
            f"anchor=True with dp_sync={sync.sync!r}: the weights of replicas that step apart differ, and a snapshot has "
            "those of one. Use a dp_sync that averages gradients in every step"
        )
    return EmulatedAnchor(trainer) if trainer.engine.mesh.emulated else LinkedAnchor(trainer)
