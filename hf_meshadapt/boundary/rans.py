"""Range asymmetric numeral systems over quantised tokens: loops over symbols, compiled for the CPU by numba.

A sequence is one stream of 32-bit words. Coded in this order: every token's gain, then token by token its components,
largest variance first, up to the first whose scale is too small to be coded at all. Symbols go in last to first, since
what enters such a coder last leaves it first. Everything that chooses a table is a whole number.

Two states take turns, symbol by symbol, and share the words: a processor works on both at once. Helpers of the loops over
symbols return one number each: numba is three times as slow where they return two.

Sources: Duda, Asymmetric numeral systems (arXiv 1311.2540); 64-bit states with 32-bit words as in Giesen's ryg_rans;
two of them as in Giesen, Interleaved entropy coders (arXiv 1402.3392).

Arrays below: y (N, C) float32 components; scales (C,) int64 descending, gains (N,) and steps (N,) int64, all in units of
1/64 octave, gains whole multiples of a class; origins ... bounds of `symbol_model.SymbolModel`.
"""

from __future__ import annotations

import numba
import numpy as np

from .symbol_model import BUCKET_BITS, CLASS_UNITS, LARGEST, PRECISION, ROUNDING, SMALLEST, UNITS

# numba compiles anew where this file's text has changed, not where what it imports has: an old cache would code by old
# constants. A test compares.
COMPILED_FOR = (64, 16, -9, 28, 16, 8, 0.4)  # symbol_model.CONSTANTS
# Unsigned, all that meets a state: numba divides whole numbers that may be negative several times as slowly.
WORD, SHIFT, ONE = np.uint64(32), np.uint64(PRECISION), np.uint64(1)
LOW = np.uint64(1 << 31)  # a state lies in [LOW, LOW << 32)
MOST_PER_WIDTH = np.uint64(1 << 31 >> PRECISION << 32)
WORD_MASK = np.uint64((1 << 32) - 1)
MASK = np.uint64((1 << PRECISION) - 1)
STATE_WORDS = 4  # two states
HALF_CLASS = CLASS_UNITS // 2


def compiled(function):
    # No divisor is ever zero: numpy's error model spares the check.
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep what was compiled: every process compiles anew, for some seconds
        return numba.njit(**options)(function)


@compiled
def class_of(ratio: int) -> int:
    """Index of the table for a ratio of scale to step in units; negative where nothing is coded."""
    k = (ratio + HALF_CLASS) // CLASS_UNITS
    return min(k, LARGEST) - SMALLEST


@compiled
def quantise(value: float, per_step: float, reach: int) -> int:
    """Symbol of a value, given 1 / step."""
    magnitude = int(min(abs(value) * per_step + ROUNDING, reach))
    return magnitude if value >= 0 else -magnitude


@compiled
def finer(ratio: int) -> float:
    """Step of all components over that of one whose scale has this ratio to it, in units.

    1, or less beyond the tables: such a component has a larger step of its own, LARGEST classes below its scale. Were the
    step of all as large, one massive channel (arXiv 2402.17762) would set it for everything.
    """
    beyond = ratio - LARGEST * CLASS_UNITS
    return 2.0 ** (-beyond / UNITS) if beyond > 0 else 1.0


@compiled
def entry_of(value: float, ratio: int, per_step: float, origins, reach) -> int:
    """Where the symbol of a value stands in the tables, given the ratio of its scale to the step in units."""
    k = class_of(ratio)
    return origins[k] + quantise(value, per_step * finer(ratio), reach[k])


@compiled
def num_coded(scales, level: int) -> int:
    """Leading components that a token codes at this level less step."""
    count = 0
    while count < len(scales) and class_of(scales[count] + level) >= 0:
        count += 1
    return count


@compiled
def count_bits(y, scales, gains, steps, origins, reach, bits) -> float:
    """Length in bits of the codes of all components, gains left out."""
    total = 0.0
    for n in range(y.shape[0]):
        per_step = 2.0 ** (-steps[n] / UNITS)
        for c in range(y.shape[1]):
            ratio = scales[c] + gains[n] - steps[n]
            if class_of(ratio) < 0:
                break
            total += bits[entry_of(y[n, c], ratio, per_step, origins, reach)]
    return total


@compiled
def with_symbol(state, start, width):
    """A state with room for it, a symbol of range [start, start + width) added."""
    quotient = state // width
    return (quotient << SHIFT) + (state - quotient * width) + start


@compiled
def quantise_tokens(y, scales, gains, steps, origins, reach, bits, entries) -> tuple[int, float]:
    """Writes the entries of all components' symbols into `entries`, in their order; how many, and `count_bits` of them."""
    count, total = 0, 0.0
    for n in range(y.shape[0]):
        per_step, level = 2.0 ** (-steps[n] / UNITS), gains[n] - steps[n]
        for c in range(min(num_coded(scales, level), y.shape[1])):
            entry = entry_of(y[n, c], scales[c] + level, per_step, origins, reach)
            entries[count] = entry
            total += bits[entry]
            count += 1
    return count, total


@compiled
def encode(entries, starts, widths, words) -> int:
    """Codes symbols, given as entries of the tables (int32), into the end of `words` (uint32, at least `STATE_WORDS`).

    Returns:
        Index of the first word in use; -1 where they do not suffice.
    """
    state, other, position = LOW, LOW, len(words)
    for entry in entries[::-1]:
        start, width = np.uint64(starts[entry]), np.uint64(widths[entry])
        if state >= MOST_PER_WIDTH * width:
            position -= 1
            words[max(position, 0)] = state & WORD_MASK
            state >>= WORD
        state, other = other, with_symbol(state, start, width)
    position -= STATE_WORDS
    if position < 0:
        return -1
    words[position], words[position + 1] = other & WORD_MASK, other >> WORD
    words[position + 2], words[position + 3] = state & WORD_MASK, state >> WORD
    return position


@compiled
def find_symbol(state, k: int, bounds, starts) -> int:
    """The entry of class k whose range holds the state's slot; `bounds` says between which to look."""
    slot = np.int64(state & MASK)
    bucket = slot >> BUCKET_BITS
    first, last = bounds[k, bucket], bounds[k, bucket + 1]
    while first < last:
        middle = (first + last + 1) >> 1
        if starts[middle] <= slot:
            first = middle
        else:
            last = middle - 1
    return first


@compiled
def without_symbol(state, start, width):
    """Undoes `with_symbol`."""
    return width * (state >> SHIFT) + (state & MASK) - start


@compiled
def read_state(words, position: int):
    """A state as `encode` left it; of garbage one that no arithmetic overflows from."""
    return (np.uint64(words[position + 1]) & (LOW - ONE)) << WORD | np.uint64(words[position])


@compiled
def decode(words, scales, steps, gain_base, gain_class, origins, bounds, starts, widths, values, out) -> int:
    """Undoes `encode`, of a stream of the gains' symbols and then those of `quantise_tokens`.

    Args:
        words: uint32, from the first in use; at least `STATE_WORDS`.
        gain_base: what gain symbols are relative to, in classes.
        gain_class: index of the table that they are coded with.
        out: (N, C) float32 zeros, which take the components that were coded.

    Returns:
        How many leading components any token has. Garbage in gives garbage out, in bounds.
    """
    tokens, used = len(steps), 0
    gains = np.zeros(tokens, dtype=np.int64)
    state, other, position = read_state(words, 0), read_state(words, 2), STATE_WORDS
    for n in range(tokens):
        entry = find_symbol(state, gain_class, bounds, starts)
        gains[n] = (gain_base + entry - origins[gain_class]) * CLASS_UNITS
        state = without_symbol(state, np.uint64(starts[entry]), np.uint64(widths[entry]))
        if state < LOW and position < len(words):
            state = state << WORD | np.uint64(words[position])
            position += 1
        state, other = other, state
    for n in range(tokens):
        step, level = 2.0 ** (steps[n] / UNITS), gains[n] - steps[n]
        count = num_coded(scales, level)
        used = max(used, count)
        for c in range(count):
            ratio = scales[c] + level
            entry = find_symbol(state, class_of(ratio), bounds, starts)
            out[n, c] = values[entry] * step / finer(ratio)
            state = without_symbol(state, np.uint64(starts[entry]), np.uint64(widths[entry]))
            if state < LOW and position < len(words):
                state = state << WORD | np.uint64(words[position])
                position += 1
            state, other = other, state
    return used
