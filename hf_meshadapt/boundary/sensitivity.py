"""How much finer each token is coded than others: by what the loss is expected to feel of an error in it.

    offset(t) = -(c / 2) log2 of the token's expected squared gradient, relative to all tokens     (in octaves of the step)

With c = 1 the felt error would be least if expectations were right; 0.7 is safer, since a regression on
the tokens explains only a part of how much gradients differ. Both ends know the tokens and come to
the same whole numbers: predictions are sums of two table entries, rounded before they are added.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from .fitting import BoundaryFit
from .sequence_coder import FIRST, TARGET
from .statistics import FELT_POWER
from .symbol_model import UNITS

CAUTION = 0.7
ONE = 1 << 12  # the mean prediction, as a whole number
# Predictions of the root are kept within these multiples of the mean: 256 times less and more of the squared gradient.
LEAST, MOST = ONE // 2, ONE * 2


class TokenSensitivity:
    """Offsets of the quantiser's step by token.

    Args:
        fit: of the boundary; without `felt` only context and targets are told apart.
        table: token features, (vocabulary, size).
    """

    def __init__(self, fit: BoundaryFit, table: Tensor | None):
        self.by_kind = [round(octaves_of(value) * UNITS) for value in fit.sensitivity]
        self.parts: np.ndarray | None = None
        if fit.felt is not None and table is not None:
            features, felt = table.cpu().double().numpy(), fit.felt.cpu().double().numpy()
            size = features.shape[1]
            # (kind, place, vocabulary): this token and the one before. Not the next: the step's size would tell the label.
            parts = [[features @ weights[i * size : (i + 1) * size] for i in range(2)] for weights in felt]
            self.parts = np.round(np.array(parts) * ONE).clip(-(1 << 15), (1 << 15) - 1).astype(np.int16)
            self.constant = np.round(felt[:, -1] * ONE).astype(np.int64)
            powers = np.arange(MOST + 1, dtype=np.float64).clip(LEAST) / ONE
            octaves = -0.5 * CAUTION / FELT_POWER * np.log2(powers)
            self.offsets_of = np.round(octaves * UNITS).astype(np.int64)

    def offsets(self, token_ids: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """int64 (B, T), in units of `symbol_model.UNITS`.

        Args:
            token_ids, kind: (B, T), or one sequence, (T,).
        """
        is_target = (kind == TARGET).astype(np.int64)
        if self.parts is None:
            return np.where(is_target, self.by_kind[1], self.by_kind[0])
        total = self.constant[is_target] + self.parts[is_target, 0, token_ids]  # int64
        before = self.parts[is_target[..., 1:], 1, token_ids[..., :-1]]
        total[..., 1:] += np.where(kind[..., 1:] == FIRST, 0, before)  # nothing is before a packed sequence
        return self.offsets_of[total.clip(LEAST, MOST)]


def octaves_of(squared_gradient: float) -> float:
    """By how much the step of tokens with this mean squared gradient, relative to all, is larger."""
    return -0.5 * math.log2(squared_gradient)
