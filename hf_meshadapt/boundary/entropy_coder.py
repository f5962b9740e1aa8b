"""Codes sequences with the transform and an entropy coder: one quantiser step for all, in a fixed number of bytes.

    y = analysis @ r                   as in `transform.py`
    q = quantise(y / step)             the same step for all components of a token: an error is felt alike wherever it
                                       is, so bits go where y is large, in fractions of a bit
    stream                             range coder over q, with the probabilities of a Gaussian of the component's
                                       variance times the token's gain (a quarter octave, in the stream too)

The step is the smallest whose stream fits in the sequence's bytes. Tokens that the loss is expected to feel more have a
smaller one (`sensitivity.py`). The first token of every sequence travels whole, inside the same bytes.

Source: entropy-coded scalar quantisation at one step after a Karhunen-Loeve transform, within 0.25 bit of the
rate-distortion function, Goyal, Theoretical foundations of transform coding (2001); those of `rans.py` and
`symbol_model.py` are there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import rans
from .bits import read_bfloat16
from .sensitivity import TokenSensitivity
from .sequence_coder import split_tokens
from .symbol_model import CLASS_UNITS, LARGEST, SMALLEST, UNITS, symbol_model
from .transform import TransformTables

HEADER = np.dtype([("step", "<i2"), ("gain_base", "<i2"), ("gain_class", "u1"), ("state", "u1")])
# Of a stream, in its header.
NOTHING, CODED, NOT_FINITE = 0, 1, 2
# Of the step, when the first guess is improved by what the symbols really take.
REFINEMENTS = 2
MOST_OCTAVES = 120  # of a squared gain: what single precision holds
FINEST = 64 * UNITS  # steps lie within 2**-64 .. 2**64


@dataclass(frozen=True)
class Layout:
    """One sequence: which tokens travel whole and which are coded.

    Attributes:
        exact: positions that travel whole.
        coded: positions of the others that are not padding.
        offsets: (coded,) int64, of each token's step, in units.
        stream_bytes: left for header and stream; a whole number of words after the header.
    """

    exact: Tensor
    coded: Tensor
    offsets: np.ndarray
    stream_bytes: int


class EntropySequenceCoder:
    """One direction of a boundary; interface as `sequence_coder.SequenceCoder`.

    Args:
        tables: the transform.
        hidden_size: width of a token, H.
        sequence_bytes: bytes of a sequence by its padded length; even.
        exact_first: first tokens travel whole, in bfloat16.
        sensitivity: says which tokens are coded finer; None treats all alike.
    """

    def __init__(
        self,
        tables: TransformTables,
        hidden_size: int,
        sequence_bytes: Callable[[int], int],
        exact_first: bool,
        sensitivity: TokenSensitivity | None = None,
    ) -> None:
        self.tables, self.hidden_size, self.sensitivity = tables, hidden_size, sensitivity
        self.sequence_bytes, self.exact_first = sequence_bytes, exact_first
        self.scales = in_units(tables.variances.cpu().double().clamp(min=2.0**-100).sqrt().numpy())
        self.weights = self._gain_weights()
        self.expected = expected_bits(self.scales)

    def _gain_weights(self) -> Tensor:
        # The gain is judged by standard deviations: the components that carry most tell most about it.
        deviations = self.tables.variances.clamp(min=1e-30).sqrt()
        return 1.0 / (deviations * deviations.sum())

    @torch.no_grad()
    def encode(self, hidden: Tensor, base: Tensor, kind: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Codes hidden - base: (B, T, H) float32 each, by kind and token_ids (B, T), to uint8 (B, sequence_bytes(T))."""
        layouts = self._layouts(kind, token_ids)
        # One product for the whole microbatch, and one copy to the host.
        residual = torch.cat([(h[layout.coded] - b[layout.coded]) for h, b, layout in zip(hidden, base, layouts)])
        components = residual @ self.tables.analysis.T
        gains = (components.square() @ self.weights).log2().clamp(-MOST_OCTAVES, MOST_OCTAVES) / 2
        gains = (gains * (UNITS / CLASS_UNITS)).round().nan_to_num().long().cpu().numpy()
        components = components.cpu().numpy()
        packed = np.zeros((len(hidden), self.sequence_bytes(hidden.shape[1])), dtype=np.uint8)
        start, tasks = 0, []
        for row, layout in enumerate(layouts):
            stop = start + len(layout.coded)
            whole = hidden[row, layout.exact].to(torch.bfloat16).view(torch.uint8).flatten().cpu().numpy()
            packed[row, : len(whole)] = whole
            if layout.stream_bytes > HEADER.itemsize and stop > start:
                stream = packed[row, len(whole) : len(whole) + layout.stream_bytes]
                tasks.append((components[start:stop], gains[start:stop], layout.offsets, stream))
            start = stop
        in_parallel(self._encode_tokens, tasks)
        return torch.from_numpy(packed).to(hidden.device)

    @torch.no_grad()
    def decode(self, packed: Tensor, base: Tensor, kind: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """What `encode` was given, as far as it was coded: (B, T, H) float32; base where nothing travelled."""
        hidden, host = base.clone(), packed.cpu().numpy()
        tasks, places = [], []
        for row, layout in enumerate(self._layouts(kind, token_ids)):
            start = len(layout.exact) * self.hidden_size * 2
            whole = read_bfloat16(packed[row : row + 1], 0, len(layout.exact) * self.hidden_size)
            hidden[row, layout.exact] = whole.view(len(layout.exact), self.hidden_size)
            if layout.stream_bytes > HEADER.itemsize and len(layout.coded):
                tasks.append((host[row, start : start + layout.stream_bytes], layout.offsets))
                places.append(row * hidden.shape[1] + layout.coded)
        if tasks:
            components = np.concatenate(in_parallel(self._decode_tokens, tasks))
            residual = torch.from_numpy(components).to(hidden.device) @ self.tables.synthesis.T
            hidden.view(-1, self.hidden_size).index_add_(0, torch.cat(places).to(hidden.device), residual)
        return hidden

    def _layouts(self, kind: Tensor, token_ids: Tensor | None) -> list[Layout]:
        kind = kind.cpu()
        token_ids = torch.zeros_like(kind, dtype=torch.long) if token_ids is None else token_ids.cpu()
        return [self._layout(*row) for row in zip(kind, token_ids)]

    def _layout(self, kind: Tensor, token_ids: Tensor) -> Layout:
        budget = self.sequence_bytes(len(kind))
        exact, coded, left = split_tokens(kind, budget, self.hidden_size * 2, self.exact_first)
        offsets = np.zeros(len(kind), dtype=np.int64)
        if self.sensitivity is not None:
            offsets = self.sensitivity.offsets(token_ids.numpy(), kind.numpy())
        stream_bytes = max(0, left - HEADER.itemsize) // 4 * 4 + HEADER.itemsize
        return Layout(exact, coded.nonzero().squeeze(1), offsets[coded.numpy()], stream_bytes)

    def _encode_tokens(self, y: np.ndarray, gains: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
        """Components (N, C) and gains (N,) in classes of one sequence, into `out`; zeros where not even gains fit."""
        model, header = symbol_model(), out[: HEADER.itemsize].view(HEADER)
        if not np.isfinite(y).all():  # the loss is not either: let the other end see it
            header["state"] = NOT_FINITE
            return
        base = int(np.median(gains))
        gain_class = class_of_spread(gains - base)
        symbols = np.clip(gains - base, -model.reach[gain_class], model.reach[gain_class])
        gains = (base + symbols) * CLASS_UNITS
        words = np.zeros((len(out) - HEADER.itemsize) // 4, dtype=np.uint32)
        origin = model.origins[gain_class]
        budget = 32.0 * (len(words) - 1) - model.bits[origin + symbols].sum()
        finest = self._choose_step(y, gains, offsets, budget)
        for step in range(finest, finest + FINEST, 2):  # the estimate is seldom short, and by little: one turn, or two
            first = rans.encode(
                y, self.scales, gains, step + offsets, symbols, gain_class,
                model.origins, model.reach, model.starts, model.widths, words,
            )  # fmt: skip
            if first >= 0:
                header[:] = (step, base, gain_class, CODED)
                body = words[first:].astype("<u4").view(np.uint8)
                out[HEADER.itemsize : HEADER.itemsize + len(body)] = body
                return
            if budget < 0:
                return

    def _choose_step(self, y: np.ndarray, gains: np.ndarray, offsets: np.ndarray, budget: float) -> int:
        """The smallest step, in units, that is expected to fit: by the model's entropies first, then by what the
        symbols at hand take."""
        model, excess = symbol_model(), 1.0
        step = self._expected_step(gains - offsets, budget)
        for _ in range(REFINEMENTS):
            taken = rans.count_bits(y, self.scales, gains, step + offsets, model.origins, model.reach, model.bits)
            expected = self._expected_total(gains - offsets, step)
            if taken <= 0 or expected <= 0:
                break
            excess = taken / expected
            step = self._expected_step(gains - offsets, budget / excess)
        return step

    def _expected_total(self, levels: np.ndarray, step: int) -> float:
        return float(self.expected[np.clip(levels - step + FINEST, 0, len(self.expected) - 1)].sum())

    def _expected_step(self, levels: np.ndarray, budget: float) -> int:
        """Smallest step whose expected bits are within the budget; never one that leaves the tables' range."""
        low, high = int(self.scales[0] + levels.max()) - LARGEST * CLASS_UNITS, FINEST
        while low < high:
            middle = (low + high) // 2
            if self._expected_total(levels, middle) <= budget:
                high = middle
            else:
                low = middle + 1
        return low

    def _decode_tokens(self, stream: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(N, C) float32 components of a sequence; zeros where nothing was sent."""
        model = symbol_model()
        (header,) = stream[: HEADER.itemsize].copy().view(HEADER)
        words = stream[HEADER.itemsize :].copy().view("<u4").astype(np.uint32)
        gain_class = min(int(header["gain_class"]), len(model.origins) - 1)
        if header["state"] != CODED or len(words) < 2:
            value = np.nan if header["state"] == NOT_FINITE else 0.0
            return np.full((len(offsets), len(self.scales)), value, dtype=np.float32)
        return rans.decode(
            words, len(offsets), self.scales, int(header["step"]) + offsets, int(header["gain_base"]), gain_class,
            model.origins, model.reach, model.starts, model.widths, model.values,
        )  # fmt: skip


def in_parallel(function: Callable, tasks: list[tuple]) -> list:
    """Calls `function` with every tuple of arguments, on as many threads as torch uses: what numba compiled lets go of
    Python's lock. The threads live no longer than the call, so that a process can be forked after it."""
    workers = min(len(tasks), torch.get_num_threads())
    if workers < 2:
        return [function(*task) for task in tasks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda task: function(*task), tasks))


def in_units(values: np.ndarray) -> np.ndarray:
    """Positive numbers as whole numbers of 1/64 octave, int64."""
    return np.round(UNITS * np.log2(values)).astype(np.int64)


def expected_bits(scales: np.ndarray) -> np.ndarray:
    """Expected bits of a token's components, by level (gain less step) + FINEST: (2 x FINEST + 1,) float64."""
    levels = np.arange(-FINEST, FINEST + 1)
    entropies = np.concatenate([[0.0], symbol_model().entropies])
    total = np.zeros(len(levels))
    for scale, count in zip(*np.unique(scales, return_counts=True)):
        k = (scale + levels + CLASS_UNITS // 2) // CLASS_UNITS
        total += count * entropies[np.clip(k, SMALLEST - 1, LARGEST) - SMALLEST + 1]
    return total


def class_of_spread(symbols: np.ndarray) -> int:
    """The table for gain symbols of this spread: index, never one that codes nothing."""
    deviation = float(np.sqrt(np.mean(np.square(symbols, dtype=np.float64))))
    k = round(UNITS / CLASS_UNITS * float(np.log2(max(deviation, 0.5))))
    return min(max(k, 0), LARGEST) - SMALLEST
