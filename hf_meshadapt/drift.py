"""Compares now and then, bit for bit, what all replicas of a stage, and both copies of a tied embedding, must hold alike.

Replicas that drift apart train several models and save one of them, without an error. What makes them drift is outside
the arithmetic that the tests can hold equal: a memory fault, kernels that differ between kinds of GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .agreements import Agreements
from .data_parallel.base import GradientSynchronizer
from .fingerprints import digest

NAMED_PARAMETERS = 4
NOTHING = 0  # the place of a tied copy's hash where there is none


class ReplicaDriftError(RuntimeError):
    """Replicas, or the copies of a tied embedding, hold different weights; says when, which stage and which replicas."""


def hash64(tensors: Mapping[str, Tensor]) -> int:
    """64 bits of named tensors, every bit of them read, as an int64."""
    return int.from_bytes(bytes.fromhex(digest(tensors)), "little", signed=True)


def groups_in_words(values: Sequence) -> str:
    """Which replicas hold the same: `replica 0 | replicas 1, 2`."""
    held: dict = {}
    for replica, value in enumerate(values):
        held.setdefault(value, []).append(replica)
    return " | ".join(f"replica{'s' if len(g) > 1 else ''} {', '.join(map(str, g))}" for g in held.values())


class DriftCheck:
    """Every so many optimizer steps, on all ranks alike; 8 bytes to every replica and 16 to every stage.

    Whole weights are read, on the CPU. Where replicas step apart it is the outer model, as the last sync left it: their
    own weights differ until the next.

    Args:
        ranks: the mesh.
        synchronizer: of this process.
        every_steps: None never compares.

    Attributes:
        passed_step: the last one at which nothing differed.
    """

    def __init__(self, ranks: Agreements, synchronizer: GradientSynchronizer, every_steps: int | None):
        self.ranks, self.synchronizer, self.every_steps = ranks, synchronizer, every_steps
        self.passed_step: int | None = None

    def end_step(self, step: int) -> None:
        """To be called after every optimizer step and the sync that belongs to it; `step` is 1 after the first.

        Raises:
            ReplicaDriftError: something differs; on all ranks.
        """
        if self.every_steps and step % self.every_steps == 0:
            self._compare(step)
            self.passed_step = step

    def _compare(self, step: int) -> None:
        weights = self.synchronizer.agreed()
        hashes = self.ranks.gather_over_replicas(torch.tensor([hash64(weights)]))
        differs = len(set(hashes.flatten().tolist())) > 1
        copies = self._tied_hashes(weights)
        tied = copies[0] if copies else NOTHING
        # Every rank must hear of it: those of other stages would wait for the next activation until their deadline.
        stages = self.ranks.gather_over_stages(torch.tensor([int(differs), tied]))
        faults = [self._stage_fault(stage) for stage, (flag, _) in enumerate(stages.tolist()) if flag]
        if differs:
            faults.append(self._named(weights))
        copies += [copy for _, copy in stages.tolist() if copy != NOTHING]
        if not faults and len(set(copies)) > 1:
            replica, last = self.ranks.topology.replica, self.ranks.mesh.stages - 1
            faults = [f"the copies of the tied embedding on stages 0 and {last} of replica {replica} differ"]
        if faults:
            self._refuse(step, faults)

    def _tied_hashes(self, weights: dict[str, Tensor]) -> list[int]:
        names = [name for chunk in self.synchronizer.chunks.values() for name in sorted(chunk.tied)]
        return [hash64({"": weights[name]}) for name in names]

    def _stage_fault(self, stage: int) -> str:
        ranks = ", ".join(map(str, self.ranks.topology.data_parallel_ranks(stage)))
        return f"the replicas of stage {stage} (ranks {ranks}) hold different weights"

    def _named(self, weights: dict[str, Tensor]) -> str:
        """Which parameters of this stage differ and how replicas group; collective over the replicas."""
        mine = torch.tensor([hash64({"": tensor}) for tensor in weights.values()])
        columns = self.ranks.gather_over_replicas(mine).T.tolist()
        parts = {name: column for name, column in zip(weights, columns) if len(set(column)) > 1}
        shown = [f"{name} ({groups_in_words(column)})" for name, column in list(parts.items())[:NAMED_PARAMETERS]]
        more = f" and {len(parts) - len(shown)} more" if len(parts) > len(shown) else ""
        return f"of {len(weights)} parameters {len(parts)} differ: {', '.join(shown)}{more}"

    def _refuse(self, step: int, faults: list[str]) -> None:
        since = "" if self.passed_step is None else f" (alike at step {self.passed_step})"
        raise ReplicaDriftError(
            f"{self.ranks.topology.describe()}: after step {step}{since} {'; '.join(faults)}. Weights saved since then may "
            "be of either: resume from an earlier checkpoint. Look at the memory of the machines named, and give all "
            "replicas of a stage the same kind of device"
        )
