"""What is counted and measured in one optimizer step that priors correct."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .correction import alignment
from .factors import Factors


@dataclass
class StepUnderWay:
    """What all replicas of a process have in common in one optimizer step.

    Attributes:
        weight: of the prior; 0 where it does nothing.
        measures: `alignments` are wanted.
        num_entries, num_corrected: gradient entries so far, and those of them that have a prior.
        alignments: `correction.alignment` of every matrix, before its correction.
    """

    weight: float
    measures: bool = False
    num_entries: int = 0
    num_corrected: int = 0
    alignments: list[Tensor] = field(default_factory=list)

    @property
    def share_corrected(self) -> float:
        return self.num_corrected / self.num_entries if self.num_entries else 0.0

    def measure(self, gradient: Tensor, prior: Factors | Tensor) -> None:
        """To be called before a gradient is corrected."""
        if self.measures and isinstance(prior, Factors):
            self.alignments.append(alignment(gradient, prior))

    def alignment(self) -> list[float]:
        """The alignments' sums over all matrices, [] where none were measured."""
        return torch.stack(self.alignments).sum(0).tolist() if self.alignments else []
