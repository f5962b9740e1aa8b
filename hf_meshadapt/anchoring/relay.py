"""Replica 0's prior on its way to the other replicas, beside the steps' own traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..spectral.prior import AnchorPrior
from .prior import Prior, pack, payload_bytes, unpack

# Steps for a prior to reach the other replicas beside their own traffic; the step after them waits for the rest.
RELAY_STEPS = 4


@dataclass(frozen=True)
class Transfer:
    """A prior on its way.

    Attributes:
        due_step: before whose passes it is taken: step `due_step` + 1.
        prior: on replica 0.
        payload, work: None without other replicas.
    """

    due_step: int
    prior: Prior | None
    payload: Tensor | None = None
    work: dist.Work | None = None


class PriorRelay:
    """Gives all replicas of a stage the prior that replica 0 has; one at a time.

    Args:
        engine: of this rank.
        has_fits: priors may bring fits of boundaries, which make them longer.
    """

    def __init__(self, engine, has_fits: bool):
        self._engine, self._has_fits = engine, has_fits
        self._transfer: Transfer | None = None

    @property
    def busy(self) -> bool:
        """A prior is on its way, or waits to be taken."""
        return self._transfer is not None

    def start(self, prior: Prior | None, held: Mapping[str, AnchorPrior], step: int, num_steps: int) -> None:
        """Starts a transfer; collective over the stage's replicas.

        Args:
            prior: on replica 0; None: it will never come.
            held: whose form priors have.
            num_steps: that it may take.
        """
        if self._engine.mesh.replicas == 1:
            self._transfer = Transfer(step, prior)
            return
        payload = pack(prior, held) if self._engine.topology.replica == 0 else None
        num_bytes = self._agree_on_bytes(payload_bytes(held) if payload is None else len(payload))
        payload = torch.empty(num_bytes, dtype=torch.uint8) if payload is None else payload
        work = dist.broadcast(payload, group=self._engine.groups.anchor, group_src=0, async_op=True)
        self._transfer = Transfer(step + num_steps, prior, payload, work)

    def _agree_on_bytes(self, num_bytes: int) -> int:
        """Of the coming transfer, as replica 0 knows it."""
        if not self._has_fits:
            return num_bytes
        told, engine = torch.tensor([num_bytes]), self._engine
        with engine.naming("the size of a prior from replica 0, with", self._peers), engine.step_meter.waiting():
            dist.broadcast(told, group=engine.groups.anchor, group_src=0)
        return int(told)

    def due(self, step: int) -> bool:
        """Whether what is on its way is to be taken before step `step` + 1."""
        return self.busy and step >= self._transfer.due_step

    def take(self, held: Mapping[str, AnchorPrior]) -> Prior | None:
        """The prior that was on its way, once it is here."""
        transfer, self._transfer = self._transfer, None
        if transfer.work is None:
            return transfer.prior
        engine = self._engine
        with engine.naming("a prior from replica 0, with", self._peers), engine.step_meter.waiting():
            transfer.work.wait()
        return unpack(transfer.payload, held)

    @property
    def _peers(self) -> list[int]:
        return self._engine.topology.data_parallel_ranks(self._engine.topology.stage)
