"""Losses on pairs of a preferred and a rejected answer, from the log-probabilities of both: pure tensor functions.

Rows of a batch come in pairs: 2i is the preferred answer of pair i with its prompt, 2i + 1 the rejected one.

Sources: DPO (arXiv 2305.18290), IPO (arXiv 2310.12036), SLiC's hinge (arXiv 2305.10425), APO (arXiv 2408.06266), as
trl 1.16 computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

IGNORED = -100


@dataclass(frozen=True)
class PairScores:
    """How much more likely answers have become than they are to the reference, (pairs,) each.

    Attributes:
        chosen, rejected: log-probability less that of the reference.
        num_chosen, num_rejected: tokens of the answers.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    num_chosen: torch.Tensor
    num_rejected: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen - self.rejected

    @property
    def margin_per_token(self) -> torch.Tensor:
        return self.chosen / self.num_chosen.clamp(min=1) - self.rejected / self.num_rejected.clamp(min=1)


# From scores and beta to the loss of each pair.
PAIR_LOSSES: dict[str, Callable[[PairScores, float], torch.Tensor]] = {
    "sigmoid": lambda scores, beta: -F.logsigmoid(beta * scores.margin),
    "sigmoid_norm": lambda scores, beta: -F.logsigmoid(beta * scores.margin_per_token),
    "hinge": lambda scores, beta: torch.relu(1 - beta * scores.margin),
    "ipo": lambda scores, beta: (scores.margin_per_token - 1 / (2 * beta)) ** 2,
    "apo_zero": lambda scores, beta: 1 - torch.sigmoid(beta * scores.chosen) + torch.sigmoid(beta * scores.rejected),
    "apo_down": lambda scores, beta: torch.sigmoid(beta * scores.chosen) + 1 - torch.sigmoid(beta * scores.margin),
}


@dataclass(frozen=True)
class PairLoss:
    """The summed loss of a microbatch's pairs, divided by `num_items`.

    Args:
        types: of `PAIR_LOSSES`, which are added up.
        weights: one for each.
        beta: how far the model may go away from the reference; larger is less far.
    """

    types: tuple[str, ...]
    weights: tuple[float, ...]
    beta: float

    def __call__(
        self,
        output,
        labels: torch.Tensor,
        num_items: torch.Tensor,
        loss_input_reference: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            output: its `logits` (2 x pairs, T, vocabulary).
            labels: (2 x pairs, T), the answers' tokens; pairs without any are padding and add nothing.
            num_items: pairs of the whole step.
            loss_input_reference: log-probabilities to the reference, (2 x pairs,); zeros if None.
        """
        chosen, rejected = paired(log_probabilities(output.logits, labels))
        if loss_input_reference is not None:
            reference = paired(loss_input_reference)
            chosen, rejected = chosen - reference[0], rejected - reference[1]
        scores = PairScores(chosen, rejected, *paired((labels != IGNORED).sum(1)))
        losses = sum(weight * PAIR_LOSSES[name](scores, self.beta) for name, weight in zip(self.types, self.weights))
        return losses[is_pair(labels)].sum() / num_items


def paired(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Preferred and rejected entries of (2 x pairs,)."""
    return rows[0::2], rows[1::2]


def is_pair(labels: torch.Tensor) -> torch.Tensor:
    """Which pairs have any token to be predicted, (pairs,)."""
    preferred, rejected = paired((labels[:, 1:] != IGNORED).any(dim=1))
    return preferred | rejected


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed log-probability of every row's labels, float32 (rows,).

    Args:
        logits: (rows, T, vocabulary).
        labels: (rows, T), each predicted by the logits before it.
    """
    by_token = F.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=IGNORED
    )
    return -by_token.sum(dim=1)
