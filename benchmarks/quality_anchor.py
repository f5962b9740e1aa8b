"""Held-out loss with anchor priors and without: what a correction adds to each kind of boundary, in the emulated mesh.

Paired runs as in `benchmarks.boundary_quality`, whose models, corpora and configurations these are: the same start, the
same problems in the same order, equally many of the fast circuit's tokens. `anchor_only` is the control: a correction is
a gain only where it beats that, at the same K, and its boundary alone.

Runs without an anchor that `benchmarks.boundary_quality` has made are taken over from its results.

Every configuration trains at the learning rate of its family, the best one on one seed of GSM8K at 4 stages; run the part
`learning_rate` first. Baselines, and at 8 stages and on the second corpus what is dense or coded by `transform`, train at
1e-4, as in `benchmarks.boundary_quality`.

Rows already in the results file are kept, so that the study can be run in pieces:
`python -m benchmarks.quality_anchor --part learning_rate headline --minutes 100`. `--merge` adds the runs of other results
files.

Gap closed is (loss before - loss) / (loss before - dense loss), against the dense run of the same seed, of 4 stages at any
depth: on GSM8K at 4 stages at the best rate, else at 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean

from . import boundary_quality as boundaries
from .common import RESULTS, read_runs, without_repeats, write_result

NAME, MODEL = "quality_anchor", boundaries.MODEL
EVERY = 10
RATE = 1e-4
SEEDS = (0, 1, 2)
MASK95 = {"preset": "paper", "anchor": False, "exact_first_token": True, "boundary_predictor": "mean"}
# What a correction adds to a boundary: one that stays as it is.
ANCHOR = {"anchor": True, "anchor_every": EVERY, "anchor_calibrates": False}
DIAGONAL = {"correction_rule": "diagonal", "correction_tau": 0.1, "correction_tau_relative": True}

# Baselines that `boundary_quality` has measured without an anchor.
CODECS = tuple(name for name in boundaries.BASELINES if not name.startswith(("mask", "transform_5")))

# Trainer arguments by configuration.
CONFIGURATIONS: dict[str, dict] = {
    "dense": {"preset": "dense"},
    "mask95_zero": {"preset": "paper", "anchor": False},
    "mask95_mean": MASK95,
    "mask95_mean_diagonal": {**MASK95, **ANCHOR, **DIAGONAL},
    "mask95_mean_blend": {**MASK95, **ANCHOR, "correction_rule": "blend"},
    "anchor_only": {**MASK95, **ANCHOR, "correction_rule": "anchor_only"},
    "transform": {"preset": "anchored"},
    "transform_diagonal": {"preset": "anchored", **ANCHOR},
    "paper": {"preset": "paper", **ANCHOR},
    # What the anchor's passes are worth to the boundary itself, with every prior.
    "transform_diagonal_calibrated": {
        "preset": "anchored",
        **ANCHOR,
        "anchor_calibrates": True,
        "calibration_every": EVERY,
    },
    # Other rules and intervals, masks of 90%, and every baseline codec with the correction.
    "mask95_mean_two_sided": {**MASK95, **ANCHOR},
    "mask95_mean_diagonal_k5": {**MASK95, **ANCHOR, **DIAGONAL, "anchor_every": 5},
    "mask95_mean_blend_k5": {**MASK95, **ANCHOR, "correction_rule": "blend", "anchor_every": 5},
    "anchor_only_k5": {**MASK95, **ANCHOR, "correction_rule": "anchor_only", "anchor_every": 5},
    "mask90_mean_diagonal": {**MASK95, **ANCHOR, **DIAGONAL, "mask_ratio": 0.9},
    **{f"{name}_diagonal": {**boundaries.CONFIGURATIONS[name], **ANCHOR} for name in CODECS},
    # The same without an anchor, from `boundary_quality`.
    **{name: boundaries.CONFIGURATIONS[name] for name in CODECS},
}
# What an anchor was added to.
ALONE = {
    **{f"{name}_diagonal": name for name in CODECS},
    "paper": "mask95_zero",
    **{
        name: "transform" if name.startswith("transform") else "mask95_mean"
        for name, options in CONFIGURATIONS.items()
        if options.get("anchor") and name.startswith(("transform_diagonal", "mask95_mean", "anchor_only"))
    },
}
HEADLINE = (
    "dense", "mask95_zero", "mask95_mean", "mask95_mean_diagonal", "mask95_mean_blend", "anchor_only", "transform",
    "transform_diagonal", "transform_diagonal_calibrated", "paper",
)  # fmt: skip
BEST = ("dense", "mask95_mean_diagonal", "mask95_mean_blend", "anchor_only", "transform_diagonal")
REST = [name for name in CONFIGURATIONS if name not in (*HEADLINE, *CODECS)]
# Runs of `boundary_quality` that are the same here, by our name for them.
SHARED = {
    "dense": "dense", "mask95_zero": "mask95_zero", "mask95_mean": "mask95_mean", "transform": "transform_5",
    **{name: name for name in CODECS},
}  # fmt: skip
# By family, named by the configuration on which they are tried. A direction that stays the same for K steps diverges at a
# rate that single steps bear, and few steps bear a larger one.
RATES = {
    "dense": (5e-5, RATE, 2e-4),
    "transform": (5e-5, RATE, 2e-4),
    "mask95_mean": (5e-6, 1e-5, 2e-5, RATE),
    "mask95_mean_diagonal": (5e-6, 1e-5, 2e-5, 5e-5, RATE),
    "mask95_mean_blend": (2e-5, 5e-5),
    "anchor_only": (RATE, 3e-4),
}
COMMON = {"dense": RATE, "transform_diagonal": RATE}
# Rules whose learning rates differ from those of what they are added to.
OWN_RATES = ("blend", "anchor_only")
# (configuration, stages, learning rate or None for the best found, seed, corpus) by part.
Row = tuple[str, int, float | None, int, str]
STUDY: dict[str, list[Row]] = {
    "learning_rate": [(name, 4, rate, 0, "gsm8k") for name, rates in RATES.items() for rate in rates],
    "headline": [(name, 4, None, seed, "gsm8k") for seed in SEEDS for name in HEADLINE],
    "deep": [(name, 8, COMMON.get(name), seed, "gsm8k") for seed in SEEDS for name in BEST],
    "second_corpus": [(name, 4, COMMON.get(name), seed, "kjv") for seed in SEEDS for name in (*BEST, "mask95_mean")],
    "rest": [(name, 4, None, 0, "gsm8k") for name in REST],
}


def shared_runs(steps: int) -> list[dict]:
    """Raw rows of runs that `boundary_quality` has made already."""
    rows = json.loads((RESULTS / f"{boundaries.NAME}.json").read_text())["rows"]
    names = {theirs: ours for ours, theirs in SHARED.items()}
    return [
        run | {"configuration": names[run["configuration"]], "rule": "none", "anchor_every": None}
        for row in rows
        for run in row["runs"]
        if run["configuration"] in names and run["corpus"] in ("gsm8k", "kjv") and run["steps"] == steps
    ]


def family_of(name: str) -> str | None:
    """The configuration on which the learning rate of this one was chosen; None for baselines, which train at `RATE`."""
    shorter = name.removesuffix("_k5")
    if shorter in RATES:
        return shorter
    if shorter == "mask95_zero":
        return "mask95_mean"
    masks = name.startswith("mask") or name == "paper"
    return "mask95_mean_diagonal" if masks else "transform" if name.startswith("transform_diagonal") else None


def best_rate(runs: list[dict], name: str) -> float:
    """The learning rate with the least loss of a configuration's family on one seed."""
    losses = {
        run["learning_rate"]: run["loss"]
        for run in runs
        if (run["configuration"], run["stages"], run["seed"], run["corpus"]) == (family_of(name), 4, 0, "gsm8k")
    }
    return min(losses, key=losses.get) if losses else RATE


def summarise(runs: list[dict]) -> list[dict]:
    """Means over seeds, one row per configuration, stages, corpus and learning rate."""
    dense = {
        (run["learning_rate"], run["seed"], run["corpus"]): run["loss"]
        for run in runs
        if run["configuration"] == "dense" and run["stages"] == 4
    }
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["configuration"], run["stages"], run["corpus"], run["learning_rate"]), []).append(run)
    return [summary(members, dense, runs) for members in groups.values()]


def added(run: dict, possible: float, runs: list[dict]) -> float | None:
    """What the anchor added to a run's share of the gap; None without one, or where its boundary alone was not run.

    Beside the boundary alone at the same learning rate; of rules that bear another, at its own best.

    Args:
        possible: what dense training gained.
    """
    name = ALONE.get(run["configuration"])
    if name is None:
        return None
    rate = best_rate(runs, name) if run["rule"] in OWN_RATES else run["learning_rate"]
    wanted = (name, run["stages"], run["seed"], run["corpus"], rate)
    names = ("configuration", "stages", "seed", "corpus", "learning_rate")
    alone = (other for other in runs if tuple(other[name] for name in names) == wanted)
    return next(((other["loss"] - run["loss"]) / possible for other in alone), None)


def summary(members: list[dict], dense: dict[tuple[float, int, str], float], runs: list[dict]) -> dict:
    """One row out of the runs of its seeds.

    Args:
        dense: loss of the dense run by learning rate, seed and corpus.
        runs: all, for what the anchor added to each: `added_mean` in shares of the gap, paired by seed.
    """
    first, losses = members[0], [run["loss"] for run in members]
    rate = best_rate(runs, "dense") if (first["corpus"], first["stages"]) == ("gsm8k", 4) else RATE
    pairs = [(run, dense.get((rate, run["seed"], run["corpus"]))) for run in members]
    gaps = [
        (run["loss_before"] - run["loss"]) / (run["loss_before"] - loss) for run, loss in pairs if loss is not None
    ]
    gained = [added(run, run["loss_before"] - loss, runs) for run, loss in pairs if loss is not None]
    gained = [share for share in gained if share is not None]
    return {
        "method": first["configuration"], "rule": first["rule"], "stages": first["stages"],
        "anchor_every": first["anchor_every"], "corpus": first["corpus"], "learning_rate": first["learning_rate"],
        "seeds": [run["seed"] for run in members], "loss_mean": mean(losses), "loss_std": boundaries.spread(losses),
        "gap_closed_mean": mean(gaps) if gaps else None,
        "gap_closed_se": boundaries.spread(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
        "added_mean": mean(gained) if gained else None,
        "added_se": boundaries.spread(gained) / len(gained) ** 0.5 if len(gained) > 1 else None,
        "bytes_per_token": first["planned_bytes_per_token"], "runs": members,
    }  # fmt: skip


def run(name: str, stages: int, rate: float, seed: int, corpus: str, data, before: float | None, steps: int) -> dict:
    """One training run; returns its raw row."""
    options = dict(CONFIGURATIONS[name])
    every = options.get("anchor_every") if options.get("anchor") else None
    row = boundaries.run(name, stages, rate, seed, corpus, data, before, steps, **options)
    return row | {"rule": rule_of(options), "anchor_every": every}


def rule_of(options: dict) -> str:
    """The rule of a configuration by its arguments."""
    if not options.get("anchor"):
        return "none"
    return options.get("correction_rule", "two_sided" if options.get("preset") == "paper" else "diagonal")


def key_of(run: dict) -> Row:
    return tuple(run[name] for name in ("configuration", "stages", "learning_rate", "seed", "corpus"))


def write(name: str, runs: list[dict]) -> None:
    """Writes the results, runs in a fixed order, with the command that makes all of them."""
    order = {configuration: index for index, configuration in enumerate(CONFIGURATIONS)}
    runs = sorted(
        runs, key=lambda r: (r["corpus"], r["stages"], order[r["configuration"]], r["learning_rate"], r["seed"])
    )
    made = {run.get("part") for run in runs}  # those taken over have none
    parts = [part for part in STUDY if part in made]
    seeds = sorted({run["seed"] for run in runs})
    write_result(name, summarise(runs), seeds, command=f"python -m benchmarks.{NAME} --part {' '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=list(STUDY), default=["headline"])
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), help="only these configurations")
    parser.add_argument("--seeds", type=int, nargs="+", help="only the runs of these seeds")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="results files to add; nothing is run")
    parser.add_argument("--minutes", type=float, default=100.0, help="start no further run after so long")
    parser.add_argument("--steps", type=int, default=boundaries.STEPS, help="optimizer steps of a run")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of another model")
    parser.add_argument("--name", default=NAME, help="of the results file")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    boundaries.MODEL = options.model
    runs = read_runs([RESULTS / f"{options.name}.json", *options.merge])
    runs = [run for run in runs if run["steps"] == options.steps]
    runs = without_repeats(runs + (shared_runs(options.steps) if options.model == MODEL else []), key_of)
    if options.merge:
        return write(options.name, runs)
    before = {run["corpus"]: run["loss_before"] for run in runs}
    data, deadline = {}, time.monotonic() + 60 * options.minutes
    rows = [(part, *row) for part in options.part for row in STUDY[part]]
    for part, name, stages, rate, seed, corpus in rows:
        rate = best_rate(runs, name) if rate is None else rate
        wanted = options.only is None or name in options.only
        wanted = wanted and (options.seeds is None or seed in options.seeds)
        if not wanted or (name, stages, rate, seed, corpus) in map(key_of, runs) or time.monotonic() > deadline:
            continue
        if corpus not in data:
            data[corpus] = boundaries.load_data(corpus)
        made = run(name, stages, rate, seed, corpus, data[corpus], before.get(corpus), options.steps)
        runs.append(made | {"part": part})
        before[corpus] = runs[-1]["loss_before"]
        shown = ("configuration", "stages", "learning_rate", "seed", "corpus", "loss", "seconds")
        print(json.dumps({key: runs[-1][key] for key in shown}), flush=True)
        write(options.name, runs)


if __name__ == "__main__":
    main()
