"""What keeps replicas one model, in a checkpoint: error memories, outer model, and each replica's own weights.

One pair of files per rank, `mesh_state/sync-0000i.safetensors` and `.json`; none where nothing is remembered. It is of
use to the same mesh with the same sync only; others start anew from the checkpoint's model, with a warning.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors.torch import load_file

from .checkpoint_folder import MESH_STATE, read_json
from .checkpoint_state import load_optimizer_state, optimizer_state_by_name, save_pair
from .engine import MeshEngine

logger = logging.getLogger(__name__)


def written_for(engine: MeshEngine) -> dict:
    """What this state depends on, as JSON gives it back; rates may change."""
    mesh, sync = engine.mesh, engine.data_parallel
    return {
        "mesh": [mesh.stages, mesh.replicas, mesh.chunks_per_rank, mesh.emulated],
        "layers": [len(span) for span in engine.parts.spans],
        "sync": [sync.sync, sync.matrix_rank, sync.factor_dtype],
        "outer": [sync.outer_wire, sync.sync_every, sync.num_fragments, sync.overlap_steps],
    }


def save_sync_state(engine: MeshEngine, folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Writes this rank's state; what is on its way between replicas is awaited first."""
    tensors, inner = engine.replication.state_dict(), []
    if engine.data_parallel.steps_apart:
        named = engine.parts.named_trainable()
        for replica in engine.replication.local.turns(optimizer):
            state, scalars = optimizer_state_by_name(optimizer, named)
            tensors |= {f"inner/{replica}/weights/{name}": parameter.data for name, parameter in named}
            tensors |= {f"inner/{replica}/optimizer/{name}": tensor for name, tensor in state.items()}
            inner.append(scalars)
    if engine.data_parallel.sync != "allreduce":  # a stage in the middle may have nothing, and says so
        save_pair(_stem(engine, folder), tensors, {"written_for": written_for(engine), "inner": inner})


def load_sync_state(engine: MeshEngine, folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Takes over what `save_sync_state` wrote, exactly, if all ranks find it; else all start anew. Collective.

    The checkpoint's weights and optimizer state, which may be another replica's, must be in place already.
    """
    local = engine.replication.local
    local.share_optimizer_state(optimizer)
    if engine.data_parallel.sync == "allreduce":
        return
    path = _stem(engine, folder).with_suffix(".json")
    values = read_json(path) if path.exists() else None
    usable = values is not None and values["written_for"] == written_for(engine)
    if engine.sum_over_ranks([float(usable)]) != [float(engine.mesh.num_ranks if engine.groups else 1)]:
        if engine.topology.rank == 0:
            logger.warning(
                "%s was written by another mesh or dp_sync: error feedback and the outer optimizer start anew", folder
            )
        return
    tensors = load_file(path.with_suffix(".safetensors"))
    engine.replication.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("inner/")})
    if engine.data_parallel.steps_apart:
        for replica in local.turns(optimizer):
            _load_replica(engine, optimizer, _below(tensors, f"inner/{replica}/"), values["inner"][replica])


@torch.no_grad()
def _load_replica(engine: MeshEngine, optimizer, tensors: dict[str, torch.Tensor], scalars: dict) -> None:
    named, weights = engine.parts.named_trainable(), _below(tensors, "weights/")
    for name, parameter in named:
        parameter.copy_(weights[name])
    load_optimizer_state(optimizer, named, _below(tensors, "optimizer/"), scalars)


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _stem(engine: MeshEngine, folder: Path) -> Path:
    return folder / MESH_STATE / f"sync-{engine.topology.rank:05d}"
