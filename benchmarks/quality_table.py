"""Writes the quality tables of README.md and of pages of docs/ from the results: `python -m benchmarks.quality_table`.

A test checks that the pages say what the results say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.common import RESULTS

ROOT = Path(__file__).parents[1]
LABELS = {
    "dense": "dense (`preset=dense`)",
    "transform_5": "`transform` (`preset=anchored`), calibrated once",
    "transform_5_every_10": "`transform` (`preset=anchored`), calibrated every 10 steps",
    "transform_10_every_10": "`transform`, `boundary_budget=0.1`, calibrated every 10 steps",
    "transform_5_plain": "`transform`, not weighted by the loss (`loss_weighted=False`)",
    "transform_5_mean": "`transform`, channel means as predictor",
    "transform_5_whole_bits": "`transform` with whole bits (`entropy_coded=False`), calibrated once",
    "rotated_1bit": "`quantize`, 1 bit, rotated, token predictor",
    "quantize_2bit": "`quantize`, 2 bits, rotated",
    "quantize_3bit": "`quantize`, 3 bits, rotated",
    "quantize_4bit": "`quantize`, 4 bits, rotated",
    "quantize_8bit": "`quantize`, 8 bits, rotated",
    "tah_quant": "`tah_quant`",
    "aq_sgd": "`aq_sgd`, 4 and 8 bits",
    "topk_5": "`topk`, token predictor",
    "topk_5_feedback": "`topk` with error feedback",
    "topk_10": "`topk`, token predictor, `boundary_budget=0.1`",
    "subspace_5": "`subspace`",
    "subspace_10": "`subspace`, `boundary_budget=0.1`",
    "bottleneck_5": "`bottleneck`, token predictor",
    "mask95_mean": "random masks at 0.95, exact first token, channel means",
    "mask90_mean": "random masks at 0.9, exact first token, channel means",
    "mask95_zero": "random masks at 0.95, zero fill (`preset=paper`, `anchor=False`)",
}
CORPORA = {
    "gsm8k": "GSM8K",
    "gsm8k_linear": "GSM8K, linear decay",
    "gsm8k_twice": "GSM8K, 80 problems twice",
    "kjv": "KJV",
}
HEADLINE = (
    "dense", "transform_5_every_10", "transform_5", "transform_5_whole_bits", "quantize_4bit", "rotated_1bit", "topk_5",
    "subspace_5", "mask95_mean", "mask95_zero",
)  # fmt: skip
# By page, the configurations that its table shows, at the study's own corpus and learning rate; None: every row.
PAGES = {
    ROOT / "README.md": HEADLINE,
    ROOT / "docs" / "boundaries.md": None,
    ROOT / "docs" / "paper.md": ("dense", "transform_5", "mask95_zero"),
}
BEGIN, END = "<!-- quality: python -m benchmarks.quality_table -->\n", "<!-- quality ends -->"


def table(rows: list[dict], shown: tuple[str, ...] | None) -> str:
    """Markdown of the rows of the study, best first within corpus, learning rate and depth.

    Args:
        rows: of boundary_quality.json.
        shown: these configurations only, on GSM8K at the study's learning rate.
    """
    if shown is not None:
        rows = [
            row for row in rows
            if row["corpus"] == "gsm8k" and row["learning_rate"] == 1e-4 and row["configuration"] in shown
        ]  # fmt: skip
    rows = sorted(
        rows,
        key=lambda row: (
            list(CORPORA).index(row["corpus"]), row["learning_rate"] != 1e-4, row["learning_rate"], row["stages"],
            row["loss_mean"],
        ),
    )  # fmt: skip
    other = ["corpus", "learning rate"] if shown is None else []
    columns = ["boundary", *other, "stages", "bytes on the pipeline axis", "seeds", "held-out loss", "gap closed"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        where = [] if shown is not None else [CORPORA[row["corpus"]], f"{row['learning_rate']:g}"]
        cells = [LABELS[row["configuration"]], *where, *figures(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figures(row: dict) -> list[str]:
    """Stages, share of the dense bytes, seeds, loss and gap closed."""
    share = row["runs"][0]["bytes_ratio_to_dense"]
    loss = f"{row['loss_mean']:.3f}" + (f" ± {row['loss_std']:.3f}" if row["loss_std"] is not None else "")
    if row["configuration"] == "dense":
        return ["any", f"{share:.0%}", str(len(row["seeds"])), loss, "-"]
    gap, error = row["gap_closed_mean"], row["gap_closed_se"]
    closed = "-" if gap is None else f"{gap:.2f}" if error is None else f"{gap:.3f} (s.e. {error:.3f})"
    return [str(row["stages"]), f"{share:.1%}", str(len(row["seeds"])), loss, closed]


def with_table(page: str, rows: list[dict], shown: tuple[str, ...] | None) -> str:
    """The page with its table anew."""
    return marked(page, BEGIN, END, table(rows, shown))


def marked(page: str, begin: str, end: str, text: str) -> str:
    """The page with this text between its two marks."""
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert len(pattern.findall(page)) == 1, "the page needs one marked table"
    return pattern.sub(lambda _: begin + text + end, page)


def main() -> None:
    rows = json.loads((RESULTS / "boundary_quality.json").read_text())["rows"]
    for path, shown in PAGES.items():
        path.write_text(with_table(path.read_text(), rows, shown))
        print(path.name)


if __name__ == "__main__":
    main()
