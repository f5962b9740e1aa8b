"""Codes sequences with the transform and an entropy coder: one quantiser step for all, in a fixed number of bytes.

    y = analysis @ r                   as in `transform.py`
    q = quantise(y / step)             the same step for all components of a token: an error is felt alike wherever it
                                       is, so bits go where y is large, in fractions of a bit; only components more than
                                       128 steps large, which the tables do not hold, have a larger one each
    stream                             range coder over q, with the probabilities of a Gaussian of the component's
                                       variance times the token's gain (a quarter octave, in the stream too)

The step is the smallest whose stream fits in the sequence's bytes. Tokens that the loss is expected to feel more have a
smaller one (`sensitivity.py`). The first token of every sequence travels whole, inside the same bytes.

Source: entropy-coded scalar quantisation at one step after a Karhunen-Loeve transform, within 0.25 bit of the
rate-distortion function, Goyal, Theoretical foundations of transform coding (2001); those of `rans.py` and
`symbol_model.py` are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import rans
from .bits import read_bfloat16
from .sensitivity import TokenSensitivity
from .sequence_coder import split_tokens
from .step_size import FINEST, class_of_spread, expected_bits, expected_total, smallest_step, unit_bits
from .symbol_model import CLASS_UNITS, LARGEST, UNITS, symbol_model
from .transform import TransformTables

HEADER = np.dtype([("step", "<i2"), ("gain_base", "<i2"), ("gain_class", "u1"), ("state", "u1")])
# Of a stream, in its header.
NOTHING, CODED, NOT_FINITE = 0, 1, 2
SPARE = 0.003  # of a budget may be left
MARGIN = 8  # units of the step: how much finer than planned a sequence may be coded
MOST_OCTAVES = 120  # of a squared gain: what single precision holds
LEADING_SHARE = 0.75  # of the standard deviations, in the components that gains and steps are judged by


@dataclass(frozen=True)
class Layout:
    """One sequence: which tokens travel whole and which are coded.

    Attributes:
        exact: positions that travel whole, int64.
        coded: positions of the others that are not padding, int64.
        offsets: (coded,) int64, of each token's step, in units.
        stream_bytes: left for header and stream; a whole number of words after the header.
    """

    exact: np.ndarray
    coded: np.ndarray
    offsets: np.ndarray
    stream_bytes: int


@dataclass(frozen=True)
class Plan:
    """How one sequence is to be coded.

    Attributes:
        base: what gains are relative to, in classes.
        symbols: (N,) int64, gains relative to it, in classes.
        gain_class: index of the table that they are coded with.
        budget_bits: for the components.
        step: smallest step that is expected to fit, in units.
        finest: smallest step that may be tried, in units.
        num_coded: leading components that any token codes at that one.
    """

    base: int
    symbols: np.ndarray
    gain_class: int
    budget_bits: float
    step: int
    finest: int
    num_coded: int

    @property
    def gains(self) -> np.ndarray:
        return (self.base + self.symbols) * CLASS_UNITS


class EntropySequenceCoder:
    """One direction of a boundary; interface as `sequence_coder.SequenceCoder`.

    Args:
        tables: the transform.
        hidden_size: width of a token, H.
        sequence_bytes: bytes of a sequence by its padded length; even.
        exact_first: first tokens travel whole, in bfloat16.
        sensitivity: says which tokens are coded finer; None treats all alike.
        dtype: of the products with the transform, from `product_dtype`.
    """

    def __init__(
        self,
        tables: TransformTables,
        hidden_size: int,
        sequence_bytes: Callable[[int], int],
        exact_first: bool,
        sensitivity: TokenSensitivity | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.hidden_size, self.sensitivity = hidden_size, sensitivity
        self.analysis, self.synthesis = tables.analysis.to(dtype), tables.synthesis.to(dtype)
        self.sequence_bytes, self.exact_first = sequence_bytes, exact_first
        self.scales = in_units(tables.variances.cpu().double().clamp(min=2.0**-100).sqrt().numpy())
        # The gain is judged by standard deviations: the components that carry most tell most about it.
        deviations = tables.variances.cpu().clamp(min=1e-30).sqrt()
        share = deviations.cumsum(0) / deviations.sum()
        self.num_leading = min(len(share), int((share < LEADING_SHARE).sum()) + 1)
        leading = deviations[: self.num_leading]
        self.weights = (1.0 / (leading * leading.sum())).to(tables.variances.device)
        self.expected = expected_bits(self.scales)
        self.expected_leading = expected_bits(self.scales[: self.num_leading])

    @torch.no_grad()
    def encode(self, hidden: Tensor, base: Tensor | None, kind: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Codes hidden - base: (B, T, H) float32 each, by kind and token_ids (B, T), to uint8 (B, sequence_bytes(T));
        base None is zero."""
        layouts = self._layouts(kind, token_ids)
        width, length = self.hidden_size, hidden.shape[1]
        places = np.concatenate([row * length + layout.coded for row, layout in enumerate(layouts)])
        places = torch.from_numpy(places).to(hidden.device)
        residual = hidden.reshape(-1, width).index_select(0, places)
        if base is not None:
            residual -= base.reshape(-1, width).index_select(0, places)
        residual = residual.to(self.analysis.dtype)
        # One product for the whole microbatch, and one copy to the host; a second one where more must be known.
        leading = (residual @ self.analysis[: self.num_leading].T).float()
        gains = (leading.square() @ self.weights).log2().clamp(-MOST_OCTAVES, MOST_OCTAVES) / 2
        gains = (gains * (UNITS / CLASS_UNITS)).round().nan_to_num().long().cpu().numpy()
        components = leading.cpu().numpy()
        packed = np.zeros((len(hidden), self.sequence_bytes(length)), dtype=np.uint8)
        start, tasks = 0, []
        for row, layout in enumerate(layouts):
            tokens = slice(start, start + len(layout.coded))
            start = tokens.stop
            begin = len(layout.exact) * width * 2
            if begin:
                whole = hidden[row, layout.exact].to(torch.bfloat16).view(torch.uint8)
                packed[row, :begin] = whole.flatten().cpu().numpy()
            if layout.stream_bytes > HEADER.itemsize and len(layout.coded):
                tasks.append((tokens, layout.offsets, packed[row, begin : begin + layout.stream_bytes]))
        # Not on threads: they would share the cores with torch's own, which spin for a while after every product.
        plans = [self._plan(components[t], gains[t], offsets, out) for t, offsets, out in tasks]
        most = max((plan.num_coded for plan in plans if plan), default=0)
        if most > self.num_leading:
            rest = residual @ self.analysis[self.num_leading : most].T
            components = np.concatenate([components, rest.float().cpu().numpy()], axis=1)
        coded = components[:, :most]
        for plan, (t, offsets, out) in zip(plans, tasks):
            if plan:
                self._write(plan, coded[t], offsets, out)
        return torch.from_numpy(packed).to(hidden.device)

    @torch.no_grad()
    def decode(self, packed: Tensor, base: Tensor | None, kind: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """What `encode` was given, as far as it was coded: (B, T, H) float32; base where nothing travelled."""
        if base is None:
            base = torch.zeros(*kind.shape, self.hidden_size, device=packed.device)
        hidden, host = base.clone(), packed.cpu().numpy()
        tasks, places = [], []
        for row, layout in enumerate(self._layouts(kind, token_ids)):
            start = len(layout.exact) * self.hidden_size * 2
            if start:
                whole = read_bfloat16(packed[row : row + 1], 0, start // 2)
                hidden[row, layout.exact] = whole.view(len(layout.exact), self.hidden_size)
            if layout.stream_bytes > HEADER.itemsize and len(layout.coded):
                tasks.append((host[row, start : start + layout.stream_bytes], layout.offsets))
                places.append(row * hidden.shape[1] + layout.coded)
        if tasks:
            places = torch.from_numpy(np.concatenate(places)).to(hidden.device)
            components = torch.zeros(len(places), len(self.scales))
            rows = components.split([len(offsets) for _, offsets in tasks])
            most = max(self._decode_tokens(*task, row.numpy()) for task, row in zip(tasks, rows))
            coded = components[:, :most].to(hidden.device, self.synthesis.dtype)
            residual = coded @ self.synthesis[:, :most].T
            hidden.view(-1, self.hidden_size).index_add_(0, places, residual.float())
        return hidden

    def _layouts(self, kind: Tensor, token_ids: Tensor | None) -> list[Layout]:
        kind = kind.cpu().numpy()
        offsets = np.zeros(kind.shape, dtype=np.int64)
        if self.sensitivity is not None:
            ids = np.zeros(kind.shape, dtype=np.int64) if token_ids is None else token_ids.cpu().numpy()
            offsets = self.sensitivity.offsets(ids, kind)
        budget, layouts = self.sequence_bytes(kind.shape[1]), []
        for row, offsets_of_row in zip(kind, offsets):
            exact, coded, left = split_tokens(row, budget, self.hidden_size * 2, self.exact_first)
            stream_bytes = max(0, left - HEADER.itemsize) // 4 * 4 + HEADER.itemsize
            layouts.append(Layout(exact, coded, offsets_of_row[coded], stream_bytes))
        return layouts

    def _plan(self, leading: np.ndarray, gains: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> Plan | None:
        """How to code a sequence by its leading components (N, leading) and its gains (N,) in classes; None where not
        even gains fit in `out`, or where nothing can be coded."""
        model, header = symbol_model(), out[: HEADER.itemsize].view(HEADER)
        if not np.isfinite(leading).all():  # the loss is not either: let the other end see it
            header["state"] = NOT_FINITE
            return None
        base = int(np.sort(gains)[len(gains) // 2])  # the median
        gain_class = class_of_spread(gains - base)
        symbols = np.clip(gains - base, -model.reach[gain_class], model.reach[gain_class])
        gain_bits = model.bits[model.origins[gain_class] + symbols].sum()
        budget = 32.0 * (num_words(out) - rans.STATE_WORDS // 2) - gain_bits
        if budget < 0 or num_words(out) < rans.STATE_WORDS:
            return None
        gains = (base + symbols) * CLASS_UNITS
        # Below it even the smallest component lies beyond the tables, and nothing would become finer.
        lowest = max(int(self.scales[-1] + (gains - offsets).min()) - LARGEST * CLASS_UNITS, -FINEST)
        step = self._choose_step(leading, gains, offsets, budget, lowest)
        finest = max(lowest, step - MARGIN)
        coded = rans.num_coded(self.scales, int((gains - offsets).max()) - finest)
        return Plan(base, symbols, gain_class, budget, step, finest, coded)

    def _choose_step(
        self, leading: np.ndarray, gains: np.ndarray, offsets: np.ndarray, budget: float, lowest: int
    ) -> int:
        """The smallest step, in units, that is expected to fit: by the model's entropies, and by how much more or less
        the leading symbols take."""
        model, levels = symbol_model(), gains - offsets
        step = smallest_step(self.expected, levels, budget, lowest)
        taken = rans.count_bits(leading, self.scales, gains, step + offsets, model.origins, model.reach, model.bits)
        expected = expected_total(self.expected_leading, levels, step)
        if taken <= 0 or expected <= 0:
            return step
        return smallest_step(self.expected, levels, budget * expected / taken, lowest)

    def _write(self, plan: Plan, y: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
        """Components (N, C) of one sequence into `out`, as many as the plan's step needs."""
        model, words = symbol_model(), np.zeros(num_words(out), dtype=np.uint32)
        step, entries = self._fit(plan, y, offsets)
        # One turn, or seldom two.
        while (first := rans.encode(entries, model.starts, model.widths, words)) < 0 and step < FINEST:
            step += 1
            entries, _ = self._quantise(plan, y, offsets, step)
        if first >= 0:
            out[: HEADER.itemsize].view(HEADER)[:] = (step, plan.base, plan.gain_class, CODED)
            body = words[first:].astype("<u4").view(np.uint8)
            out[HEADER.itemsize : HEADER.itemsize + len(body)] = body

    def _fit(self, plan: Plan, y: np.ndarray, offsets: np.ndarray) -> tuple[int, np.ndarray]:
        """About the smallest step whose code fits, and what is to be coded at it; by counting, from the planned one on."""
        step, (entries, over) = plan.step, self._quantise(plan, y, offsets, plan.step)
        unit = max(1.0, unit_bits(self.expected, plan.gains - offsets, step))
        while over > 0 and step < FINEST:
            step += math.ceil(over / unit)
            entries, over = self._quantise(plan, y, offsets, step)
        spare = max(SPARE * plan.budget_bits, unit / 2)
        while -over > spare and step > plan.finest:
            units = min(max(1, int(-over / unit)), step - plan.finest)
            finer, left = self._quantise(plan, y, offsets, step - units)
            if left > 0 and units == 1:
                break
            # What a unit is worth is expected at first, then seen.
            unit = max(1.0, (left - over) / units)
            if left <= 0:
                step, entries, over = step - units, finer, left
        return step, entries

    def _quantise(self, plan: Plan, y: np.ndarray, offsets: np.ndarray, step: int) -> tuple[np.ndarray, float]:
        """What is to be coded at a step, gains first, and by how many bits that exceeds the budget."""
        model, tokens = symbol_model(), len(y)
        entries = np.empty(tokens + y.size, dtype=np.int32)
        entries[:tokens] = model.origins[plan.gain_class] + plan.symbols
        count, num_bits = rans.quantise_tokens(
            y, self.scales, plan.gains, step + offsets, model.origins, model.reach, model.bits, entries[tokens:]
        )
        return entries[: tokens + count], num_bits - plan.budget_bits

    def _decode_tokens(self, stream: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> int:
        """A sequence's components into out, (N, C) float32 zeros; how many leading ones it has."""
        model = symbol_model()
        (header,) = stream[: HEADER.itemsize].copy().view(HEADER)
        words = stream[HEADER.itemsize :].copy().view("<u4").astype(np.uint32)
        gain_class = min(int(header["gain_class"]), len(model.origins) - 1)
        if header["state"] != CODED or len(words) < rans.STATE_WORDS:
            out[:] = np.nan if header["state"] == NOT_FINITE else 0.0
            return out.shape[1]
        return rans.decode(
            words, self.scales, int(header["step"]) + offsets, int(header["gain_base"]), gain_class,
            model.origins, model.bounds, model.starts, model.widths, model.values, out,
        )  # fmt: skip


def in_units(values: np.ndarray) -> np.ndarray:
    """Positive numbers as whole numbers of 1/64 octave, int64."""
    return np.round(UNITS * np.log2(values)).astype(np.int64)


def num_words(out: np.ndarray) -> int:
    """Words of a stream, its header left out."""
    return (len(out) - HEADER.itemsize) // 4
