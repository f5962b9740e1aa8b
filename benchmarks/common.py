"""What every benchmark shares: timing statistics and the one format of `benchmarks/results/*.json`.

Run benchmarks from the repository root, as `python -m benchmarks.NAME`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, rows: list[dict], seeds: list[int], command: str | None = None) -> Path:
    """Write `benchmarks/results/<name>.json`: {command, machine, date, seeds, rows}.

    Args:
        name: of the benchmark, the file's stem.
        rows: one flat dict per measured configuration, raw samples included.
        seeds: of everything random in the run, [] where nothing is.
        command: what made the figures; by default this process's own `python -m benchmarks.<module> arguments`.
    """
    result = {
        "command": command or own_command(),
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seeds": seeds,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(as_text(result))
    return path


def as_text(result: dict) -> str:
    """Indented JSON, but a list of numbers on one line: raw samples are thousands."""
    numbers = r"\[\n[\d\s,.e+-]*\]"  # a newline is no part of a string in JSON
    return re.sub(numbers, lambda found: " ".join(found[0].split()), json.dumps(result, indent=1)) + "\n"


def read_rows(name: str) -> list[dict]:
    """Rows of a benchmark's results, [] where there are none yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def read_runs(paths: list[Path]) -> list[dict]:
    """Raw rows of results files whose rows have `runs`; a file that is not there has none."""
    return [
        run for path in paths if path.exists() for row in json.loads(path.read_text())["rows"] for run in row["runs"]
    ]


def without_repeats(runs: list[dict], key: Callable[[dict], tuple]) -> list[dict]:
    """The first run of every key."""
    first: dict[tuple, dict] = {}
    for run in runs:
        first.setdefault(key(run), run)
    return list(first.values())


def own_command() -> str:
    return " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def machine() -> str:
    """CPU model, usable cores and torch version; no hostname and no path, for the file is published."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{models[0] if models else 'unknown CPU'}, {cores} cores, torch {metadata.version('torch')}"


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def print_table(rows: list[dict], columns: list[str]) -> None:
    """Print some columns of the rows, floats with 4 significant digits."""
    cells = [columns] + [
        [f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
