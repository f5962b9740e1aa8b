"""What the demo makes of its runs' metrics, and how it says what the anchor did."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("demo")
    for name in ("demo", "gsm8k_data", "prepare_smollm2"):
        sys.modules.pop(name, None)


def metrics(loss_after: float, anchor: dict | None = None, loss_before: float | None = 1.4) -> dict:
    return {
        "loss_before": loss_before, "loss_after": loss_after, "anchor": anchor, "tokens_per_second": 200.0,
        "bytes_per_token": {"pipeline": 100.0}, "planned_bytes_per_token": {"pipeline": 99.0},
    }  # fmt: skip


def results(demo, corrected: float, control: float) -> dict:
    figures = {"num_live_steps": 9, "num_steps": 16, "mean_prior_age_steps": 8.25}
    silent = {"num_live_steps": 0, "num_steps": 16, "mean_prior_age_steps": None}
    return demo.collect(
        {"dense": metrics(0.8), "paper": metrics(1.7)},
        {"paper + anchor": metrics(corrected, figures, None), "anchor_only": metrics(control, silent, None)},
    )


def text_of(demo, table) -> str:
    with demo.console.capture() as captured:
        demo.console.print(table)
    return captured.get()


def test_the_correction_is_shown_beside_its_control(demo):
    found = results(demo, corrected=1.6, control=1.3)
    assert [run["name"] for run in found["runs"]] == ["dense", "paper"]
    assert [run["loss_change"] for run in found["anchor_runs"]] == [pytest.approx(-0.1), pytest.approx(-0.4)]
    shown = text_of(demo, demo.anchor_table(found))
    for words in ("1.600 (-0.100)", "1.300 (-0.400)", "9 of 16", "0 of 16", "8.2", "paper + anchor", "anchor_only"):
        assert words in shown, words
    assert "anchor_only" not in text_of(demo, demo.results_table(found))


@pytest.mark.parametrize("corrected,words", [(1.6, "by -0.100; "), (1.6, "no gain of its own"), (1.2, "is a gain of")])
def test_a_correction_is_a_gain_only_where_it_beats_the_control(demo, corrected, words):
    assert words in demo.anchor_verdict(results(demo, corrected, control=1.3))


def test_runs_that_start_apart_do_not_compare(demo):
    with pytest.raises(SystemExit, match="started at 1.5"):
        demo.collect({"dense": metrics(0.8), "paper": metrics(1.7, loss_before=1.5)}, {})


def test_arms_pair_and_only_the_anchors_are_in_one_process(demo):
    assert all("--data_parallel_replicas" not in options for options in (demo.RUNS | demo.ANCHOR_RUNS).values())
    corrected, control = demo.EMULATED_RUNS.values()
    assert "--anchor" in corrected and "--anchor" in control
    masked = ["--preset", "paper", "--dp_sync", "allreduce"]
    assert demo.RUNS["paper"] == [*masked, "--anchor", "false"]
    assert corrected[:4] == control[:4] == masked
