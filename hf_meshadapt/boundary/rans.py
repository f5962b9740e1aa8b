"""Range asymmetric numeral systems over quantised tokens: loops over symbols, compiled for the CPU by numba.

A sequence is one stream of 32-bit words. Coded in this order: every token's gain, then token by token its components,
largest variance first, up to the first whose scale is too small to be coded at all. Symbols go in last to first, since
what enters such a coder last leaves it first. Everything that chooses a table is a whole number.

Source: Duda, Asymmetric numeral systems (arXiv 1311.2540); 64-bit state with 32-bit words as in Giesen's ryg_rans.

Arrays below: y (N, C) float32 components; scales (C,) int64 descending, gains (N,) and steps (N,) int64, all in units of
1/64 octave, gains whole multiples of a class; origins ... bounds of `symbol_model.SymbolModel`.
"""

from __future__ import annotations

import numba
import numpy as np

from .symbol_model import BUCKET_BITS, CLASS_UNITS, LARGEST, PRECISION, ROUNDING, SMALLEST, UNITS

LOW = 1 << 31  # the state lies in [LOW, LOW << 32)
WORD_MASK = (1 << 32) - 1
MASK = (1 << PRECISION) - 1
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
def count_bits(y, scales, gains, steps, origins, reach, bits) -> float:
    """Length in bits of the codes of all components, gains left out."""
    total = 0.0
    for n in range(y.shape[0]):
        per_step = 2.0 ** (-steps[n] / UNITS)
        for c in range(y.shape[1]):
            k = class_of(scales[c] + gains[n] - steps[n])
            if k < 0:
                break
            total += bits[origins[k] + quantise(y[n, c], per_step, reach[k])]
    return total


@compiled
def push(state: int, start: int, width: int, words, position: int) -> tuple[int, int]:
    """Adds a symbol of range [start, start + width); state and the first word in use, which is below 2 when they ran
    out."""
    if state >= (LOW >> PRECISION << 32) * width:
        position -= 1
        if position >= 2:
            words[position] = state & WORD_MASK
        state >>= 32
    quotient = state // width
    return (quotient << PRECISION) + state - quotient * width + start, position


@compiled
def encode(y, scales, gains, steps, gain_symbols, gain_class, origins, reach, starts, widths, words) -> int:
    """Codes a sequence into the end of `words` (uint32).

    Args:
        gain_symbols: (N,) int64, gains in classes, less the sequence's own; within the reach of their class.
        gain_class: index of the table that they are coded with.

    Returns:
        Index of the first word in use; -1 where they do not suffice.
    """
    tokens, components = y.shape
    position, state = len(words), LOW
    if position < 2:
        return -1
    for n in range(tokens - 1, -1, -1):
        per_step = 2.0 ** (-steps[n] / UNITS)
        level = gains[n] - steps[n]
        count = 0
        while count < components and class_of(scales[count] + level) >= 0:
            count += 1
        for c in range(count - 1, -1, -1):
            k = class_of(scales[c] + level)
            entry = origins[k] + quantise(y[n, c], per_step, reach[k])
            state, position = push(state, starts[entry], widths[entry], words, position)
        if position < 2:
            return -1
    for n in range(tokens - 1, -1, -1):
        entry = origins[gain_class] + gain_symbols[n]
        state, position = push(state, starts[entry], widths[entry], words, position)
    if position < 2:
        return -1
    words[position - 1] = state >> 32
    words[position - 2] = state & WORD_MASK
    return position - 2


@compiled
def find_symbol(slot: int, k: int, bounds, starts) -> int:
    """The entry of class k whose range holds the slot; `bounds` says between which to look."""
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
def pull(state: int, entry: int, starts, widths, words, position: int) -> tuple[int, int]:
    """Takes a symbol off; state and the next word to be read."""
    state = widths[entry] * (state >> PRECISION) + (state & MASK) - starts[entry]
    if state < LOW and position < len(words):
        state = state << 32 | np.int64(words[position])
        position += 1
    return state, position


@compiled
def decode(words, tokens, scales, offsets, gain_base, gain_class, origins, bounds, starts, widths, values):
    """Undoes `encode`.

    Args:
        words: uint32, from the first in use.
        offsets: (N,) int64, every token's step in units.
        gain_base: what gain symbols are relative to, in classes.

    Returns:
        (N, C) float32 components, zero where nothing was coded, and how many leading ones any token has. Garbage in
        gives garbage out, in bounds.
    """
    components, used = len(scales), 0
    out = np.zeros((tokens, components), dtype=np.float32)
    gains = np.zeros(tokens, dtype=np.int64)
    position = 2
    state = np.int64(words[1] & (LOW - 1)) << 32 | np.int64(words[0])
    for n in range(tokens):
        entry = find_symbol(state & MASK, gain_class, bounds, starts)
        state, position = pull(state, entry, starts, widths, words, position)
        gains[n] = (gain_base + entry - origins[gain_class]) * CLASS_UNITS
    for n in range(tokens):
        step, level = 2.0 ** (offsets[n] / UNITS), gains[n] - offsets[n]
        for c in range(components):
            k = class_of(scales[c] + level)
            if k < 0:
                break
            used = max(used, c + 1)
            entry = find_symbol(state & MASK, k, bounds, starts)
            state, position = pull(state, entry, starts, widths, words, position)
            out[n, c] = values[entry] * step
    return out, used
