"""Where a rank sits in the mesh, and the process groups of each axis.

`MeshTopology` is pure arithmetic. `MeshGroups` makes every process group exactly once, on every rank in the same
order (torch requires it), and is passed to whoever communicates: nothing else in the package creates groups, and no
collective of a training step runs on WORLD.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from hf_meshadapt.metering import SocketMeter


@dataclass(frozen=True)
class MeshTopology:
    """Rank arithmetic of a stages x replicas mesh; consecutive ranks form a pipeline.

    Rank = replica x stages + stage, so that rank 0 is the first stage of replica 0.
    """

    stages: int
    replicas: int
    rank: int = 0

    @property
    def stage(self) -> int:
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        return self.rank // self.stages

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def rank_of(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    def pipeline_ranks(self, replica: int) -> list[int]:
        return [self.rank_of(replica, stage) for stage in range(self.stages)]

    def data_parallel_ranks(self, stage: int) -> list[int]:
        return [self.rank_of(replica, stage) for replica in range(self.replicas)]

    def tied_ranks(self, replica: int) -> list[int]:
        """The two ends of a pipeline, which hold one copy each of a tied embedding."""
        return [self.rank_of(replica, 0), self.rank_of(replica, self.stages - 1)]

    def describe(self, rank: int | None = None) -> str:
        """A rank as error messages name it: `rank 3 (stage 1 of replica 1)`."""
        where = self if rank is None else MeshTopology(self.stages, self.replicas, rank)
        return f"rank {where.rank} (stage {where.stage} of replica {where.replica})"


def meet(group: dist.ProcessGroup) -> None:
    """Makes a group's NCCL communicator, on this thread's GPU, while all of its members are here.

    It would be made by the first exchange, and a pipeline's first is one of two stages: torch asks for all members
    (`batch_isend_irecv`), and with three stages or more the others would not be there.
    """
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


class MeshGroups:
    """Process groups of this rank, by axis.

    Attributes:
        pipeline: this replica's stages; activations and gradients.
        data_parallel: this stage's replicas; gradient synchronisation.
        tied: first and last stage of this replica, None on the stages between and on one-stage meshes.
        control: this replica's stages, CPU tensors; gradient norms and other few-byte agreements.
        replica_control: this stage's replicas, CPU tensors; token counts.
        save: all ranks, CPU tensors; streams checkpoint shards and agrees that a checkpoint is whole.
        anchor: this stage's replicas, CPU tensors; priors from replica 0 to the others. None without an anchor.

    A `meter` given at construction learns which connections belong to which axis (both control groups are `control`).
    `agree`, given `save`, runs before the other groups are made: ranks that mean different meshes would wait for ever.
    """

    def __init__(
        self,
        topology: MeshTopology,
        wire_backend: str,
        timeout_seconds: float,
        meter: SocketMeter | None = None,
        agree: Callable[[dist.ProcessGroup], None] | None = None,
        anchored: bool = False,
    ):
        self.topology = topology
        self.timeout_seconds = timeout_seconds

        def make(axis: str, rank_lists: list[list[int]], backend: str) -> dist.ProcessGroup | None:
            # Every rank makes every group, its own or not, in this one order: new_group is collective over WORLD.
            mine = None
            with meter.axis(axis) if meter else nullcontext():
                for ranks in rank_lists:
                    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend=backend)
                    if topology.rank in ranks:
                        mine = group
                if mine is not None and backend == "nccl":
                    meet(mine)
            return mine

        self.save = make("save", [list(range(topology.stages * topology.replicas))], "gloo")
        if agree is not None:
            agree(self.save)
        pipelines = [topology.pipeline_ranks(replica) for replica in range(topology.replicas)]
        replicas = [topology.data_parallel_ranks(stage) for stage in range(topology.stages)]
        self.pipeline = make("pipeline", pipelines, wire_backend)
        self.data_parallel = make("data_parallel", replicas, wire_backend)
        self.tied = None
        if topology.stages > 1:
            ends = [topology.tied_ranks(replica) for replica in range(topology.replicas)]
            self.tied = make("tied", ends, wire_backend)
        self.control = make("control", pipelines, "gloo")
        self.replica_control = make("control", replicas, "gloo")
        self.anchor = make("anchor", replicas, "gloo") if anchored else None
