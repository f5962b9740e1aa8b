"""Writes the tables of docs/spectral.md and docs/anchor_quality.png from the results: `python -m benchmarks.anchor_table`.

A test checks that the page says what the results say.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.quality_anchor import ALONE, CONFIGURATIONS, HEADLINE
from benchmarks.quality_table import CORPORA, marked

PAGE = Path(__file__).parents[1] / "docs" / "spectral.md"
PICTURE = PAGE.with_name("anchor_quality.png")
BEGIN, END = "<!-- anchor: python -m benchmarks.anchor_table -->\n", "<!-- anchor ends -->"
BEGIN_DIAGNOSIS, END_DIAGNOSIS = "<!-- diagnosis: python -m benchmarks.anchor_table -->\n", "<!-- diagnosis ends -->"
MASKS = "random masks at 0.95"
LABELS = {
    "dense": "dense",
    "mask95_zero": f"{MASKS}, zero fill",
    "mask95_mean": f"{MASKS}, mean fill",
    "mask95_mean_diagonal": f"{MASKS}, mean fill, `diagonal`",
    "mask95_mean_blend": f"{MASKS}, mean fill, `blend`",
    "anchor_only": "`anchor_only`: no gradients of the mesh at all",
    "transform": "`transform`, 5%",
    "transform_diagonal": "`transform`, 5%, `diagonal`",
    "transform_diagonal_calibrated": "`transform`, 5%, `diagonal`, calibrated by the anchor",
    "paper": f"`preset=paper`: {MASKS}, zero fill, `two_sided`",
}


def table(rows: list[dict]) -> str:
    """Markdown of the rows, best first within corpus and depth, where any of these has an anchor."""
    anchored = {(row["corpus"], row["stages"]) for row in rows if row["rule"] != "none"}
    told = {row["method"] for row in rows if row["rule"] != "none"}
    told |= {ALONE.get(method) for method in told} | {"dense", *HEADLINE}
    rows = [row for row in rows if (row["corpus"], row["stages"]) in anchored and row["method"] in told]
    rows = sorted(rows, key=lambda row: (list(CORPORA).index(row["corpus"]), row["stages"], row["loss_mean"]))
    columns = [
        "boundary and rule", "corpus", "stages", "K", "learning rate", "bytes: pipeline", "and anchor", "seeds",
        "held-out loss", "gap closed", "the anchor adds",
    ]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        label = LABELS.get(row["method"], f"`{row['method']}`")
        lines.append(f"| {' | '.join([label, *figures(row)])} |")
    return "\n".join(lines) + "\n"


def figures(row: dict) -> list[str]:
    """A row's cells; bytes over those that a dense pipeline of these stages sends."""
    share = row["runs"][0]["bytes_ratio_to_dense"]
    planned = row["bytes_per_token"]
    anchor = planned.get("anchor", 0.0) / (planned["pipeline"] / share)
    loss = f"{row['loss_mean']:.3f}" + (f" ± {row['loss_std']:.3f}" if row["loss_std"] is not None else "")
    closed, adds = share_text(row, "gap_closed"), share_text(row, "added")
    return [
        CORPORA[row["corpus"]], str(row["stages"]), str(row["anchor_every"] or "-"), f"{row['learning_rate']:g}",
        f"{share:.0%}", f"{anchor:.0%}" if anchor else "-", str(len(row["seeds"])), loss, closed, adds,
    ]  # fmt: skip


def share_text(row: dict, name: str) -> str:
    """A mean share with its standard error, where there is one."""
    value, error = row[f"{name}_mean"], row[f"{name}_se"]
    return "-" if value is None else f"{value:.2f}" if error is None else f"{value:.3f} (s.e. {error:.3f})"


def diagnosis_table(rows: list[dict]) -> str:
    """Markdown of what priors can do for gradients, by the model's start and the boundary; shares are medians."""
    columns = [
        "weights", "boundary", "share in the prior: gradient", "error", "kept by the filter: gradient", "error ",
        "cosine to the uncoded gradient", "corrected",
    ]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        for boundary, found in row.get("boundaries", {}).items():
            shares = [
                "-" if found[name] is None else f"{100 * found[name][1]:.2g}%"
                for name in ("share_in_prior", "error_share_in_prior", "kept_by_filter", "error_kept_by_filter")
            ]
            cosines = [f"{found[name]:.2f}" for name in ("cosine_to_uncoded", "corrected_cosine_to_uncoded")]
            lines.append(f"| {' | '.join([row['start'], boundary, *shares, *cosines])} |")
    return "\n".join(lines) + "\n"


def with_tables(page: str, rows: list[dict], diagnoses: list[dict]) -> str:
    """The page with its tables anew.

    Args:
        rows, diagnoses: of quality_anchor.json and diagnostics.json.
    """
    page = marked(page, BEGIN, END, table(rows))
    return marked(page, BEGIN_DIAGNOSIS, END_DIAGNOSIS, diagnosis_table(diagnoses))


def draw(rows: list[dict], path: Path) -> None:
    """Gap closed on GSM8K at 4 stages, by method, at the best learning rate of each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    best: dict[str, dict] = {}
    for row in rows:
        key = row["method"]
        same = row["corpus"] == "gsm8k" and row["stages"] == 4 and row["gap_closed_mean"] is not None
        if same and (key not in best or row["loss_mean"] < best[key]["loss_mean"]):
            best[key] = row
    shown = [best[name] for name in reversed(CONFIGURATIONS) if name in best]
    figure = Figure(figsize=(9, 0.45 * len(shown) + 1.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    errors = [row["gap_closed_se"] or 0.0 for row in shown]
    labels = [LABELS.get(row["method"], row["method"]).replace("`", "") for row in shown]
    colours = ["tab:blue" if row["rule"] == "none" else "tab:orange" for row in shown]
    axes.barh(labels, [row["gap_closed_mean"] for row in shown], xerr=errors, color=colours, capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="share of dense training's gain; orange: with an anchor")
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def main() -> None:
    rows = json.loads((RESULTS / "quality_anchor.json").read_text())["rows"]
    diagnoses = json.loads((RESULTS / "diagnostics.json").read_text())["rows"]
    PAGE.write_text(with_tables(PAGE.read_text(), rows, diagnoses))
    draw(rows, PICTURE)
    print(PAGE.name, PICTURE.name)


if __name__ == "__main__":
    main()
