"""The picture of a run's losses that its card shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CURVE_NAME = "loss_curve.png"


def loss_points(log_history: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of training and evaluation, out of `TrainerState.log_history`."""
    labels = {"loss": "training", "eval_loss": "evaluation"}
    points = {
        label: [(log["step"], log[key]) for log in log_history if log.get(key) is not None and "step" in log]
        for key, label in labels.items()
    }
    return {label: values for label, values in points.items() if values}


def draw_loss_curve(log_history: list[dict], path: Path) -> None:
    """Writes the curves as a PNG of 960 x 540 pixels; the same run gives the same file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no losses were logged.
    """
    points = loss_points(log_history)
    if not points:
        raise ValueError("log_history has no losses to draw")
    draw_curves(points, path)


def draw_curves(
    points: dict[str, Sequence[tuple[int, float]]], path: Path, label: str = "loss (nats per token)"
) -> None:
    """Writes curves of (step, loss), by what they are called, as a PNG of 960 x 540 pixels.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not pyplot: it would choose a backend and keep figures for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, values in points.items():
        steps, losses = zip(*values)
        axes.plot(steps, losses, label=name, marker="o" if len(values) < 30 else None, markersize=3)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
