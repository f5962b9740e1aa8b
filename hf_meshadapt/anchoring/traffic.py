"""What an anchor costs the mesh's links: the interval that keeps its budget, and warnings, with figures."""

from __future__ import annotations

import logging

import torch

from ..anchor.budget import bytes_warning, choose_interval, longest_interval
from ..anchor.config import AnchorConfig
from ..anchor.schedule import interval_warning
from ..planner import BytePlan
from ..spectral.config import SpectralConfig

logger = logging.getLogger(__name__)


def chosen_interval(trainer, config: AnchorConfig, spectral: SpectralConfig) -> int:
    """Chooses `anchor_every` by the batches of the step that was taken, and says so; collective, the same on all ranks.

    Replicas pad their batches apart from each other, one process pads all of them alike: the longest counts.
    """
    engine = trainer.engine
    length = int(engine.gather_over_replicas(torch.tensor([trainer._batch_length])).max())
    plan = _plan(trainer, length)
    traffic, dense_bytes, replicas = plan.anchor.traffic, plan.dense().axis_bytes("pipeline"), engine.mesh.replicas
    longest = longest_interval(spectral.max_staleness, spectral.refresh_steps)
    every = engine.from_first(choose_interval(traffic, dense_bytes, config.budget, longest, replicas))
    if engine.topology.rank == 0:
        anchor_bytes = traffic.bytes_per_step(every, replicas)
        what = "there is no pipeline to compare snapshots and priors with"
        if dense_bytes:
            share = anchor_bytes / dense_bytes
            what = f"snapshots and priors take {share:.0%} of what the pipeline would send uncoded"
        logger.info("anchor_every=%d: %s", every, what)
        warning = bytes_warning(anchor_bytes, dense_bytes, every, config.budget, spectral.max_staleness)
        if warning is not None and not engine.mesh.emulated:  # where nothing is sent
            logger.warning(warning)
    return every


def warn_of_traffic(trainer, num_steps: int) -> None:
    """To be called once, at the first log: the rate limit does not let snapshots follow each other as fast as
    `anchor_every` asks, or what they and priors take at a given one is much beside the pipeline. Collective, as plans are.

    Args:
        num_steps: that this run has taken.
    """
    engine, args = trainer.engine, trainer.args
    plan = _plan(trainer, trainer._batch_length)
    every, warnings = plan.anchor.anchor_every, []
    if args.anchor_every is not None:  # of a chosen one `chosen_interval` has told
        warnings.append(bytes_warning(plan.axis_bytes("anchor"), plan.dense().axis_bytes("pipeline"), every))
    rate, step_seconds = args.anchor_rate_bits_per_second, engine.ledger.run.seconds / max(1, num_steps)
    if rate is not None and step_seconds:
        warnings.append(interval_warning(plan.anchor.traffic, every, step_seconds, rate))
    for warning in warnings:
        if warning is not None and engine.topology.rank == 0:
            logger.warning(warning)


def _plan(trainer, length: int) -> BytePlan:
    return trainer.engine.plan(trainer._rows(training=True), length, trainer.args.gradient_accumulation_steps)
