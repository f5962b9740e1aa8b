"""The committed results say what their raw rows say."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import anchor_table, boundary_quality, quality_anchor, throughput
from benchmarks.anchor_isolation import LAYOUTS, STATES
from benchmarks.common import as_text, quartiles
from benchmarks.quality_table import PAGES, with_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows_of(name: str) -> list[dict]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        pytest.skip("the benchmark has not been run")
    return json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_form(path):
    result = json.loads(path.read_text())
    assert set(result) == {"command", "machine", "date", "seeds", "rows"} and result["rows"]


def test_text_of_a_result_is_the_same_json_with_short_lists_of_numbers():
    result = {
        "command": "x --list [1, 2]",
        "rows": [{"samples": [1, -2.5, 3e-07], "names": ["a"], "none": [], "deep": [[1], [2]]}],
    }
    text = as_text(result)
    assert json.loads(text) == result
    assert '"samples": [ 1, -2.5, 3e-07 ]' in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tables_of_quality_say_what_the_results_say(path):
    rows = json.loads((RESULTS / "boundary_quality.json").read_text())["rows"]
    assert with_table(path.read_text(), rows, PAGES[path]) == path.read_text()


def test_support_is_what_its_page_says():
    page = (RESULTS.parents[1] / "docs" / "support.md").read_text().split("## Arguments that are refused")[0]
    said, group, meshes = [], "", []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            group = line.removeprefix("## ")
        elif line.startswith("| | "):
            meshes = cells[1:]
        elif line.startswith("| "):
            outcomes = zip(meshes, (cell.split(" (")[0] for cell in cells[1:]))
            said += [(group, cells[0], mesh, outcome) for mesh, outcome in outcomes if outcome != "–"]
    rows = json.loads((RESULTS / "support.json").read_text())["rows"]
    written = [(row["group"], row["feature"], row["mesh"], row["outcome"]) for row in rows]
    assert sorted(said) == sorted(written)


def test_boundary_quality_means_follow_from_the_runs():
    rows = rows_of("boundary_quality")
    dense = {
        (run["seed"], row["learning_rate"], row["corpus"]): run["loss"]
        for row in rows
        if row["configuration"] == "dense"
        for run in row["runs"]
    }
    for row in rows:
        losses = [run["loss"] for run in row["runs"]]
        assert row["loss_mean"] == pytest.approx(sum(losses) / len(losses))
        assert row["seeds"] == [run["seed"] for run in row["runs"]]
        gaps = []
        for run in row["runs"]:
            gained, possible = (
                run["loss_before"] - run["loss"],
                dense.get((run["seed"], row["learning_rate"], row["corpus"])),
            )
            if possible is not None:
                gaps.append(gained / (run["loss_before"] - possible))
        if gaps:
            assert row["gap_closed_mean"] == pytest.approx(sum(gaps) / len(gaps))
        assert row["bytes_per_token"]["pipeline"] == row["runs"][0]["planned_bytes_per_token"]["pipeline"]


def test_the_studies_configurations_are_arguments(tmp_path):
    for name in boundary_quality.CONFIGURATIONS:
        boundary_quality.arguments(str(tmp_path), name, 4, 1e-4, 0)
    for name, configuration in quality_anchor.CONFIGURATIONS.items():
        boundary_quality.arguments(str(tmp_path), name, 8, 1e-4, 0, **configuration)


def losses_of(rows: list[dict], **wanted) -> dict[int, float]:
    """Losses by seed of the rows of the anchor's study with these values."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return {run["seed"]: run["loss"] for row in found for run in row["runs"]}


def test_quality_anchor_means_follow_from_the_runs():
    rows = rows_of("quality_anchor")
    tried = {"stages": 4, "corpus": "gsm8k"}
    best = {
        name: min(rates, key=lambda rate: losses_of(rows, method=name, learning_rate=rate, **tried)[0])  # at seed 0
        for name, rates in quality_anchor.RATES.items()
    }
    for row in rows:
        losses = [run["loss"] for run in row["runs"]]
        assert row["loss_mean"] == pytest.approx(sum(losses) / len(losses))
        assert row["seeds"] == [run["seed"] for run in row["runs"]]
        place = {"stages": row["stages"], "corpus": row["corpus"]}
        rate = best["dense"] if place == tried else quality_anchor.RATE
        dense = losses_of(rows, method="dense", learning_rate=rate, stages=4, corpus=row["corpus"])
        gaps = [(run["loss_before"] - run["loss"]) / (run["loss_before"] - dense[run["seed"]]) for run in row["runs"]]
        assert row["gap_closed_mean"] == pytest.approx(np.mean(gaps))
        if row["added_mean"] is not None:
            alone, rate = quality_anchor.ALONE[row["method"]], row["learning_rate"]
            if row["rule"] in quality_anchor.OWN_RATES:
                rate = best["mask95_mean"]
            beside = losses_of(rows, method=alone, learning_rate=rate, **place)
            pairs = [run for run in row["runs"] if run["seed"] in beside]
            shares = [(beside[r["seed"]] - r["loss"]) / (r["loss_before"] - dense[r["seed"]]) for r in pairs]
            assert row["added_mean"] == pytest.approx(np.mean(shares))
            if len(shares) > 1:
                assert row["added_se"] == pytest.approx(np.std(shares, ddof=1) / len(shares) ** 0.5)
        assert (row["anchor_every"] is None) == (row["rule"] == "none") == ("anchor" not in row["bytes_per_token"])


def test_the_tables_of_the_anchors_page_say_what_the_results_say():
    page = anchor_table.PAGE.read_text()
    assert anchor_table.with_tables(page, rows_of("quality_anchor"), rows_of("diagnostics")) == page


def test_dp_quality_ratios_follow_from_the_runs():
    rows = {row["dp_sync"]: row for row in rows_of("dp_quality")}
    dense = {run["seed"]: run["loss"] for run in rows["allreduce"]["runs"]}
    for row in rows.values():
        losses = [run["loss"] for run in row["runs"]]
        ratios = [run["loss"] / dense[run["seed"]] for run in row["runs"]]
        assert row["seeds"] == sorted(dense) and row["loss_mean"] == pytest.approx(np.mean(losses))
        assert row["ratio_to_dense"] == pytest.approx(np.mean(ratios))
        assert row["ratio_se"] == pytest.approx(np.std(ratios, ddof=1) / len(ratios) ** 0.5)


@pytest.mark.parametrize(
    "name,ours,theirs,ratio",
    [
        ("boundary_cost", "coding_seconds", "stage_seconds", "ratio_to_stage"),
        ("fit_cost", "set_seconds", "stage_seconds", "set_ratio_to_pass"),
        ("powersgd_vs_torch", "seconds", "torch_seconds", "time_ratio"),
    ],
)
def test_ratios_of_times_are_of_medians(name, ours, theirs, ratio):
    for row in rows_of(name):
        assert row[ratio] == pytest.approx(quartiles(row[ours])[1] / quartiles(row[theirs])[1])


def test_throughput_follows_from_the_steps_of_the_ranks():
    rows = rows_of("throughput")
    dense = {row["mbits"]: row for row in rows if row["configuration"] == "dense"}
    for row in rows:
        tokens = throughput.REPLICAS * throughput.ROWS * throughput.LENGTH * row["steps"]
        assert all(len(rank["seconds"]) == row["steps"] for rank in row["ranks"])
        seconds = np.mean([sum(rank["seconds"]) for rank in row["ranks"]])
        sent = [sum(rank["sent_bytes"].values()) for rank in row["ranks"]]
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
        assert sum(row["bytes_per_token"].values()) == pytest.approx(sum(sent) / tokens)
        assert row["busiest_rank_bytes_per_token"] == pytest.approx(max(sent) / tokens)
        beside = dense[row["mbits"]]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / beside["tokens_per_second"])
        assert row["bytes_ratio"] == pytest.approx(
            beside["busiest_rank_bytes_per_token"] / row["busiest_rank_bytes_per_token"]
        )
    page = throughput.PAGE.read_text()
    assert throughput.with_table(page, rows) == page


@pytest.mark.parametrize("layout", LAYOUTS)
def test_anchor_isolation_follows_from_the_steps(layout):
    rows = [row for row in rows_of("anchor_isolation") if row["layout"] == layout]
    assert [row["anchor_state"] for row in rows] == list(STATES)
    period, calls, on_thread, correction = (
        {row["anchor_state"]: np.array(row[f"{what}_microseconds"]) for row in rows}
        for what in ("period", "calls", "calls_on_thread", "correction")
    )
    for row in rows:
        state = row["anchor_state"]
        rest, share = period[state] - correction[state], calls[state] / period[state]
        assert row["num_samples"] == len(rest) and row["anchor_share_median"] == pytest.approx(
            np.median(share), abs=1e-4
        )
        assert row["anchor_share_p99"] == pytest.approx(np.percentile(share, 99), abs=1e-4)
        thread_share = np.percentile(on_thread[state] / period[state], 99)
        assert row["thread_share_p99"] == pytest.approx(thread_share, abs=1e-4)
        assert row["median_ratio"] == pytest.approx(np.median(rest) / np.median(period["none"]), rel=1e-3)
        assert row["p99_ratio"] == pytest.approx(np.percentile(rest, 99) / np.percentile(period["none"], 99), rel=1e-3)
