"""How often an anchor takes snapshots where nobody said: the least interval that a budget allows."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.anchor.budget import LEAST_CHOSEN, bytes_warning, choose_interval, longest_interval, unused_warning
from hf_meshadapt.anchor.config import AnchorConfig
from hf_meshadapt.anchor.schedule import NO_VERSION, AnchorSchedule, AnchorTraffic
from hf_meshadapt.anchoring.traffic import warn_of_traffic

from ..runs import SaveAt
from .test_emulated_anchor import MASKED, ROWS, Stream, assert_same, make, one_thread, weights  # noqa: F401

# Nobody says how often. The budget is what makes it 12 with these models and batches.
UNSET = dict(anchor=True, prior_rank=8, anchor_budget=0.42)
CHOSEN = 12
TRAFFIC = "hf_meshadapt.anchoring.traffic"


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(*[st.integers(0, 10**6)] * 3), min_size=1, max_size=3),
    calibration_every=st.integers(1, 60),
    dense_bytes=st.integers(1, 10**6),
    budget=st.floats(1e-3, 4),
    longest=st.integers(0, 40),
    replicas=st.integers(1, 3),
)
def test_it_is_the_least_that_keeps_the_budget(sizes, calibration_every, dense_bytes, budget, longest, replicas):
    snapshots, priors, fits = zip(*sizes)
    traffic = AnchorTraffic(snapshots, priors, fits, calibration_every)

    def share(every: int) -> float:
        """Of many rounds, message by message; fits come with the first prior that is due for them."""
        steps_between_fits = next(k for k in range(every, 10**4, every) if k >= calibration_every)
        sent = sum(snapshots) / every + replicas * (sum(priors) / every + sum(fits) / steps_between_fits)
        return sent / dense_bytes

    every = choose_interval(traffic, dense_bytes, budget, longest, replicas)
    assert LEAST_CHOSEN <= every <= max(LEAST_CHOSEN, longest)
    assert share(every) <= budget * (1 + 1e-9) or every == max(LEAST_CHOSEN, longest)
    assert all(share(less) >= budget * (1 - 1e-9) for less in range(LEAST_CHOSEN, every))


def test_without_a_pipeline_it_is_the_least():
    assert choose_interval(AnchorTraffic((10**9,), (10**9,)), 0.0, 0.25, 23) == LEAST_CHOSEN == 10


@pytest.mark.parametrize(
    "max_staleness_steps,refresh_steps,longest", [(50, 4, 23), (51, 4, 24), (26, 4, 11), (50, 1, 25)]
)
def test_at_the_longest_interval_every_prior_is_used_to_its_last_step(max_staleness_steps, refresh_steps, longest):
    def oldest(anchor_every: int) -> int:
        schedule, in_use, ages = AnchorSchedule(anchor_every, deterministic=True), NO_VERSION, []
        for step in range(5 * anchor_every):
            # A version that is due is in use once it has been taken in.
            taken_in = schedule.due_version(step - refresh_steps + 1)
            in_use = in_use if taken_in == NO_VERSION else taken_in
            ages += [step - in_use] if in_use != NO_VERSION else []
        return max(ages)

    assert longest_interval(max_staleness_steps, refresh_steps) == longest
    assert oldest(longest) < max_staleness_steps <= oldest(longest + 1)
    assert oldest(10) == 18 + refresh_steps


def test_an_anchor_that_costs_more_than_its_budget_is_told():
    assert bytes_warning(25e6, 100e6, 10) is None and bytes_warning(5e6, 0, 10) is None
    warning = bytes_warning(60e6, 100e6, 10)
    assert warning.startswith("the anchor takes 60 MB per step, 60% of what the pipeline would send uncoded (100 MB)")
    assert "more than 25%. Set anchor_every to 24, make batches larger" in warning
    assert bytes_warning(60e6, 100e6, 23, 0.6, 50) is None
    warning = bytes_warning(60e6, 100e6, 23, 0.5, 50)
    assert "more than 50%. anchor_every=23 was chosen and is bounded by max_staleness_steps=50. Give" in warning
    assert "anchor_snapshot_bits=4" in warning and "prior_rank" in warning


def test_until_it_is_chosen_there_is_no_snapshot_but_the_first():
    for deterministic in (True, False):
        schedule = AnchorConfig(deterministic=deterministic).schedule
        assert [step for step in range(100) if schedule.snapshot_due(step, -1 if step == 0 else 0, [True])] == [0]
    assert all(AnchorConfig(deterministic=True).schedule.due_version(step) == NO_VERSION for step in range(100))


# Runs in one process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog):
    """What was logged of an anchor's costs so far, as (level, message)."""
    caplog.set_level(logging.INFO, TRAFFIC)
    return lambda: [(each.levelname, each.message) for each in caplog.records if each.name == TRAFFIC]


def test_a_run_chooses_after_its_first_step_and_a_resumed_one_takes_it_over(tmp_path, said):
    options = {**UNSET, **MASKED, "max_steps": 18}
    whole = make(tmp_path, **options)
    whole.add_callback(SaveAt((1, 13)))
    whole.train()
    plan = whole.engine.plan(ROWS, 16, 1)
    share = plan.axis_bytes("anchor") / plan.dense().axis_bytes("pipeline")
    assert share <= 0.42 < share * CHOSEN / (CHOSEN - 1)
    what = f"snapshots and priors take {share:.0%} of what the pipeline would send uncoded"
    assert said() == [("INFO", f"anchor_every={CHOSEN}: {what}")]
    report = whole.mesh_report()["anchor"]
    assert (report["anchor_every"], report["anchor_every_chosen"], report["num_snapshots"]) == (CHOSEN, True, 2)
    # Of step 0, known from step 12 on, in use after three steps of taking it in: as with the same interval given.
    assert [row["weight"] > 0 for row in whole.metrics] == [step >= CHOSEN + 3 for step in range(18)]
    assert unused_warning(CHOSEN + 4, CHOSEN, 4) is None  # of which step CHOSEN + 4 is the first
    given = make(tmp_path / "given", **{**options, "anchor_budget": None, "anchor_every": CHOSEN})
    given.train()
    assert_same(weights(given), weights(whole))
    assert given.anchoring.report() == report | {"anchor_every_chosen": False}
    for step in (1, 13):
        resumed = make(tmp_path, **{**options, "anchor_budget": 9.0})  # by which it would choose another one
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same(weights(resumed), weights(whole))
        assert resumed.metrics == whole.metrics[step:] and resumed.anchoring.report() == report
    assert len(said()) == 1


def test_what_passes_on_to_replicas_counts_and_every_run_chooses(tmp_path, said):
    trainer = make(tmp_path, **MASKED, **{**UNSET, "anchor_budget": 0.3}, max_steps=1, data_parallel_replicas=2)
    for num_runs in (1, 2):
        trainer.train()
        every, plan = trainer.anchoring.config.anchor_every, trainer.engine.plan(ROWS, 16, 1)
        dense_bytes, traffic = plan.dense().axis_bytes("pipeline"), plan.anchor.traffic
        assert plan.axis_bytes("anchor") == pytest.approx(traffic.bytes_per_step(every, replicas=2))
        round_bytes = sum(traffic.snapshot_bytes) + 2 * sum(traffic.prior_bytes)
        assert 10 < every == math.ceil(round_bytes / (0.3 * dense_bytes)) < 23
        assert len(said()) == num_runs


def test_the_longest_of_the_replicas_batches_counts(tmp_path):
    trainer = make(tmp_path, **UNSET, max_steps=1)
    # As if the other replica's batch had four times the tokens: a quarter of the share.
    trainer.engine.gather_over_replicas = lambda mine: torch.stack([mine, 4 * mine])
    trainer.train()
    assert trainer.anchoring.config.anchor_every == 10


def test_where_nothing_is_sent_nobody_is_warned_and_one_stage_has_the_least(tmp_path, said):
    trainer = make(tmp_path / "cap", **{**UNSET, "anchor_budget": 1e-3}, max_steps=1)
    trainer.train()
    assert trainer.anchoring.config.anchor_every == 23
    alone = make(tmp_path / "alone", anchor=True, pipeline_stages=1, max_steps=1)
    alone.train()
    assert alone.anchoring.config.anchor_every == 10 and [level for level, _ in said()] == ["INFO", "INFO"]
    assert said()[1][1] == "anchor_every=10: there is no pipeline to compare snapshots and priors with"


def test_what_a_given_interval_costs_is_told_when_asked(tmp_path, said):
    trainer = make(tmp_path, anchor=True, anchor_every=2, prior_rank=8, max_steps=1)
    trainer.train()
    assert not said()
    warn_of_traffic(trainer, 1)  # at the first log, on a mesh
    ((level, warning),) = said()
    assert level == "WARNING" and "Set anchor_every to 20, " in warning


def test_a_run_that_ends_before_its_first_prior_is_told_so_once(tmp_path, caplog):
    trainer = make(tmp_path, anchor=True, anchor_every=5, prior_rank=8, max_steps=8)
    trainer.train()
    (warning,) = [each.message for each in caplog.records if "no prior will correct a step" in each.message]
    assert "the first is in use in step 9 (anchor_every=5), and the run has 8 steps. Set anchor_every to 2" in warning
    assert not any(row["weight"] for row in trainer.metrics)
    caplog.clear()
    make(tmp_path, anchor=True, anchor_every=5, prior_rank=8, max_steps=9).train()
    assert "no prior will correct" not in caplog.text


def test_the_shard_of_a_stream_does_not_depend_on_what_is_chosen(tmp_path):
    trainer = make(tmp_path, **UNSET, max_steps=2, trainer={"train_dataset": Stream()})
    trainer.train()
    assert trainer.anchoring.batches.every == 10 != trainer.anchoring.config.anchor_every


def test_a_run_that_goes_on_with_an_anchor_takes_no_snapshot_before_it_has_chosen(tmp_path):
    without = make(tmp_path, max_steps=10)
    without.add_callback(SaveAt((10,)))
    without.train()
    trainer = make(tmp_path, **UNSET, max_steps=14)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert trainer.anchoring.config.anchor_every == CHOSEN == trainer.anchoring.history.first_version
    assert set(trainer.anchoring.pending) == {CHOSEN}
