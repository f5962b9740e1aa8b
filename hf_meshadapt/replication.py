"""The data-parallel axis of one process: its replicas, what keeps them one model, and what keeps tied copies equal."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import DataParallelConfig, MeshConfig
from .data_parallel.base import AllReduce, ChunkParameters, GradientSynchronizer
from .data_parallel.diloco import DiLoCo, StreamingDiLoCo
from .data_parallel.exchange import Exchange, InProcess, OverGroup
from .data_parallel.hook import PowerSGDSynchronizer
from .data_parallel.tied import TiedSum
from .gradients import sum_tied
from .mesh import MeshGroups
from .pipeline.assembly import ModelParts
from .pipeline.local_replicas import LocalReplicas
from .sync_cost import SyncCost, rank_bytes, whole

SYNCHRONIZERS: dict[str, type[GradientSynchronizer]] = {
    "allreduce": AllReduce,
    "powersgd": PowerSGDSynchronizer,
    "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo,
}


class Replication:
    """Puts a synchronizer over the replicas of this process's chunks.

    Args:
        groups: None in the emulated mesh.

    Attributes:
        local: the replicas of this process.
        synchronizer: between replicas of a stage.
        ddp_group: of the replicas whose gradients DistributedDataParallel averages; None where it does not.
    """

    def __init__(self, config: DataParallelConfig, mesh: MeshConfig, groups: MeshGroups | None, parts: ModelParts):
        self.config, self.groups, self.parts = config, groups, parts
        num_local = mesh.replicas if mesh.emulated else 1
        self.local = LocalReplicas(parts.named_trainable(), num_local, config.steps_apart)
        exchange: Exchange = InProcess(num_local)
        ends: Exchange = InProcess(2)
        if groups is not None:
            paced = config.chunk_bytes if config.sync == "streaming_diloco" else None
            exchange = OverGroup(groups.data_parallel, mesh.timeout_seconds, paced)
        if groups is not None and groups.tied is not None:
            ends = OverGroup(groups.tied, mesh.timeout_seconds)
        self.ddp_group = groups.data_parallel if groups and not config.steps_apart else None
        chunks = chunk_parameters(parts, mesh.stages)
        if mesh.replicas == 1 and config.sync != "allreduce" and not parts.untied:
            raise ValueError(
                f"dp_sync={config.sync!r} has no effect: there is one replica, and embedding and output head of "
                f"{type(parts.model).__name__} are not one matrix over two stages. Leave it unset"
            )
        kind = config.sync if mesh.replicas > 1 else "allreduce"  # then only tied copies have something to exchange
        self.synchronizer = SYNCHRONIZERS[kind](config, exchange, chunks, self.local.weights)
        self._tied = self._make_tied(ends)

    def _make_tied(self, ends: Exchange) -> TiedSum | None:
        copies = self.parts.tied_copies()
        if not copies or self.config.sync == "allreduce":
            return None
        dtype = getattr(torch, self.config.factor_dtype)
        copy, num_differing = copies[0], len(self.local.weights)
        return TiedSum(copy.shape, self.config.matrix_rank, dtype, ends, num_differing, copy.device)

    def sum_tied(self, replica: int, copies: list[nn.Parameter]) -> None:
        """Gives the copies of a tied embedding the sum of both ends' gradients.

        Args:
            replica: of this process, whose gradients these are.
            copies: those of this process, at least one.
        """
        if self._tied is not None:
            total = self._tied.sum(replica, [copy.grad for copy in copies])
            for copy in copies:
                copy.grad = total.to(copy.dtype, copy=True)
        elif len(copies) == 2:
            sum_tied(*copies)
        else:
            (copy,) = copies
            if copy.grad is None:
                copy.grad = torch.zeros_like(copy)
            dist.all_reduce(copy.grad, group=self.groups.tied)

    def cost(self, where: str) -> SyncCost:
        """Watches whether what the synchronizer saves is worth its time; `where` names this rank."""
        exchange, parts = self.synchronizer.exchange, self.synchronizer.parts().values()
        value_bytes = max((p.element_size() for _, p in self.parts.named_trainable()), default=4)
        shapes = [part for parts_of_stage in parts for part in parts_of_stage]
        syncs = (whole(self.config) or self.config, self.config)
        dense, coded = (rank_bytes(shapes, sync, exchange.num_replicas, value_bytes) for sync in syncs)
        return SyncCost(self.config, exchange.clock, dense - coded, where)

    def restart(self) -> None:
        """Forgets what was remembered of earlier steps; the model's weights, the same on all replicas, are the start."""
        self.synchronizer.restart()
        if self._tied is not None:
            self._tied.restart()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but weights and optimizer state; what is on its way is awaited first."""
        state = {f"sync/{name}": tensor for name, tensor in self.synchronizer.state_dict().items()}
        tied = {} if self._tied is None else self._tied.state_dict()
        return state | {f"tied/{name}": tensor for name, tensor in tied.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Exact; of the same mesh and config."""
        parts: dict[str, dict[str, Tensor]] = {"sync": {}, "tied": {}}
        for name, tensor in state.items():
            kind, _, rest = name.partition("/")
            parts[kind][rest] = tensor
        self.synchronizer.load_state_dict(parts["sync"])
        if self._tied is not None:
            self._tied.load_state_dict(parts["tied"])


def chunk_parameters(parts: ModelParts, num_stages: int) -> dict[int, ChunkParameters]:
    """What a synchronizer has to know of this process's chunks."""
    prefix = f"{parts.layout.layers}."
    copies = parts.tied_copies()
    chunks = {}
    for chunk, stage in parts.stages.items():
        named = ((name, parts.model.get_parameter(name)) for name in stage.owned_names)
        parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        layers = {n: int(n.removeprefix(prefix).split(".")[0]) for n in parameters if n.startswith(prefix)}
        tied = frozenset(name for name, parameter in parameters.items() if any(parameter is copy for copy in copies))
        chunks[chunk] = ChunkParameters(chunk % num_stages, parameters, layers, tied)
    return chunks
