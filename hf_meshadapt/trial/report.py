"""A trial's figures as a table, a JSON file and a picture."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from ..checkpoint_folder import write_json
from ..extras import how_to_install
from ..loss_curve import draw_curves
from .comparison import Recommendation, RentedMesh, RunFigures, gap_closed, losses_in_equal_time

logger = logging.getLogger(__name__)

AXES = ("pipeline", "calibration", "tied", "data_parallel", "control")


def results_table(runs: list[RunFigures], mesh: RentedMesh) -> Table:
    """One column for each run; the first is dense."""
    dense = runs[0]
    before = dense.held_out[0][1]
    gaps = [gap_closed(before, dense.loss, run.loss) for run in runs]
    rate = f"{mesh.bits_per_second / 1e6:g} Mbit/s"
    table = Table(
        title=f"{mesh.stages} stages x {mesh.replicas} replicas, {dense.num_steps} steps over the same rows",
        caption="bytes (share of dense) and seconds are planned",
    )
    table.add_column("")
    for run in runs:
        table.add_column(run.recipe.name, justify="right")
    table.add_row("held-out loss before", *[f"{before:.4f}" for _ in runs])
    table.add_row("held-out loss after", *[f"{run.loss:.4f}" for run in runs])
    table.add_row("gap closed", *["-" if gap is None else f"{gap:.2f}" for gap in gaps], end_section=True)
    by_axis = {axis: [run.bytes_per_token.get(axis, 0.0) for run in runs] for axis in AXES}
    by_axis["total"] = [sum(counts) for counts in zip(*by_axis.values())]
    for axis, counts in by_axis.items():
        if any(counts):
            table.add_row(f"bytes/token, {axis}", *[bytes_cell(count, counts[0]) for count in counts])
    table.add_section()
    table.add_row("passes, s/step", *[f"{mesh.compute_seconds(run):.3g}" for run in runs])
    table.add_row(f"link, s/step at {rate}", *[f"{mesh.link_seconds(run):.3g}" for run in runs])
    table.add_row("step, s", *[f"{mesh.step_seconds(run):.3g}" for run in runs])
    losses = losses_in_equal_time(runs, mesh)
    table.add_row("held-out loss in equal time", *[f"{losses[run.recipe.name]:.4f}" for run in runs])
    return table


def bytes_cell(count: float, dense_count: float) -> str:
    text = f"{count:,.0f}" if count >= 10 or not count else f"{count:.2g}"
    return text + (f" ({count / dense_count:.1%})" if dense_count else "")


def results(runs: list[RunFigures], mesh: RentedMesh, recommendation: Recommendation) -> dict:
    """Everything that the table shows and the curves, JSON-able."""
    dense = runs[0]
    losses = losses_in_equal_time(runs, mesh)
    rows = [
        asdict(run)
        | {
            "name": run.recipe.name,
            "num_steps": run.num_steps,
            "loss_before": run.held_out[0][1],
            "loss_after": run.loss,
            "gap_closed": gap_closed(dense.held_out[0][1], dense.loss, run.loss),
            "planned_compute_seconds": mesh.compute_seconds(run),
            "planned_link_seconds": mesh.link_seconds(run),
            "planned_step_seconds": mesh.step_seconds(run),
            "loss_in_equal_time": losses[run.recipe.name],
        }
        for run in runs
    ]
    return {"mesh": asdict(mesh), "runs": rows, "recommendation": asdict(recommendation)}


def write_results(folder: Path, figures: dict, runs: list[RunFigures]) -> list[Path]:
    """Writes `try.json` and, where matplotlib is installed, `curves.png`; returns what it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "try.json"]
    write_json(written[0], figures)
    try:
        draw_curves(
            {run.recipe.name: run.held_out for run in runs}, folder / "curves.png", "held-out loss (nats per token)"
        )
    except ImportError:
        logger.warning("no curves.png without matplotlib: %s", how_to_install("hub"))
        return written
    return [*written, folder / "curves.png"]
