"""Whatever arguments and data a person brings: the run trains, or an error of ours says what is wrong; nothing hangs."""

from __future__ import annotations

import gc
import tempfile

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.mistakes import CONTAINERS, FIELDS, ROWS, mistakes, run

DEFAULTS = {"args": {"pipeline_stages": 2}, "rows": "plain", "container": "table", "collator": "default"}


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Trainer collects garbage in full; what was there before is none."""
    gc.freeze()
    yield
    gc.unfreeze()


def outcome(given: dict) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(folder, **given)


def bounded(num_examples: int):
    """Runs have a deadline of their own; shrinking would run for minutes."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


@bounded(25)
@given(mistakes())
def test_any_run_trains_or_is_refused(given):
    outcome(given)


@pytest.mark.slow
@bounded(600)
@given(mistakes())
def test_any_of_many_runs_trains_or_is_refused(given):
    outcome(given)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_any_value_of_a_field(name):
    for value in FIELDS[name]:
        outcome({**DEFAULTS, "args": {"pipeline_stages": 2, name: value}, "evaluates": True})


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_any_rows_in_any_container(rows):
    for container in CONTAINERS:
        for preset in ("dense", "anchored"):
            args = {"pipeline_stages": 2, "preset": preset}
            outcome({**DEFAULTS, "args": args, "rows": rows, "container": container, "evaluates": True})
