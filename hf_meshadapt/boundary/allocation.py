"""Divides the time of a step among boundaries: each gets the budget that the loss gains most from. Pure code.

A step is predicted to take, in seconds,

    T = fixed + A sum over both directions of (sum_b t_b + (M - 1) max_l sum_{b on l} t_b)

t_b the time in which one microbatch crosses boundary b, A accumulation steps, M microbatches, l the links between
stages. The first microbatch crosses all boundaries, the others follow at the pace of the busiest link; as in GPipe all
forward passes come before all backward ones. Transfers and computation are taken one after the other, so that T is too
long where they overlap (schedules 1f1b and interleaved overlap the directions too).

Source: greedy by marginal gain, Fox, Discrete optimization via marginal analysis (1966). What is gained is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..config import BoundaryConfig
from .fitting import BoundaryFit
from .transform import TransformCodec

# Budgets that are tried lie at most so far apart.
GRID_RATIO = 1.05
# Bytes, or seconds per byte: forward and backward.
BothWays = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """What one boundary sends and loses at every budget of a grid.

    Attributes:
        budgets: ascending; the first is the floor.
        sent_bytes: of one microbatch, forward and backward, by budget.
        distortions: what the loss feels of coding, by budget, in a unit that all boundaries share.
    """

    budgets: Sequence[float]
    sent_bytes: Sequence[BothWays]
    distortions: Sequence[float]


@dataclass(frozen=True)
class StepTime:
    """Predicts the seconds of a step; see the module.

    Attributes:
        fixed_seconds: what does not depend on budgets.
        seconds_per_byte: forward and backward, by boundary.
        microbatches: of an accumulation step, M.
        accumulation: accumulation steps, A.
        stages: boundaries that are a multiple of it apart share a link.
    """

    fixed_seconds: float
    seconds_per_byte: Sequence[BothWays]
    microbatches: int = 1
    accumulation: int = 1
    stages: int = 1 << 30

    def seconds(self, sent_bytes: Sequence[BothWays]) -> float:
        """T, given the bytes of one microbatch by boundary."""
        total = 0.0
        for way in (0, 1):
            times = [rate[way] * sent[way] for rate, sent in zip(self.seconds_per_byte, sent_bytes)]
            busiest = max((sum(times[link :: self.stages]) for link in range(min(self.stages, len(times)))), default=0)
            total += sum(times) + (self.microbatches - 1) * busiest
        return self.fixed_seconds + self.accumulation * total


def budget_grid(floor: float) -> list[float]:
    """Budgets from the floor to 1, both exact, evenly spaced in their logarithm and at most `GRID_RATIO` apart."""
    steps = math.ceil(math.log(1.0 / floor) / math.log(GRID_RATIO))
    return [floor, *(floor ** (1.0 - i / steps) for i in range(1, steps)), *([1.0] if steps else [])]


def allocate_budgets(curves: Sequence[Curve], time: StepTime, target_seconds: float) -> list[float]:
    """A budget for every boundary.

    From the floors on, the boundary whose next raise lowers the distortion most per second of transfer is raised,
    until that raise would not fit or nothing is gained any more. The order of raises does not depend on the target,
    so that more time never takes bytes from a boundary; nor does a faster link from its own.

    Args:
        curves: by boundary; distortions are taken for their lower convex hulls over budgets, since a stretch on which
            whole bits buy nothing must not end the search.
        target_seconds: what a step may take.

    Returns:
        By boundary; the floors, should even these not fit.
    """
    hulls = [lower_hull(curve.budgets, curve.distortions) for curve in curves]
    levels = [0] * len(curves)
    while (chosen := _best_raise(curves, hulls, levels, time)) is not None:
        raised = [level + (boundary == chosen) for boundary, level in enumerate(levels)]
        if time.seconds(sent_at(curves, raised)) > target_seconds:
            break
        levels = raised
    return [curve.budgets[level] for curve, level in zip(curves, levels)]


def sent_at(curves: Sequence[Curve], levels: Sequence[int]) -> list[BothWays]:
    """Bytes of one microbatch by boundary, at a place in each one's grid."""
    return [curve.sent_bytes[level] for curve, level in zip(curves, levels)]


def _best_raise(curves: Sequence[Curve], hulls: list[list[float]], levels: list[int], time: StepTime) -> int | None:
    """The boundary with the largest fall per second to its next budget, the first of equals; None where none falls."""
    best, chosen = 0.0, None
    for boundary, (curve, hull, level) in enumerate(zip(curves, hulls, levels)):
        if level + 1 < len(hull) and (fall := hull[level] - hull[level + 1]) > 0:
            before, after = curve.sent_bytes[level : level + 2]
            rates = time.seconds_per_byte[boundary]
            seconds = sum(rate * (more - less) for rate, less, more in zip(rates, before, after))
            per_second = fall / seconds if seconds > 0 else math.inf
            if per_second > best:
                best, chosen = per_second, boundary
    return chosen


def lower_hull(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Values of the largest convex function below them; places ascend."""
    corners: list[int] = []
    for new in range(len(places)):
        while len(corners) > 1:
            a, b = corners[-2:]
            slope_before = (values[b] - values[a]) * (places[new] - places[b])
            if slope_before < (values[new] - values[b]) * (places[b] - places[a]):
                break
            corners.pop()
        corners.append(new)
    hull = [float(values[0])]
    for a, b in zip(corners, corners[1:]):
        for i in range(a + 1, b + 1):
            share = (places[i] - places[a]) / (places[b] - places[a])
            hull.append(values[a] + share * (values[b] - values[a]))
    return hull


def distortion_curve(
    config: BoundaryConfig, fit: BoundaryFit, energy: float, hidden_size: int, length: int, budgets: Sequence[float]
) -> list[float]:
    """What the loss feels of a boundary's transform codec at each budget.

        energy / H (D_f + D_f(0) D_b / D_b(0))

    D_f and D_b are the codec's distortions of a hidden state and of a gradient at the bytes that a token gets, D(0)
    those of a token that is not sent. Times the mean squared entry of a gradient, D_f is the expected square of the
    loss's first-order change (e . g)^2, which compares boundaries. Errors of a gradient have no such unit: they count
    as the same relative error of the hidden state would. Padding and unequal shares of tokens are left out.

    Args:
        fit: with both transforms.
        energy: mean squared norm of a token's gradient (`BoundaryMoments.gradient_energy`).
        length: tokens of a sequence.
    """
    parts = []
    for direction, tables in (("forward", fit.forward), ("backward", fit.backward)):
        exact = config.exact_first_token and direction == "forward"
        at = [
            _token_bytes(replace(config, budget=b, budgets=None), hidden_size, length, direction, exact)
            for b in budgets
        ]
        by_bytes = TransformCodec(tables).distortions(math.ceil(max(at)) + 1)
        parts.append(([_between(by_bytes, count) for count in at], float(by_bytes[0])))
    (forward, nothing), (backward, no_gradient) = parts
    relative = nothing / no_gradient if no_gradient > 0 else 0.0
    return [energy / hidden_size * (f + relative * b) for f, b in zip(forward, backward)]


def _token_bytes(config: BoundaryConfig, hidden_size: int, length: int, direction: str, exact: bool) -> float:
    """Mean bytes of a coded token; a first token that travels whole is left out with its bytes."""
    sequence_bytes, whole_bytes = config.sequence_bytes(length, hidden_size, direction), 2 * hidden_size
    if exact and length > 1 and whole_bytes <= sequence_bytes:
        return (sequence_bytes - whole_bytes) / (length - 1)
    return sequence_bytes / length


def _between(values: Tensor, place: float) -> float:
    """Linear between whole places: a sequence's odd bytes go to some of its tokens."""
    low = math.floor(place)
    return float(values[low] + (place - low) * (values[low + 1] - values[low]))
