"""Warnings, with figures, of an anchor that costs the mesh's links more than it should."""

from __future__ import annotations

import logging

from ..anchor.schedule import bytes_warning, interval_warning

logger = logging.getLogger(__name__)


def warn_of_traffic(trainer, num_steps: int) -> None:
    """To be called once, at the first log: the rate limit does not let snapshots follow each other as fast as
    `anchor_every` asks, or what they and priors take is much beside the pipeline. Collective, as plans are.

    Args:
        num_steps: that this run has taken.
    """
    engine, args = trainer.engine, trainer.args
    config = args.anchor_config()
    plan = engine.plan(trainer._rows(training=True), trainer._batch_length, args.gradient_accumulation_steps)
    warnings = [bytes_warning(plan.axis_bytes("anchor"), plan.dense().axis_bytes("pipeline"), config.anchor_every)]
    rate, step_seconds = config.rate_bits_per_second, engine.ledger.run.seconds / max(1, num_steps)
    if rate is not None and step_seconds:
        warnings.append(interval_warning(engine.anchor_plan.traffic, config.anchor_every, step_seconds, rate))
    for warning in warnings:
        if warning is not None and engine.topology.rank == 0:
            logger.warning(warning)
