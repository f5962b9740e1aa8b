"""Which checkpoint `resume_from_checkpoint=True` means: the newest that every rank of the mesh has whole."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from .checkpoint_folder import checkpoint_fault, discard_partials, last_whole_checkpoint
from .engine import MeshEngine
from .folder_lock import is_held


def newest_common(engine: MeshEngine, output_dir: Path) -> Path | None:
    """The newest checkpoint that is whole for every rank, after clearing what a killed save left. Collective.

    Returns:
        None where this rank has none.

    Raises:
        ValueError: the ranks' filesystems have no whole checkpoint of the same step, or another run saves there.
    """
    group = engine.groups.save if engine.groups else None
    first_of_machine = engine.topology.rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    if output_dir.is_dir() and engine.topology.rank == 0:
        engine.folder_lock.hold(output_dir)  # before anything of another run is taken for a killed save's
    if output_dir.is_dir() and first_of_machine and not (engine.topology.rank and is_held(output_dir)):
        discard_partials(output_dir)
    if group is not None:
        dist.barrier(group)
    folder = last_whole_checkpoint(output_dir)
    step = int(folder.name.split("-")[1]) if folder else -1
    if group is not None:
        oldest = torch.tensor(step)
        dist.all_reduce(oldest, op=dist.ReduceOp.MIN, group=group)
        if int(oldest) != step:
            # A machine can lack the newest one when all were killed while they committed it.
            folder = output_dir / f"checkpoint-{int(oldest)}"
            fault = checkpoint_fault(folder) if int(oldest) >= 0 else "another rank has no whole checkpoint at all"
            if fault is not None:
                raise ValueError(
                    f"resume_from_checkpoint=True: {output_dir} of {engine.topology.describe()} shares no whole "
                    f"checkpoint with the other ranks' ({fault}). Give every machine the same ones, or start anew"
                )
    return folder
