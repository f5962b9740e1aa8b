"""Small exchanges between ranks outside the pipeline's own traffic; every wait names whom it waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from .config import MeshConfig
from .figures import StepMeter
from .fingerprints import Fingerprint, refuse_differences
from .mesh import MeshGroups, MeshTopology
from .metering import exchange_json, gather_tensors
from .roll_call import missing_ranks
from .waiting import Waiter, within

# An error lists the ranks it may be about, up to so many.
MAX_NAMED_PEERS = 8
ALIKE = "Give all ranks the same data set, seed and data collator; a collator must not depend on the rank"


class Agreements:
    """What the ranks of a mesh tell each other; base of `MeshEngine`. All of it works in the emulated mesh too.

    Attributes:
        groups: process groups, None in the emulated mesh.
        agreed_lengths: of batches that all stages have read.
    """

    mesh: MeshConfig
    topology: MeshTopology
    step_meter: StepMeter
    waiter: Waiter
    groups: MeshGroups | None = None
    agreed_lengths: set[int]
    _num_roll_calls: int = 0

    def roll_call(self, what: str) -> None:
        """To be called first in whatever a person's script calls and all ranks must.

        Args:
            what: the call, as the script writes it.

        Raises:
            LinkError: not all ranks came in time; says which did not and what to do.
        """
        if self.groups is None:
            return
        self._num_roll_calls += 1
        rank, timeout_seconds = self.topology.rank, self.waiter.timeout_seconds
        call = f"{self.groups.save.group_name}/{self._num_roll_calls}/{what}"
        try:
            missing = within(
                timeout_seconds,
                lambda: missing_ranks(call, rank, self.mesh.num_ranks, timeout_seconds),
            )
        except dist.DistError as error:
            if rank == 0:
                raise self.waiter.failure(self.topology.describe(), f"all ranks to call {what}", error) from error
            missing = {0: isinstance(error, dist.DistNetworkError)}  # its process keeps the store, or its launcher
        if missing:
            named = [self.topology.describe(peer) + ", which has ended" * ended for peer, ended in missing.items()]
            hidden = len(named) - MAX_NAMED_PEERS
            more = [f"{hidden} more"] if hidden > 0 else []
            raise self.waiter.absence(what, self.topology.describe(), "; ".join(named[:MAX_NAMED_PEERS] + more))

    def share(self, mine: dict) -> dict:
        """Merges {chunk: JSON-able value} over the stages of the pipeline."""
        if self.groups is None:
            return mine
        with self.naming("small facts from", self._pipeline):
            everyone = exchange_json(sorted(mine.items()), self.groups.control)
        return {chunk: names for claims in everyone for chunk, names in claims}

    def refuse_unlike(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Raises ValueError on all ranks where what they made `fingerprint` of differs; says what, where and how."""
        if self.groups is None:
            return
        mine = fingerprint()
        with self.naming("fingerprints from"):
            self._refuse_unlike_in(self.groups.save, mine)

    @staticmethod
    def _refuse_unlike_in(group: dist.ProcessGroup, mine: Fingerprint) -> None:
        refuse_differences(exchange_json(mine, group))

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sums a list of figures, element by element, over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.groups is not None:
            with self.naming("the last steps' figures from"):
                dist.all_reduce(tensor, group=self.groups.save)
        return tensor.tolist()

    def sum_over_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a small CPU tensor over the replicas of this stage."""
        if self.groups is not None:
            with self._waiting("the other replicas' sums from", self._replicas):
                dist.all_reduce(tensor, group=self.groups.replica_control)
        return tensor

    def gather_over_replicas(self, mine: torch.Tensor) -> torch.Tensor:
        """Small CPU tensors (...) of this stage's replicas in order, (replicas, ...); of one in the emulated mesh."""
        if self.groups is None:
            return mine[None]
        return self._gather(mine, self.groups.replica_control, "the other replicas' figures from", self._replicas)

    def gather_over_stages(self, mine: torch.Tensor) -> torch.Tensor:
        """Small CPU tensors (...) of this pipeline's stages in order, (stages, ...); of one in the emulated mesh."""
        if self.groups is None:
            return mine[None]
        return self._gather(mine, self.groups.control, "the other stages' figures from", self._pipeline)

    def _gather(self, mine: torch.Tensor, group: dist.ProcessGroup, awaited: str, ranks: list[int]) -> torch.Tensor:
        gathered = [torch.empty_like(mine) for _ in ranks]
        with self._waiting(awaited, ranks):
            dist.all_gather(gathered, mine, group=group)
        return torch.stack(gathered)

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives every stage of the pipeline the last stage's small CPU tensor."""
        if self.groups is not None and self.mesh.num_chunks > 1:
            with self._waiting("the last stage's result from", self._pipeline):
                dist.broadcast(tensor, group=self.groups.control, group_src=self.mesh.stages - 1)
        return tensor

    @property
    def holds_output(self) -> bool:
        """Whether the model's output appears in this process."""
        return self.mesh.emulated or self.topology.is_last

    @property
    def is_judge(self) -> bool:
        """Whether this is the process that computes metrics: the last stage of replica 0."""
        return self.holds_output and self.topology.replica == 0

    def gather_to_first(self, mine: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Every replica's tensors, in replica order, at the first replica; nothing at the others. CPU tensors.

        Collective over the replicas of one stage.
        """
        if self.groups is None or self.mesh.replicas == 1:
            return [mine]
        with self.naming("rows of the evaluation from", self._replicas):
            return gather_tensors(mine, self.groups.replica_control)

    def from_judge(self, value):
        """Gives all ranks the JSON-able value of the process that computes metrics; others' values are ignored."""
        return self.from_last_stages(value if self.is_judge else None)[0]

    def from_last_stages(self, value) -> list:
        """Gives all ranks the JSON-able values of the last stages, in order of replicas; others' values are ignored."""
        if self.groups is None:
            return [value]
        with self.naming("the metrics from", list(range(self.mesh.num_ranks))):
            values = exchange_json(value, self.groups.replica_control) if self.topology.is_last else None
            return exchange_json(values, self.groups.control)[-1]

    def agree_on_length(self, length: int) -> None:
        """To be called before a batch runs; an exchange over the pipeline only for a length that was not seen before.

        Two lengths that both were seen are not compared: no message travels before a batch, and one for each would cost
        its round trip. Gloo lets pass what is shorter than expected, and the digests of what was read, which travel with
        the gradient norm or after an evaluation, tell; it aborts the process that gets more than it expects.

        Raises:
            ValueError: a stage has a batch of a new length, and the others have new ones that differ; on all of them.
        """
        if self.groups is None or self.mesh.num_chunks == 1 or length in self.agreed_lengths:
            return
        lengths = self.share({self.topology.stage: length})
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{tokens} on stage {stage}" for stage, tokens in sorted(lengths.items()))
            raise ValueError(
                f"the stages of replica {self.topology.replica} have batches of different lengths ({found}). {ALIKE}"
            )
        self.agreed_lengths.add(length)

    def agree_on_batches(self, digest: torch.Tensor, when: str) -> None:
        """`refuse_unlike_batches` for the digest of what this stage has read, (2,)."""
        digests = self.share({self.topology.stage: digest.tolist()})
        self.refuse_unlike_batches(torch.tensor([numbers for _, numbers in sorted(digests.items())]), when)

    def refuse_unlike_batches(self, digests: torch.Tensor, when: str) -> None:
        """Raises ValueError where the stages of this pipeline have read different batches.

        Args:
            digests: sums of `batch_digest` by stage, (stages, 2).
        """
        if (digests != digests[0]).any():
            found = "; ".join(
                f"stage {stage}: {positions:.0f} positions, digest {total:.0f}"
                for stage, (positions, total) in enumerate(digests.tolist())
            )
            raise ValueError(
                f"the stages of replica {self.topology.replica} have read different batches {when} ({found}). {ALIKE}"
            )

    def from_first(self, value):
        """Gives all ranks the JSON-able value of rank 0; others' values are ignored."""
        if self.groups is None:
            return value
        with self.naming("what rank 0 found out, together with"):
            return exchange_json(value if self.topology.rank == 0 else None, self.groups.save)[0]

    @contextlib.contextmanager
    def _waiting(self, awaited: str, ranks: list[int]) -> Iterator[None]:
        with self.naming(awaited, ranks), self.step_meter.waiting():
            yield

    def naming(self, awaited: str, ranks: list[int] | None = None) -> contextlib.AbstractContextManager:
        """Makes a lost link within the context a `LinkError` that names this rank, the step, `awaited` and peers.

        Args:
            awaited: what is awaited, up to a preposition: the peers follow.
            ranks: members of the group in which the wait happens; by default all.
        """
        others = [rank for rank in ranks or range(self.mesh.num_ranks) if rank != self.topology.rank]
        few = 0 < len(others) <= MAX_NAMED_PEERS
        peers = " or ".join(map(self.topology.describe, others)) if few else "one of all ranks"
        return self.waiter.naming(self.topology.describe(), f"{awaited} {peers}")

    @property
    def _pipeline(self) -> list[int]:
        return self.topology.pipeline_ranks(self.topology.replica)

    @property
    def _replicas(self) -> list[int]:
        return self.topology.data_parallel_ranks(self.topology.stage)

    def _describe_stage(self, stage: int) -> str:
        return self.topology.describe(self.topology.rank_of(self.topology.replica, stage % self.mesh.stages))
