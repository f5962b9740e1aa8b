"""Says once, with figures, when compressing what replicas exchange takes longer than sending it whole would. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .config import DataParallelConfig
from .data_parallel.clock import SyncClock
from .data_parallel.sizes import Shape
from .link_bytes import all_reduce_links
from .sync_plan import sync_links

if TYPE_CHECKING:
    from .planner import BytePlan

# The first steps set up memory and connections; the last one that is timed.
WARM_UP_STEPS, TIMED_STEPS = 3, 20
LEAST_SYNCS = 2


def whole(sync: DataParallelConfig) -> DataParallelConfig | None:
    """The same synchronisation with nothing compressed; None where that is what it is."""
    if not sync.steps_apart:
        return None if sync.sync == "allreduce" else replace(sync, sync="allreduce")
    return replace(sync, outer_wire="bfloat16") if sync.outer_wire in ("int8", "powersgd") else None


def rank_bytes(parts: Iterable[Iterable[Shape]], sync: DataParallelConfig, replicas: int, value_bytes: int) -> float:
    """Bytes per optimizer step that one rank sends to the other replicas.

    Args:
        parts: shapes of the parameters that are exchanged together.
        value_bytes: of a gradient, for the all-reduce.
    """
    parts, ranks = [tuple(shapes) for shapes in parts], list(range(replicas))
    if sync.sync == "allreduce":
        num_values = sum(math.prod(shape) for shapes in parts for shape in shapes)
        links = all_reduce_links("data_parallel", ranks, num_values * value_bytes)
    else:
        links = sync_links(ranks, parts, sync)
    return sum(link.bytes for link in links) / replicas


def cost_warning(
    sync: DataParallelConfig, where: str, compute_seconds: float, saved_bytes: float, seconds_per_byte: float
) -> str | None:
    """What to tell a person, None where compressing pays.

    Args:
        where: a rank, as messages name it.
        compute_seconds, saved_bytes: per optimizer step.
        seconds_per_byte: of the link.
    """
    saved_seconds = saved_bytes * seconds_per_byte
    if compute_seconds <= saved_seconds:
        return None
    remedy = "outer_wire='bfloat16'" if sync.steps_apart else "dp_sync='allreduce'"
    return (
        f"dp_sync={sync.sync!r} costs {where} more time than it saves: {compute_seconds:.3g} s of computation per step "
        f"for {saved_bytes / 1e6:.3g} MB that are not sent, {saved_seconds:.3g} s at the "
        f"{8e-6 / seconds_per_byte:.3g} Mbit/s that its link to the other replicas has shown. Use {remedy} on links as "
        "fast as these, or a lower matrix_rank"
    )


def tied_warning(plan: BytePlan) -> str | None:
    """What to tell a person where the gradient of a tied embedding, sent whole, is more than all boundaries send."""
    tied, pipeline = plan.axis_bytes("tied"), plan.axis_bytes("pipeline")
    if plan.data_parallel.sync != "allreduce" or tied <= pipeline:
        return None
    return (
        f"the gradient of the tied embedding takes {tied / 1e6:.3g} MB of every optimizer step, all boundaries together "
        f"{pipeline / 1e6:.3g} MB. On slow links set dp_sync='powersgd', which sends it in low rank, or "
        "tied_embeddings='freeze', which leaves it as it is; or take more tokens per step"
    )


class SyncCost:
    """Looks at a run's first steps.

    Args:
        sync: how replicas synchronise.
        clock: of this rank's synchronisations.
        saved_bytes: per optimizer step, that this rank does not send.
        where: this rank.
    """

    def __init__(self, sync: DataParallelConfig, clock: SyncClock, saved_bytes: float, where: str):
        self.sync, self.clock, self.saved_bytes, self.where = sync, clock, saved_bytes, where
        self.num_steps, self.done = 0, whole(sync) is None

    def end_step(self) -> str | None:
        """The warning, at one step of a run at most; to be called after every step."""
        self.num_steps += 1
        if self.num_steps == WARM_UP_STEPS:
            self.clock.reset()
        if self.done or self.num_steps < TIMED_STEPS or self.clock.num_syncs < LEAST_SYNCS:
            return None
        self.done = True
        if self.clock.seconds_per_byte is None:
            return None
        compute_seconds = self.clock.compute_seconds / (self.num_steps - WARM_UP_STEPS)
        return cost_warning(self.sync, self.where, compute_seconds, self.saved_bytes, self.clock.seconds_per_byte)
