"""The committed results say what their raw rows say."""

import json
from pathlib import Path

import pytest

from benchmarks import boundary_quality, quality_anchor
from benchmarks.quality_table import PAGES, with_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_form(path):
    result = json.loads(path.read_text())
    assert set(result) == {"command", "machine", "date", "seeds", "rows"} and result["rows"]


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
    path = RESULTS / "boundary_quality.json"
    if not path.exists():
        pytest.skip("the study has not been run")
    rows = json.loads(path.read_text())["rows"]
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


def test_the_studies_configurations_are_arguments(make_arguments):
    for configuration in (*boundary_quality.CONFIGURATIONS.values(), *quality_anchor.CONFIGURATIONS.values()):
        make_arguments(pipeline_stages=4, **configuration)


def test_quality_anchor_means_follow_from_the_runs():
    path = RESULTS / "quality_anchor.json"
    if not path.exists():
        pytest.skip("the study has not been run")
    for row in json.loads(path.read_text())["rows"]:
        losses = [run["loss"] for run in row["runs"]]
        assert row["loss_mean"] == pytest.approx(sum(losses) / len(losses))
        assert row["seeds"] == [run["seed"] for run in row["runs"]]
        assert (row["anchor_every"] is None) == (row["rule"] == "none") == ("anchor" not in row["bytes_per_token"])
