"""How long a sequence's code is expected to be at a quantiser step, the smallest step that fits, and the gains' table.

Everything is in units of 1/64 octave. A token's *level* is its gain less its own step's offset: what counts for its bits
is the level less the step that all tokens share.
"""

from __future__ import annotations

import numpy as np

from .rans import compiled
from .symbol_model import CLASS_UNITS, LARGEST, SMALLEST, UNITS, symbol_model

# numba compiles anew where this file's text has changed, not where what it imports has: an old cache would code by old
# constants. A test compares.
COMPILED_FOR = (64, 16, -9, 28, 16, 8, 0.4)  # symbol_model.CONSTANTS
FINEST = 64 * UNITS  # steps lie within 2**-64 .. 2**64


def expected_bits(scales: np.ndarray) -> np.ndarray:
    """Expected bits of a token's components, by level less step + FINEST: (2 x FINEST + 1,) float64."""
    levels = np.arange(-FINEST, FINEST + 1)
    entropies = np.concatenate([[0.0], symbol_model().entropies])
    total = np.zeros(len(levels))
    for scale, count in zip(*np.unique(scales, return_counts=True)):
        k = (scale + levels + CLASS_UNITS // 2) // CLASS_UNITS
        total += count * entropies[np.clip(k, SMALLEST - 1, LARGEST) - SMALLEST + 1]
    return total


@compiled
def expected_total(expected, levels, step: int) -> float:
    """Expected bits of all tokens: `expected` from `expected_bits`, levels (N,) int64."""
    total = 0.0
    for level in levels:
        total += expected[min(max(level - step + FINEST, 0), len(expected) - 1)]
    return total


@compiled
def unit_bits(expected, levels, step: int) -> float:
    """By how many bits the code is expected to grow where the step is one unit smaller; a mean over a class."""
    finer = expected_total(expected, levels, step - CLASS_UNITS)
    return (finer - expected_total(expected, levels, step)) / CLASS_UNITS


@compiled
def smallest_step(expected, levels, budget: float, low: int) -> int:
    """Smallest step, from `low` on, whose expected bits are within the budget."""
    high = FINEST
    while low < high:
        middle = (low + high) // 2
        if expected_total(expected, levels, middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def class_of_spread(symbols: np.ndarray) -> int:
    """The table for gain symbols of this spread: index, never one that codes nothing."""
    deviation = float(np.sqrt(np.mean(np.square(symbols, dtype=np.float64))))
    k = round(UNITS / CLASS_UNITS * float(np.log2(max(deviation, 0.5))))
    return min(max(k, 0), LARGEST) - SMALLEST
