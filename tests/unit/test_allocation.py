"""Adaptive budgets: the division of a step's time against an obvious oracle, and what must hold of any division."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.allocation import (
    GRID_RATIO,
    Curve,
    StepTime,
    allocate_budgets,
    budget_grid,
    distortion_curve,
    lower_hull,
)
from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.transform import TransformCodec, fit_tables
from hf_meshadapt.config import BoundaryConfig

HIDDEN, LENGTH = 32, 16


# Step time -----------------------------------------------------------------------------------------------------------


def test_step_time_of_two_boundaries_worked_out_by_hand():
    time = StepTime(10.0, [(1.0, 2.0), (3.0, 0.5)], microbatches=4, accumulation=2)
    # forward 1 x 5 and 3 x 2: 5 + 6 + 3 x 6; backward 2 x 1 and 0.5 x 8: 2 + 4 + 3 x 4
    assert time.seconds([(5, 1), (2, 8)]) == 10.0 + 2 * (29.0 + 18.0)


def test_boundaries_of_one_link_share_it():
    rates = [(1.0, 0.0)] * 3
    assert StepTime(0.0, rates, microbatches=3).seconds([(5, 0), (1, 0), (5, 0)]) == 11 + 2 * 5
    assert StepTime(0.0, rates, microbatches=3, stages=2).seconds([(5, 0), (1, 0), (5, 0)]) == 11 + 2 * 10


def slowest_first_come(time: StepTime, sent) -> float:
    """One direction of an accumulation step, event by event: a link carries one microbatch at a time."""
    free = [0.0] * len(sent)
    for _ in range(time.microbatches):
        arrived = 0.0
        for boundary, count in enumerate(sent):
            arrived = free[boundary] = max(arrived, free[boundary]) + time.seconds_per_byte[boundary][0] * count
    return free[-1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(1, 6))
def test_step_time_is_that_of_a_pipeline_of_links(sent, microbatches):
    time = StepTime(0.0, [(1.0, 0.0)] * len(sent), microbatches)
    assert time.seconds([(count, 0) for count in sent]) == pytest.approx(slowest_first_come(time, sent))


# Grid and hull -------------------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 1.0))
def test_grid_runs_from_the_floor_to_one(floor):
    grid = budget_grid(floor)
    assert grid[0] == floor and grid[-1] == 1.0
    assert all(low < high <= low * GRID_RATIO * (1 + 1e-9) for low, high in itertools.pairwise(grid))


def slow_hull(places, values) -> list[float]:
    """At every place the lowest chord over it."""
    chords = list(itertools.combinations(range(len(places)), 2))
    at = lambda a, b, x: values[a] + (values[b] - values[a]) * (x - places[a]) / (places[b] - places[a])  # noqa: E731
    return [min([values[i], *(at(a, b, places[i]) for a, b in chords if a <= i <= b)]) for i in range(len(places))]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7))
def test_hull_is_the_lowest_chord(values):
    places = [1.5**i for i in range(len(values))]
    assert lower_hull(places, values) == pytest.approx(slow_hull(places, values))


# Allocation ----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw, most=4):
    """Curves that never rise, links, and a target."""
    grid = budget_grid(draw(st.sampled_from([0.5, 0.7, 0.8, 1.0])))
    curves, rates = [], []
    for _ in range(draw(st.integers(1, most))):
        falls = draw(st.lists(st.integers(0, 30), min_size=len(grid), max_size=len(grid)))
        scale = draw(st.integers(10, 2000))
        sent = [(math.floor(3 * scale * budget), math.floor(scale * budget)) for budget in grid]
        curves.append(Curve(grid, sent, [float(sum(falls[i:])) for i in range(len(grid))]))
        rates.append((draw(st.floats(1e-6, 1e-3)), draw(st.floats(1e-6, 1e-3))))
    shape = dict(microbatches=draw(st.integers(1, 4)), accumulation=draw(st.integers(1, 3)))
    time = StepTime(draw(st.floats(0.0, 2.0)), rates, **shape, stages=draw(st.integers(2, 5)))
    return curves, time, draw(st.floats(0.01, 40.0))


def obvious(curves, time, target) -> list[float]:
    """The rule read aloud, everything anew for every raise."""
    budgets = [curve.budgets[0] for curve in curves]

    def bytes_at(budgets):
        return [curve.sent_bytes[curve.budgets.index(budget)] for curve, budget in zip(curves, budgets)]

    while True:
        candidates = []
        for index, curve in enumerate(curves):
            place, hull = curve.budgets.index(budgets[index]), slow_hull(curve.budgets, curve.distortions)
            if place + 1 == len(hull) or hull[place] - hull[place + 1] < 1e-9:
                continue
            alone = [
                tuple(r * s for r, s in zip(time.seconds_per_byte[index], curve.sent_bytes[i]))
                for i in range(len(hull))
            ]
            cost = sum(alone[place + 1]) - sum(alone[place])
            candidates.append(((hull[place] - hull[place + 1]) / cost if cost else math.inf, -index))
        if not candidates:
            return budgets
        index = -max(candidates)[1]
        curve = curves[index]
        raised = list(budgets)
        raised[index] = curve.budgets[curve.budgets.index(budgets[index]) + 1]
        if time.seconds(bytes_at(raised)) > target:
            return budgets
        budgets = raised


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_allocation_is_the_rule_read_aloud(seed):
    """Random reals rather than hypothesis's round ones: rounding decides no tie between the two."""
    draw = torch.Generator().manual_seed(seed)
    real = lambda low, high: float(torch.empty((), dtype=torch.float64).uniform_(low, high, generator=draw))  # noqa: E731
    grid = budget_grid(0.6)
    curves, rates = [], []
    for _ in range(3):
        values = sorted((real(0, 1) ** 3 for _ in grid), reverse=True)
        scale = real(100, 2000)
        curves.append(Curve(grid, [(3 * scale * budget, scale * budget) for budget in grid], values))
        rates.append((real(1e-5, 1e-3), real(1e-5, 1e-3)))
    time = StepTime(real(0, 1), rates, microbatches=3, accumulation=2, stages=3)
    target = real(0.5, 1.5) * time.seconds([curve.sent_bytes[5] for curve in curves])
    assert allocate_budgets(curves, time, target) == obvious(curves, time, target)


def test_no_division_of_the_same_transfers_is_better():
    """By trying all of them, for convex curves, where greedy is optimal at what it spends."""
    grid = [0.2, 0.4, 0.6, 0.8, 1.0]
    curves = [
        Curve(grid, [(1000 * budget, 500 * budget) for budget in grid], [weight * 0.5**i for i in range(5)])
        for weight in (1.0, 3.0, 8.0)
    ]
    time = StepTime(0.0, [(1e-3, 1e-3), (2e-3, 1e-3), (4e-3, 2e-3)])

    def spent(levels):
        return time.seconds([curve.sent_bytes[level] for curve, level in zip(curves, levels)])

    def felt(levels):
        return sum(curve.distortions[level] for curve, level in zip(curves, levels))

    seen = set()
    for target in (0.5, 2.0, 4.0, 5.0, 6.0, 7.0, 9.0, 20.0):
        levels = [grid.index(budget) for budget in allocate_budgets(curves, time, target)]
        seen.add(tuple(levels))
        others = itertools.product(range(5), repeat=3)
        assert not [other for other in others if spent(other) <= spent(levels) and felt(other) < felt(levels) - 1e-12]
    assert len(seen) > 4


@settings(max_examples=300, deadline=None)
@given(problems())
def test_never_below_the_floor_never_over_the_target_and_the_same_again(problem):
    curves, time, target = problem
    budgets = allocate_budgets(curves, time, target)
    floors = [curve.budgets[0] for curve in curves]
    assert all(budget >= floor for budget, floor in zip(budgets, floors))
    sent = [curve.sent_bytes[curve.budgets.index(budget)] for curve, budget in zip(curves, budgets)]
    assert time.seconds(sent) <= target or budgets == floors
    assert allocate_budgets(curves, time, target) == budgets


@settings(max_examples=300, deadline=None)
@given(problems(), st.floats(1.0, 3.0))
def test_more_time_takes_nothing_away(problem, factor):
    curves, time, target = problem
    less, more = allocate_budgets(curves, time, target), allocate_budgets(curves, time, factor * target)
    assert all(a <= b for a, b in zip(less, more))


@settings(max_examples=300, deadline=None)
@given(problems(), st.data())
def test_a_faster_link_gets_no_fewer_bytes(problem, data):
    curves, time, target = problem
    index = data.draw(st.integers(0, len(curves) - 1))
    rates = list(time.seconds_per_byte)
    rates[index] = tuple(rate * data.draw(st.floats(0.01, 1.0)) for rate in rates[index])
    faster = replace(time, seconds_per_byte=rates)
    assert allocate_budgets(curves, faster, target)[index] >= allocate_budgets(curves, time, target)[index]


def test_of_equals_the_faster_link_and_the_more_sensitive_boundary_get_more():
    grid = budget_grid(0.05)
    curve = Curve(grid, [(750 * b, 250 * b) for b in grid], [1.0 - b + 0.2 * b * b for b in grid])
    time = StepTime(0.0, [(1e-3, 1e-3), (5e-3, 5e-3)])
    first, second = allocate_budgets([curve, curve], time, 2.5)
    assert first > second >= 0.05
    felt_more = replace(curve, distortions=[10 * value for value in curve.distortions])
    first, second = allocate_budgets([curve, felt_more], replace(time, seconds_per_byte=[(1e-3, 1e-3)] * 2), 1.2)
    assert first < second


# Distortion curve ----------------------------------------------------------------------------------------------------


def fit_of(seed: int) -> BoundaryFit:
    torch.manual_seed(seed)
    covariance = lambda: torch.cov(torch.randn(HIDDEN, 100) * torch.logspace(0, -2, HIDDEN)[:, None])  # noqa: E731
    tables = [fit_tables(covariance(), None, HIDDEN) for _ in range(2)]
    return BoundaryFit(torch.zeros(1, HIDDEN), *tables, 0.0)


def test_curves_fall_with_the_budget_and_scale_with_what_the_loss_feels():
    config = BoundaryConfig("transform", budget=0.1, exact_first_token=True)
    grid = budget_grid(0.1)
    curve = distortion_curve(config, fit_of(0), 2.0, HIDDEN, LENGTH, grid)
    assert all(low >= high >= 0 for low, high in itertools.pairwise(curve)) and curve[0] > 2 * curve[-1]
    doubled = distortion_curve(config, fit_of(0), 4.0, HIDDEN, LENGTH, grid)
    assert doubled == pytest.approx([2 * value for value in curve])
    # All is relative to the hidden state's error: how large the gradients' own variances are plays no part.
    fit = fit_of(0)
    fit.backward.variances *= 7.0
    assert distortion_curve(config, fit, 2.0, HIDDEN, LENGTH, grid) == pytest.approx(curve)


def test_the_curve_is_the_codecs_distortion_at_the_bytes_of_a_token():
    # 0.5 x 0.75 x 2 x 32 x 2 bytes = 48 a token forward, 16 backward; without an exact token all get the same.
    config, fit = BoundaryConfig("transform", budget=0.5), fit_of(1)
    forward, backward = (TransformCodec(tables).distortions(64) for tables in (fit.forward, fit.backward))
    expected = 3.0 / HIDDEN * (forward[48] + forward[0] * backward[16] / backward[0])
    (value,) = distortion_curve(config, fit, 3.0, HIDDEN, LENGTH, [0.5])
    assert value == pytest.approx(float(expected))
    # A whole first token takes 64 of 768 bytes; 704 / 15 lie between whole bytes.
    (value,) = distortion_curve(replace(config, exact_first_token=True), fit, 3.0, HIDDEN, LENGTH, [0.5])
    between = forward[46] + (704 / 15 - 46) * (forward[47] - forward[46])
    assert value == pytest.approx(float(3.0 / HIDDEN * (between + forward[0] * backward[16] / backward[0])))


def test_boundaries_of_other_budgets_have_other_sizes():
    config = BoundaryConfig("transform", budget=0.1, budgets=(0.1, 0.4))
    assert config.at(1) == BoundaryConfig("transform", budget=0.4) and config.at(0).budget == 0.1
    plain = BoundaryConfig("transform", budget=0.1)
    assert plain.at(3) is plain
    with pytest.raises(AssertionError, match="ask at"):
        config.sequence_bytes(LENGTH, HIDDEN, "forward")
