"""Adaptive budgets: measures links and passes, and lets one rank choose the budget of every boundary for all.

Whatever the ranks measure is gathered, the slowest replica counts, rank 0 decides and the others take its numbers: two
machines need not agree in the last bit of a logarithm, only on the bytes that they exchange. Collective over all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .boundary.allocation import Curve, StepTime, allocate_budgets, budget_grid, distortion_curve
from .boundary.fitting import BoundaryFit
from .devices import finish_kernels
from .metering import exchange_json
from .probing import measure_links

if TYPE_CHECKING:
    from .engine import MeshEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workload:
    """A step as the calibration saw it.

    Attributes:
        rows: rows per replica and accumulation step.
        length: mean padded tokens of a row.
        accumulation: accumulation steps of an optimizer step.
        busy_seconds: computation of this rank in one accumulation step.
    """

    rows: int
    length: int
    accumulation: int
    busy_seconds: float


class PassTimer:
    """Times for how long this rank is busy, not waiting for others, in the passes of a calibration."""

    def __init__(self, engine: MeshEngine):
        self.engine, self.seconds = engine, []

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Times one pass over a batch."""
        meter = self.engine.step_meter
        started, waited = time.monotonic(), meter.wait_seconds
        yield
        finish_kernels(self.engine.device)
        self.seconds.append(time.monotonic() - started - (meter.wait_seconds - waited))

    def busy_seconds(self) -> float:
        """Computation of one rank in one accumulation step.

        The median pass: the first sets buffers up. Uncoded, so that coding is left out; over NCCL torch's own schedules
        do not tell waits, which then count as computation. The emulated mesh takes its ranks to be equally fast.
        """
        if self.engine.busy_seconds is not None:
            return self.engine.busy_seconds
        mesh = self.engine.mesh
        return max(0.0, statistics.median(self.seconds)) / (mesh.num_ranks if mesh.emulated else 1)


def adapt_budgets(
    engine: MeshEngine, fits: dict[int, BoundaryFit], energies: dict[int, float], work: Workload
) -> None:
    """Chooses a budget for every boundary and sets it, so that a predicted step fits in the target.

    Computation is predicted as that of the busiest rank, stretched by the pipeline's bubble, (S - 1) / (M V) for S
    stages, M microbatches and V chunks per rank; gradient synchronisation and the optimizer are left out.

    Args:
        fits, energies: fit and gradient energy of the boundary before each receiving chunk of this rank.
        work: of this rank.
    """
    boundary, mesh = engine.boundary, engine.mesh
    grid = budget_grid(boundary.budget)
    hidden_size = engine.parts.layout.hidden_size
    measured = boundary.link_bits_per_second is None
    facts = {
        "busy": work.busy_seconds,
        "rates": measure_links(engine) if measured else [],
        "distortions": [
            [chunk - 1, distortion_curve(boundary, fit, energies[chunk], hidden_size, work.length, grid)]
            for chunk, fit in fits.items()
        ],
    }
    everyone = [facts]
    if engine.groups is not None:
        with engine.naming("the measurements for budgets from"):
            everyone = exchange_json(facts, engine.groups.save)
    step = step_time(engine, everyone, work)
    # Replicas hold the same fits up to rounding: the first counts.
    distortions = dict(pair for facts in reversed(everyone) for pair in facts["distortions"])
    sizes = [sent_bytes(engine, work, budget) for budget in grid]
    curves = [Curve(grid, sizes, distortions[index]) for index in range(mesh.num_boundaries)]
    budgets = torch.tensor(allocate_budgets(curves, step, boundary.target_step_seconds), dtype=torch.float64)
    if engine.groups is not None:
        with engine.naming("the budgets from", [0]):
            dist.broadcast(budgets, group=engine.groups.save, group_src=0)
    engine.set_budgets(tuple(budgets.tolist()))
    if engine.topology.rank == 0:
        report(engine, work, step)


def step_time(engine: MeshEngine, everyone: list[dict], work: Workload) -> StepTime:
    """The model of a step, out of what all ranks measured: the slowest rank and replica count."""
    mesh, given = engine.mesh, engine.boundary.link_bits_per_second
    rates: dict[tuple[int, int], float] = {}
    for link, way, seconds in (rate for facts in everyone for rate in facts["rates"]):
        rates[link, way] = max(seconds, rates.get((link, way), 0.0))
    by_boundary = [
        tuple(rates[index % mesh.stages, way] if given is None else 8.0 / given for way in (0, 1))
        for index in range(mesh.num_boundaries)
    ]
    bubble = (mesh.stages - 1) / (mesh.microbatches * mesh.chunks_per_rank)
    busy = max(facts["busy"] for facts in everyone)
    return StepTime(
        fixed_seconds=work.accumulation * busy * (1.0 + bubble),
        seconds_per_byte=by_boundary,
        microbatches=mesh.microbatches,
        accumulation=work.accumulation,
        stages=mesh.stages,
    )


def sent_bytes(engine: MeshEngine, work: Workload, budget: float) -> tuple[int, int]:
    """Bytes of one microbatch over a boundary of this budget, forward and backward."""
    config = replace(engine.boundary, budget=budget, budgets=None)
    rows, hidden_size = work.rows // engine.mesh.microbatches, engine.parts.layout.hidden_size
    return tuple(rows * config.sequence_bytes(work.length, hidden_size, way) for way in ("forward", "backward"))


def report(engine: MeshEngine, work: Workload, step: StepTime) -> None:
    """Logs the budgets in force, once for all ranks; warns where even the floors are too slow."""
    boundary = engine.boundary
    seconds = step.seconds([sent_bytes(engine, work, budget) for budget in boundary.budgets])
    megabits = [[8e-6 / rate for rate in rates] for rates in step.seconds_per_byte]
    logger.info(
        "Boundary budgets: %s; a step takes %.3g s (target %g s), of which %.3g s computation; links in Mbit/s, forward "
        "and backward: %s",
        ", ".join(f"{budget:.3g}" for budget in boundary.budgets), seconds, boundary.target_step_seconds,
        step.fixed_seconds, ", ".join(f"{forward:.4g} {backward:.4g}" for forward, backward in megabits),
    )  # fmt: skip
    if seconds > boundary.target_step_seconds:
        logger.warning(
            "boundary_target_step_seconds=%g: a step takes %.3g s with boundary_budget=%g already, which all boundaries "
            "keep. Allow more time, or lower boundary_budget",
            boundary.target_step_seconds, seconds, boundary.budget,
        )  # fmt: skip
