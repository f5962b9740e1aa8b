"""Range asymmetric numeral systems over quantised tokens: loops over symbols, compiled for the CPU by numba.

A sequence is one stream of 32-bit words. Coded in this order: every token's gain, then token by token its components,
largest variance first, up to the first whose scale is too small to be coded at all. Symbols go in last to first, since
what enters such a coder last leaves it first. Everything that chooses a table is a whole number.

Source: Duda, Asymmetric numeral systems (arXiv 1311.2540); 64-bit state with 32-bit words as in Giesen's ryg_rans.

Arrays below: y (N, C) float32 components; scales (C,) int64 descending, gains (N,) and steps (N,) int64, all in units of
1/64 octave, gains whole multiples of a class; origins ... values of `symbol_model.SymbolModel`.
"""

from __future__ import annotations

import numba
import numpy as np

from .symbol_model import CLASS_UNITS, LARGEST, PRECISION, ROUNDING, SMALLEST, UNITS

LOW = 1 << 31  # the state lies in [LOW, LOW << 32)
WORD_MASK = (1 << 32) - 1
MASK = (1 << PRECISION) - 1
HALF_CLASS = CLASS_UNITS // 2


def _compiled(function):
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to keep what was compiled: every process compiles anew, for some seconds
        return numba.njit(nogil=True)(function)


@_compiled
def class_of(ratio: int) -> int:
    """Index of the table for a ratio of scale to step in units; negative where nothing is coded."""
    k = (ratio + HALF_CLASS) // CLASS_UNITS
    return min(k, LARGEST) - SMALLEST


@_compiled
def quantise(value: float, per_step: float, reach: int) -> int:
    """Symbol of a value, given 1 / step."""
    magnitude = int(min(abs(value) * per_step + ROUNDING, reach))
    return magnitude if value >= 0 else -magnitude


@_compiled
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


@_compiled
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
        count = 0
        while count < components and class_of(scales[count] + gains[n] - steps[n]) >= 0:
            count += 1
        for c in range(count - 1, -1, -1):
            k = class_of(scales[c] + gains[n] - steps[n])
            entry = origins[k] + quantise(y[n, c], per_step, reach[k])
            width = widths[entry]
            if state >= (LOW >> PRECISION << 32) * width:
                position -= 1
                if position < 2:
                    return -1
                words[position] = state & WORD_MASK
                state >>= 32
            state = (state // width << PRECISION) + state % width + starts[entry]
    for n in range(tokens - 1, -1, -1):
        entry = origins[gain_class] + gain_symbols[n]
        width = widths[entry]
        if state >= (LOW >> PRECISION << 32) * width:
            position -= 1
            if position < 2:
                return -1
            words[position] = state & WORD_MASK
            state >>= 32
        state = (state // width << PRECISION) + state % width + starts[entry]
    words[position - 1] = state >> 32
    words[position - 2] = state & WORD_MASK
    return position - 2


@_compiled
def find_symbol(slot: int, first: int, last: int, starts) -> int:
    """The entry in [first, last] whose range holds the slot."""
    while first < last:
        middle = (first + last + 1) >> 1
        if starts[middle] <= slot:
            first = middle
        else:
            last = middle - 1
    return first


@_compiled
def decode(words, tokens, scales, offsets, gain_base, gain_class, origins, reach, starts, widths, values):
    """Undoes `encode`.

    Args:
        words: uint32, from the first in use.
        offsets: (N,) int64, every token's step in units.
        gain_base: what gain symbols are relative to, in classes.

    Returns:
        (N, C) float32 components, zero where nothing was coded. Garbage in gives garbage out, in bounds.
    """
    components = len(scales)
    out = np.zeros((tokens, components), dtype=np.float32)
    gains = np.zeros(tokens, dtype=np.int64)
    position, end = 2, len(words)
    state = np.int64(words[1] & (LOW - 1)) << 32 | np.int64(words[0])
    for n in range(tokens):
        first = origins[gain_class] - reach[gain_class]
        slot = state & MASK
        entry = find_symbol(slot, first, origins[gain_class] + reach[gain_class], starts)
        state = widths[entry] * (state >> PRECISION) + slot - starts[entry]
        if state < LOW and position < end:
            state = state << 32 | np.int64(words[position])
            position += 1
        gains[n] = (gain_base + entry - origins[gain_class]) * CLASS_UNITS
    for n in range(tokens):
        step = 2.0 ** (offsets[n] / UNITS)
        for c in range(components):
            k = class_of(scales[c] + gains[n] - offsets[n])
            if k < 0:
                break
            slot = state & MASK
            entry = find_symbol(slot, origins[k] - reach[k], origins[k] + reach[k], starts)
            state = widths[entry] * (state >> PRECISION) + slot - starts[entry]
            if state < LOW and position < end:
                state = state << 32 | np.int64(words[position])
                position += 1
            out[n, c] = values[entry] * step
    return out
