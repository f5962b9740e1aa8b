"""Adaptive budgets over ranks: the emulated mesh's run bit for bit, resumed ones too, and the bytes on sockets."""

from __future__ import annotations

import logging

import pytest

from hf_meshadapt import adaptive
from tests import traffic
from tests.distributed.test_calibrated import CALIBRATED, INTERLEAVED, assert_same_as_emulated, run_both
from tests.runs import assert_same_run, fork, train

FLOOR = 0.3
# Links so slow that they decide: the step at the floors takes less than the target, at whole budgets more.
ADAPTIVE = CALIBRATED | dict(
    boundary_budget=FLOOR, boundary_target_step_seconds=1.0, link_bits_per_second=1e5, busy_seconds=0.01,
)  # fmt: skip
CASES = {
    # model, stages, replicas, further arguments
    "2x1": ("llama_tied", 2, 1, ADAPTIVE),
    "3x1": ("llama", 3, 1, ADAPTIVE),
    "2x2": ("gpt2", 2, 2, ADAPTIVE),
    "interleaved": ("llama_tied", 2, 1, ADAPTIVE | INTERLEAVED),
}


def assert_between(budgets: tuple[float, ...], num_boundaries: int) -> None:
    """Something was raised, and not all that could be."""
    assert len(budgets) == num_boundaries and min(budgets) >= FLOOR
    assert max(budgets) > FLOOR and min(budgets) < 1.0


@pytest.mark.parametrize("case", CASES)
def test_distributed_equals_emulated_bit_for_bit(case, tmp_path):
    _, stages, _, options = CASES[case]
    ranks, emulated = run_both(*CASES[case], tmp_path)
    assert_between(emulated["budgets"], stages * options.get("pipeline_chunks_per_rank", 1) - 1)
    assert all(run["budgets"] == emulated["budgets"] and not run["warnings"] for run in ranks)


def test_more_time_widens_and_too_little_keeps_the_floors_and_says_so(tmp_path):
    def budgets(name: str, **extra) -> tuple[tuple[float, ...], list[str]]:
        options = ADAPTIVE | dict(max_steps=1, eval_strategy="no", pipeline_stages=3) | extra
        (run,) = fork(train, 1, folder=tmp_path / name, kind="llama", **options)
        return run["budgets"], run["warnings"]

    some, silent = budgets("some")
    more, _ = budgets("more", boundary_target_step_seconds=1.2)
    busier, _ = budgets("busier", busy_seconds=0.1)
    none, (warning,) = budgets("none", boundary_target_step_seconds=0.01)
    assert sum(busier) < sum(some) < sum(more) and not silent
    assert none == (FLOOR, FLOOR)
    assert "boundary_target_step_seconds=0.01" in warning and "lower boundary_budget" in warning


def train_over(rank: int, *, seconds_per_byte: dict, **options) -> dict:
    """A run whose links are what a test says, by sending rank, link and direction."""
    adaptive.measure_links = lambda engine: [
        [link, way, seconds] for (sender, link, way), seconds in seconds_per_byte.items() if sender == rank
    ]
    return train(rank, **options)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slower_link_gets_fewer_bytes(slow, tmp_path):
    rates = {(link + way, link, way): 8e-5 * (1 + (link == slow)) for link in (0, 1) for way in (0, 1)}
    options = ADAPTIVE | dict(link_bits_per_second=None, max_steps=1, eval_strategy="no", pipeline_stages=3)
    runs = fork(train_over, 3, folder=tmp_path, kind="llama", seconds_per_byte=rates, **options)
    budgets = runs[0]["budgets"]
    assert_between(budgets, 2)
    assert budgets[slow] < budgets[1 - slow]
    assert all(run["budgets"] == budgets for run in runs)


def test_the_slowest_replica_counts_and_all_hold_its_budgets(tmp_path):
    options = ADAPTIVE | dict(max_steps=1, eval_strategy="no", pipeline_stages=2, kind="gpt2")
    for name, slow in (("all", (0, 1)), ("second", (1,))):
        rates = {
            (2 * replica + way, 0, way): 8e-5 * (1 if replica in slow else 0.1) for replica in (0, 1) for way in (0, 1)
        }
        settings = options | dict(link_bits_per_second=None, seconds_per_byte=rates)
        runs = fork(train_over, 4, folder=tmp_path / name, **settings)
        (same,) = {run["budgets"] for run in runs}
        (given,) = fork(train, 1, folder=tmp_path / f"{name}-given", data_parallel_replicas=2, **options)
        assert same == given["budgets"]


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["3x1", "2x2"])
def test_a_resumed_run_keeps_its_budgets_and_equals_the_uninterrupted_one(case, tmp_path):
    kind, stages, replicas, options = CASES[case]
    options = dict(folder=tmp_path / "run", kind=kind, pipeline_stages=stages, dropout=0.2, **options)
    whole = fork(train, stages * replicas, save_at=(2,), **options)
    # A second choice would come out otherwise.
    resumed = fork(train, stages * replicas, resume=True, **options | dict(busy_seconds=0.1))
    assert_same_run(resumed, whole)
    assert len({run["budgets"] for run in (*whole, *resumed)}) == 1
    assert_between(whole[0]["budgets"], stages - 1)
    assert not any(run["calibrations"] for run in resumed)


def test_another_target_is_calibrated_anew(tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", pipeline_stages=2)
    fork(train, 1, save_at=(2,), **options, **ADAPTIVE)
    (other,) = fork(train, 1, resume=True, **options, **ADAPTIVE | dict(boundary_target_step_seconds=2.0))
    assert other["calibrations"] == 1 and "calibrated anew" in other["warnings"][0]
    (fixed,) = fork(train, 1, resume=True, **options, **CALIBRATED)
    assert fixed["calibrations"] == 1 and fixed["budgets"] is None


def test_refreshed_budgets_follow_the_model_alike_on_all_ranks_and_through_a_resume(tmp_path):
    """Buffers of other sizes in the middle of a run."""
    options = dict(kind="llama", pipeline_stages=3, **ADAPTIVE | dict(calibration_every=1, calibration_tokens=300))
    options |= dict(learning_rate=0.5)
    whole = fork(train, 3, folder=tmp_path / "run", save_at=(2,), **options)
    resumed = fork(train, 3, folder=tmp_path / "run", resume=True, **options)
    assert_same_run(resumed, whole)
    (emulated,) = fork(train, 1, folder=tmp_path / "emulated", **options)
    assert_same_as_emulated(whole, emulated)
    (stale,) = fork(train, 1, folder=tmp_path / "stale", **options | dict(calibration_every=0))
    assert whole[0]["budgets"] == resumed[0]["budgets"] == emulated["budgets"] != stale["budgets"]


# Sockets -------------------------------------------------------------------------------------------------------------


def test_bytes_on_sockets_are_those_of_the_budgets(tmp_path):
    settings = dict(preset="anchored", boundary_budget=0.05, calibration_tokens=600, busy_seconds=0.1)
    settings |= dict(boundary_target_step_seconds=0.9, link_bits_per_second=10e6)
    result = traffic.run(tmp_path, 3, 1, **settings)
    budgets, boundaries = result["report"]["boundary_budgets"], result["boundaries"]
    assert min(budgets) >= 0.05 and budgets[0] != budgets[1]
    dense_bytes = traffic.ROWS * traffic.ACCUMULATION * 2 * 16 * 576 * 2
    for budget, sent in zip(budgets, boundaries, strict=True):
        assert 0.99 * budget * dense_bytes < sent["forward_bytes"] + sent["backward_bytes"] <= budget * dense_bytes
    planned, framing = result["planned"]["pipeline"], result["framing"]["pipeline"]
    for measured in result["measured"]["pipeline"]:
        assert measured == pytest.approx(planned + framing, rel=0.03)


def log_and_train(rank: int, **options) -> tuple[dict, list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hf_meshadapt.adaptive")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return train(rank, **options), messages


def test_links_and_passes_are_measured_and_logged_once(tmp_path):
    options = ADAPTIVE | dict(link_bits_per_second=None, busy_seconds=None, max_steps=1, eval_strategy="no")
    options |= dict(kind="gpt2", pipeline_stages=2, boundary_target_step_seconds=60.0)
    results = fork(log_and_train, 4, folder=tmp_path, **options)
    assert len({run["budgets"] for run, _ in results}) == 1
    assert results[0][0]["budgets"][0] > FLOOR  # a minute is long for loopback
    assert [len(messages) for _, messages in results] == [1, 0, 0, 0]
    (message,) = results[0][1]
    assert "Boundary budgets: " in message and "(target 60 s)" in message
    megabits = [float(number) for number in message.split("backward: ")[1].split()]
    assert len(megabits) == 2 and all(1.0 < rate < 1e6 for rate in megabits)
