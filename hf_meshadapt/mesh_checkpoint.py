"""Saves and resumes a mesh run: composes the checkpoint functions in the order that keeps every checkpoint whole."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from .checkpoint import STANDARD_SHARD, load_stage_weights, merge_index, save_stage
from .checkpoint_folder import (
    INDEX_NAME,
    checkpoint_fault,
    commit,
    discard_partials,
    last_whole_checkpoint,
    open_partial,
    save_mesh_info,
)
from .checkpoint_state import (
    capture_rng,
    load_optimizer_files,
    load_optimizer_state,
    load_rank_state,
    optimizer_state_by_name,
    restore_rng,
    save_optimizer_files,
    save_rank_state,
)
from .engine import MeshEngine
from .shard_transfer import gather_files, is_shared

logger = logging.getLogger(__name__)


class SaveSite:
    """How this rank takes part in writing one folder; made, and every method called, on all ranks together.

    Ranks see one shared filesystem, or each machine its own; then every machine keeps what its ranks wrote, which is
    what they need to resume, and rank 0's also receives the weights of all stages.

    Args:
        parent: existing folder under which the partial folder is made.
        name: name of the folder to be.
        keep_local: do not bring weights to rank 0's machine (`save_on_each_node`).
    """

    def __init__(self, engine: MeshEngine, parent: Path, name: str, keep_local: bool = False):
        self.engine, self.final = engine, parent / name
        self.rank = engine.topology.rank
        self.group = engine.groups.save if engine.groups else None
        everyone = list(range(engine.mesh.num_ranks if self.group else 1))
        self.shared = self.group is None or is_shared(parent, self.group, self.rank)
        self.peers = everyone if self.shared else machine_ranks(self.rank, len(everyone))
        self.keep_local = keep_local
        # Of the ranks that see this folder, the first writes what there is once, and the first of a stage its stage.
        self.is_leader = self.rank == self.peers[0]
        stages = engine.mesh.stages if self.group else 1
        self.local_stages = sorted({peer % stages for peer in self.peers})
        self.writes_stage = not any(peer < self.rank and peer % stages == self.rank % stages for peer in self.peers)
        self.partial = self.final.with_name(f".partial-{name}")
        if self.is_leader:
            open_partial(self.final)
        self.barrier()

    def barrier(self) -> None:
        """Waits for all ranks, each of which may take its time."""
        if self.group is not None:
            gather_files([], self.partial, self.group, self.rank, shared=True)

    def write_weights(self) -> None:
        """Every stage's weights into the partial folder, as one standard checkpoint at the leader."""
        paths = []
        if self.writes_stage:
            stages = 1 if self.group is None else self.engine.mesh.stages
            parts = self.engine.parts
            paths = save_stage(parts.model, parts.saved_names(), self.partial, self.engine.topology.stage, stages)
        if self.group is not None:
            streams = not self.keep_local and self.engine.topology.replica == 0 and 0 not in self.peers
            send = paths if streams else []
            gather_files(send, self.partial, self.group, self.rank, shared=self.shared or self.keep_local)
        if self.is_leader:
            whole = self.shared or (self.rank == 0 and not self.keep_local)
            merge_index(self.partial, None if whole else self.local_stages)


def machine_ranks(rank: int, num_ranks: int) -> list[int]:
    """Ranks on this machine, as the launcher numbers them."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return list(range(first, min(num_ranks, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def save_model(engine: MeshEngine, folder: Path, write_extras: Callable[[Path], None], keep_local: bool) -> None:
    """Writes one ordinary Hugging Face checkpoint into `folder`, which may hold other files. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    site = SaveSite(engine, folder, "model", keep_local)
    site.write_weights()
    if site.is_leader:
        write_extras(site.partial)
        install(site.partial, folder)
    site.barrier()


def install(partial: Path, folder: Path) -> None:
    """Moves finished files into a folder; at no moment do old and new weights look like one model."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    names = {path.name for path in partial.iterdir()}
    for path in folder.iterdir():
        if STANDARD_SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()
    for name in sorted(names, key=lambda name: name == INDEX_NAME):
        os.replace(partial / name, folder / name)
    partial.rmdir()


def save_checkpoint(
    engine: MeshEngine,
    final: Path,
    *,
    step: int,
    write_extras: Callable[[Path], None],
    optimizer: torch.optim.Optimizer | None,
    scheduler_state: dict,
    keep_local: bool,
) -> None:
    """Writes a checkpoint to resume from, whole or not at all. Collective.

    Args:
        final: the checkpoint's folder.
        write_extras: writes tokenizer, trainer state and the like; called once per filesystem.
        optimizer: the torch optimizer; None saves the model only.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    site = SaveSite(engine, final.parent, final.name, keep_local)
    site.write_weights()
    if optimizer is not None:
        _write_state(site, optimizer, scheduler_state)
    site.barrier()
    if site.is_leader:
        write_extras(site.partial)
        save_mesh_info(site.partial, dataclasses.asdict(engine.mesh), step)
        commit(site.partial, final)
    site.barrier()


def _write_state(site: SaveSite, optimizer: torch.optim.Optimizer, scheduler_state: dict) -> None:
    parts = site.engine.parts
    if site.writes_stage:
        copies = parts.stored_name_of_copy()
        named = [(name, parameter) for name, parameter in parts.named_trainable() if name not in copies]
        save_optimizer_files(site.partial, site.engine.topology.stage, *optimizer_state_by_name(optimizer, named))
    save_rank_state(
        site.partial, site.rank, rng=capture_rng(), scheduler=scheduler_state, tensors=boundary_state(site.engine)
    )


def boundary_state(engine: MeshEngine) -> dict[str, torch.Tensor]:
    """Buffers of this rank's boundaries by `chunk/buffer`: what calibration found out."""
    return {
        f"{chunk}/{name}": buffer
        for chunk, stage in engine.parts.stages.items()
        if stage.receive is not None
        for name, buffer in stage.receive.named_buffers()
    }


def load_weights(engine: MeshEngine, folder: Path) -> None:
    """This rank's weights from a checkpoint of any mesh shape.

    Raises:
        ValueError: the checkpoint is not whole; says what is missing.
    """
    fault = checkpoint_fault(folder)
    if fault is not None:
        raise ValueError(
            f"resume_from_checkpoint={folder}: not a whole checkpoint of a mesh run ({fault}). Use another"
        )
    parts = engine.parts
    load_stage_weights(parts.model, parts.saved_names(), folder, parts.stored_name_of_copy())


def load_state(engine: MeshEngine, folder: Path, optimizer: torch.optim.Optimizer, scheduler) -> None:
    """Optimizer, scheduler and boundary state; another mesh shape takes what is kept by parameter name."""
    parts = engine.parts
    copies = parts.stored_name_of_copy()
    named = [(copies.get(name, name), parameter) for name, parameter in parts.named_trainable()]
    tensors, scalars = load_optimizer_files(folder, {name for name, _ in named})
    load_optimizer_state(optimizer, named, tensors, scalars)
    try:
        state = load_rank_state(folder, engine.topology.rank)
    except FileNotFoundError:
        state = load_rank_state(folder, 0)
    scheduler.load_state_dict(state.scheduler)
    buffers = boundary_state(engine)
    if buffers.keys() <= state.tensors.keys():
        for name, buffer in buffers.items():
            buffer.copy_(state.tensors[name])
    elif buffers:
        logger.warning("%s was written by another mesh shape: boundaries are calibrated anew", folder)


def load_rng(engine: MeshEngine, folder: Path) -> None:
    """Random number generators of this rank; left alone when the checkpoint has none for it."""
    try:
        state = load_rank_state(folder, engine.topology.rank)
    except FileNotFoundError as error:
        logger.warning("%s; random numbers of this rank start anew", error)
    else:
        restore_rng(state.rng)


def newest_common(engine: MeshEngine, output_dir: Path) -> Path | None:
    """The newest checkpoint that is whole for every rank, after clearing what a killed save left. Collective.

    Raises:
        ValueError: the ranks' filesystems have no whole checkpoint of the same step.
    """
    group = engine.groups.save if engine.groups else None
    first_of_machine = engine.topology.rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    if first_of_machine and output_dir.is_dir():
        discard_partials(output_dir)
    if group is not None:
        dist.barrier(group)
    folder = last_whole_checkpoint(output_dir)
    step = int(folder.name.split("-")[1]) if folder else -1
    if group is not None:
        oldest = torch.tensor(step)
        dist.all_reduce(oldest, op=dist.ReduceOp.MIN, group=group)
        if int(oldest) != step:
            folder = output_dir / f"checkpoint-{int(oldest)}" if oldest >= 0 else None
            if folder is None or checkpoint_fault(folder) is not None:
                raise ValueError(
                    f"{engine.topology.describe()} has no whole checkpoint of step {int(oldest)} in {output_dir}"
                )
    return folder
