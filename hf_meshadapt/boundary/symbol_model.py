"""Probabilities of quantised Gaussian numbers, by the ratio of their standard deviation to the quantiser's step.

All scales are whole numbers of 1/64 octave (`UNITS`), so that two machines choose the same table for the same symbol: one
that disagrees in the last bit of a logarithm could decode nothing that follows. A table, or class, covers a quarter of
an octave of the ratio. The quantiser rounds towards zero a little (`ROUNDING`), which entropy coding rewards:

    q = sign(x) floor(|x| / step + ROUNDING)

Source: entropy-coded scalar quantisation with a dead zone, Sullivan, Efficient scalar quantization of exponential and
Laplacian random variables (1996).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

# These are compiled into `rans.py` and `step_size.py`: change `COMPILED_FOR` there too.
UNITS = 64  # of an octave of scale
CLASS_UNITS = 16  # one class
SMALLEST, LARGEST = -9, 28  # classes: ratios of 0.21 (below it, all is taken for zero) to 128
NUM_CLASSES = LARGEST - SMALLEST + 1
PRECISION = 16  # bits of a probability
BUCKET_BITS = 8  # a table of where to look for a symbol has an entry for every so many of them
ROUNDING = 0.4
TAIL = 0.1  # share of a Laplacian in the model: real tails are heavier than a Gaussian's
CONSTANTS = (UNITS, CLASS_UNITS, SMALLEST, LARGEST, PRECISION, BUCKET_BITS, ROUNDING)


@dataclass(frozen=True)
class SymbolModel:
    """Tables of all classes, one after the other; symbol q of class k stands at `origins[k] + q`, |q| <= `reach[k]`.

    Attributes:
        origins, reach: (classes,) int64.
        starts, widths: (entries,) int64, cumulative probability and probability, in units of 2**-PRECISION.
        bits: (entries,) float64, length of the symbol's code.
        values: (entries,) float64, what it stands for, in steps: the mean of a Gaussian within its bin.
        entropies: (classes,) float64, expected bits.
        bounds: (classes, buckets + 1) int32, the entry at which every bucket of slots begins; the last one's end.
    """

    origins: np.ndarray
    reach: np.ndarray
    starts: np.ndarray
    widths: np.ndarray
    bits: np.ndarray
    values: np.ndarray
    entropies: np.ndarray
    bounds: np.ndarray


@functools.cache
def symbol_model() -> SymbolModel:
    """The one set of tables; independent of any data."""
    origins, reach, starts, widths, bits, values, entropies, bounds = [], [], [], [], [], [], [], []
    size = 0
    for k in range(SMALLEST, LARGEST + 1):
        ratio = 2.0 ** (k * CLASS_UNITS / UNITS)
        most = math.ceil(8 * ratio) + 2
        shares = [_share(abs(q), ratio) for q in range(-most, most + 1)]
        width = whole_shares(shares, 1 << PRECISION)
        length = PRECISION - np.log2(width)
        origins.append(size + most)
        reach.append(most)
        widths.append(width)
        starts.append(np.concatenate([[0], np.cumsum(width)[:-1]]))
        bits.append(length)
        values.append([math.copysign(_mean(abs(q), ratio), q) for q in range(-most, most + 1)])
        slots = np.arange(0, (1 << PRECISION) + 1, 1 << BUCKET_BITS).clip(max=(1 << PRECISION) - 1)
        bounds.append(size + np.searchsorted(starts[-1], slots, side="right") - 1)
        entropies.append(float((width / (1 << PRECISION) * length).sum()))
        size += 2 * most + 1
    return SymbolModel(
        np.array(origins),
        np.array(reach),
        *(np.concatenate(parts).astype(np.int64) for parts in (starts, widths)),
        *(np.concatenate(parts).astype(np.float64) for parts in (bits, values)),
        np.array(entropies),
        np.array(bounds, dtype=np.int32),
    )


def whole_shares(shares: list[float], total: int) -> np.ndarray:
    """Whole numbers in proportion to `shares`, each at least 1, that sum to `total`; the largest takes the rest."""
    scaled = np.array(shares) / sum(shares) * (total - len(shares))
    whole = 1 + np.floor(scaled).astype(np.int64)
    whole[whole.argmax()] += total - whole.sum()
    return whole


def _bin(magnitude: int) -> tuple[float, float]:
    """Where the bin of symbols of this magnitude lies, in steps; that of zero reaches as far to the other side."""
    return max(0.0, magnitude - ROUNDING), magnitude + 1 - ROUNDING


def _share(magnitude: int, ratio: float) -> float:
    low, high = (edge / ratio for edge in _bin(magnitude))
    gaussian = 0.5 * (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2)))
    laplacian = 0.5 * (math.exp(-low * 1.2) - math.exp(-high * 1.2))
    return ((1 - TAIL) * gaussian + TAIL * laplacian) * (2 if magnitude == 0 else 1)


def _mean(magnitude: int, ratio: float) -> float:
    """Mean of a Gaussian within a bin, in steps; 0 for zero's."""
    if magnitude == 0:
        return 0.0
    low, high = (edge / ratio for edge in _bin(magnitude))
    mass = 0.5 * (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2)))
    if mass < 1e-12:  # far out, where a Gaussian's mass gathers at the near edge; a real tail's does less
        return float(magnitude)
    density = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
    return min(max(density / mass * ratio, low * ratio), high * ratio)
