"""When snapshots are taken and priors applied: rules, and a simulated run against what they promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.anchor.schedule import (
    NO_VERSION,
    AnchorHistory,
    AnchorSchedule,
    AnchorTraffic,
    agree,
    agree_on_next,
    interval_warning,
    tell,
)


@pytest.mark.parametrize(
    "held,applied,version",
    [
        ([[10], [10]], NO_VERSION, 10),
        ([[10], [10]], 10, NO_VERSION),
        ([[10, 20], [10]], NO_VERSION, 10),
        ([[10, 20], [20, 10]], NO_VERSION, 20),
        ([[20], [10]], NO_VERSION, NO_VERSION),  # the least newest, 10, is not held by all
        ([[20, 30], [10, 20]], 10, 20),
        ([[10, NO_VERSION], [NO_VERSION, NO_VERSION]], NO_VERSION, NO_VERSION),
        ([[0]], NO_VERSION, 0),
        ([[], [0]], NO_VERSION, NO_VERSION),
        ([], NO_VERSION, NO_VERSION),
    ],
)
def test_agreement(held, applied, version):
    assert agree(held, applied) == version


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 6), max_size=4), min_size=1, max_size=4), st.integers(-1, 6))
def test_what_is_agreed_on_is_held_by_all_new_and_the_newest(held, applied):
    version = agree(held, applied)
    candidates = [v for v in range(7) if v > applied and all(v in versions for versions in held)]
    assert version == (candidates[-1] if candidates else NO_VERSION)


def test_deterministic_rules():
    schedule = AnchorSchedule(anchor_every=3, deterministic=True)
    assert [step for step in range(10) if schedule.snapshot_due(step, 0, [False])] == [0, 3, 6, 9]
    assert [schedule.due_version(step) for step in range(8)] == [-1, -1, -1, 0, -1, -1, 3, -1]


@settings(max_examples=40, deadline=None)
@given(
    anchor_every=st.integers(1, 5),
    num_stages=st.integers(1, 3),
    transfers=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=60, max_size=60),
    pass_steps=st.integers(0, 6),
)
def test_a_simulated_run(anchor_every, num_stages, transfers, pass_steps):
    """Snapshots are at least K apart and never overlap on a link; all stages apply the same versions in order."""
    schedule, history = AnchorSchedule(anchor_every), AnchorHistory()
    free_at = [0] * num_stages
    arrives = []  # (step, stage, version) of priors
    held = [[] for _ in range(num_stages)]
    taken, applied = [], []
    for step in range(60):
        for at, stage, version in [entry for entry in arrives if entry[0] <= step]:
            held[stage].append(version)
            arrives.remove((at, stage, version))
        version = agree(held, history.applied_version)
        if version != NO_VERSION:
            history.applied(version)
            applied.append(version)
            held = [[v for v in versions if v > version] for versions in held]
        ready = [step >= at for at in free_at]
        if schedule.snapshot_due(step, history.last_version, ready):
            assert all(ready)
            history.took_snapshot(step)
            taken.append(step)
            durations = transfers[step][:num_stages]
            free_at = [step + duration for duration in durations]
            answered = step + max(durations) + pass_steps
            arrives += [(answered + d, stage, step) for stage, d in enumerate(durations)]
        history.stepped(step, live=schedule.is_live(step, history.applied_version))
    gaps = [later - earlier for earlier, later in zip(taken, taken[1:])]
    assert all(gap >= max(anchor_every, max(transfers[at][:num_stages])) for gap, at in zip(gaps, taken))
    assert applied == sorted(set(applied)) and set(applied) <= set(taken)
    assert history.num_snapshots == len(taken) and history.num_applied == len(applied)
    if gaps:
        assert history.effective_anchor_every == sum(gaps) / len(gaps)
    if history.num_live_steps:
        assert history.mean_age_steps >= 0 and history.num_live_steps <= history.num_steps == 60


def test_staleness():
    schedule = AnchorSchedule(anchor_every=10, max_staleness_steps=30)
    assert [schedule.is_live(step, 0) for step in (0, 30, 31)] == [True, True, False]
    assert not schedule.is_live(5, NO_VERSION)
    assert AnchorSchedule(anchor_every=10).is_live(10**9, 0)
    history = AnchorHistory()
    assert history.mean_age_steps is None and history.effective_anchor_every is None
    history.took_snapshot(0)
    history.applied(0)
    for step in (10, 11, 12):
        history.stepped(step, live=True)
    history.stepped(40, live=False)
    assert history.mean_age_steps == 11 and history.age_steps(12) == 12
    assert (history.num_live_steps, history.num_steps) == (3, 4)


def test_history_round_trip():
    history, other = AnchorHistory(), AnchorHistory()
    history.took_snapshot(4)
    history.applied(4)
    history.stepped(9, live=True)
    other.load_state_dict(history.state_dict())
    assert vars(other) == vars(history)
    assert set(history.state_dict()) == set(vars(history))


@pytest.mark.parametrize(
    "arguments,said",
    [
        (dict(anchor_every=0), "anchor_every=0"),
        (dict(anchor_every=10, max_staleness_steps=9), "max_staleness_steps=9 must be at least anchor_every=10"),
    ],
)
def test_arguments_are_checked(arguments, said):
    with pytest.raises(ValueError, match=said):
        AnchorSchedule(**arguments)


def test_bytes_per_step_and_the_warning():
    traffic = AnchorTraffic(snapshot_bytes=(10_000_000, 20_000_000), prior_bytes=(1_000_000, 2_000_000))
    assert traffic.bytes_per_step(10) == 3_300_000 and traffic.bytes_per_step(10, replicas=2) == 3_600_000
    assert traffic.round_seconds(20e6) == 8
    assert interval_warning(traffic, 10, step_seconds=0.8, link_bits_per_second=20e6) is None
    text = interval_warning(traffic, 10, step_seconds=0.5, link_bits_per_second=20e6)
    assert "anchor_every=10 is too small" in text and "20.0 MB at 20 Mbit/s takes 8.0 s" in text
    assert "10 steps of 0.50 s take 5.0 s" in text and "set anchor_every=16" in text
    text = interval_warning(traffic, 10, step_seconds=0.5, link_bits_per_second=200e6, pass_seconds=12.0)
    assert "the anchor's passes take 12.0 s" in text and "set anchor_every=24" in text
    assert AnchorTraffic((), ()).round_seconds(1e6) == 0


@pytest.mark.parametrize(
    "told,applied,expected",
    [
        ([[], []], 3, NO_VERSION),
        ([[4, 8], [4, 8]], 3, 8),
        ([[4.5, 8], [4.5, 8, NO_VERSION]], 3, 4),  # fits are not passed over
        ([[4.5, 8], [4.5, 8]], 4, 8),
        ([[4.5, 8], [8]], 3, 8),  # a stage that lacks them
        ([[4.5, 6.5, 8], [4.5, 6.5]], 3, 4),
        ([[0.5]], NO_VERSION, 0),
    ],
)
def test_a_version_with_fits_is_not_passed_over(told, applied, expected):
    assert agree_on_next(told, applied) == expected
    assert [tell(4, True), tell(8, False)] == [4.5, 8]
