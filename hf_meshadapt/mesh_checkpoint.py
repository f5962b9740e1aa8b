"""Saves and resumes a mesh run: composes the checkpoint functions in the order that keeps every checkpoint whole."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from .adapter_checkpoint import merge_adapter, save_stage_adapter
from .calibration import boundary_state, load_boundary_state
from .checkpoint import install, load_stage_weights, merge_index, refuse_larger, save_stage, shard_name
from .checkpoint_folder import (
    ADAPTER_WEIGHTS,
    MESH_STATE,
    checkpoint_fault,
    commit,
    load_mesh_info,
    open_partial,
    save_mesh_info,
)
from .checkpoint_state import (
    capture_rng,
    load_optimizer_files,
    load_optimizer_state,
    load_rank_state,
    load_scheduler_state,
    optimizer_state_by_name,
    restore_rng,
    save_optimizer_files,
    save_rank_state,
)
from .config import BoundaryConfig
from .engine import MeshEngine
from .pipeline.intake import read_part
from .shard_transfer import gather_files, is_shared
from .sync_checkpoint import load_sync_state, save_sync_state

logger = logging.getLogger(__name__)


class SaveSite:
    """How this rank takes part in writing one folder; made, and every method called, on all ranks together.

    Ranks see one shared filesystem, or each machine its own; then every machine keeps what its ranks wrote, which is
    what they need to resume, and rank 0's also receives the weights of all stages.

    Args:
        parent: existing folder under which the partial folder is made.
        name: name of the folder to be.
        keep_local: do not bring weights to rank 0's machine (`save_on_each_node`).
        exclusive: keep other runs out of `parent` from now on, until the run ends.

    Raises:
        ValueError: another run keeps this one out; at the rank that writes.
    """

    def __init__(self, engine: MeshEngine, parent: Path, name: str, keep_local: bool, exclusive: bool = False):
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
        # A machine with the head of a tied embedding and not the first stage has nobody else to keep it.
        trains_copy = engine.parts.untied and engine.parts.adapter is None
        self.keeps_copy = trains_copy and stages - 1 in self.local_stages and 0 not in self.local_stages
        self.partial = self.final.with_name(f".partial-{name}")
        if self.is_leader:
            if exclusive:
                engine.folder_lock.hold(parent)
            open_partial(self.final)
        self.barrier()

    def barrier(self) -> None:
        """Waits for all ranks, each of which may take its time."""
        if self.group is not None:
            gather_files([], self.partial, self.group, self.rank, shared=True)

    def write_weights(self) -> None:
        """Every stage's weights, or its adapters, into the partial folder, as one standard checkpoint at the leader."""
        paths, parts = [], self.engine.parts
        if self.writes_stage:
            place = (self.partial, self.engine.topology.stage, 1 if self.group is None else self.engine.mesh.stages)
            with self.engine.outer_weights():
                if parts.adapter is None:
                    paths = save_stage(parts.model, parts.saved_names(), *place)
                else:
                    paths = save_stage_adapter(parts.adapter, parts.adapter_names, *place)
                if self.keeps_copy:
                    self._write_copy(place[-1])
        if self.group is not None:
            streams = not self.keep_local and self.engine.topology.replica == 0 and 0 not in self.peers
            send = paths if streams else []
            gather_files(send, self.partial, self.group, self.rank, shared=self.shared or self.keep_local)
        if self.is_leader:
            whole = self.shared or (self.rank == 0 and not self.keep_local)
            merge = merge_index if parts.adapter is None else merge_adapter
            merge(self.partial, None if whole else [0] * self.keeps_copy + self.local_stages)

    def _write_copy(self, num_stages: int) -> None:
        # As the first stage's only shard here, under the embedding's name; it is not sent to rank 0.
        for name, stored in self.engine.parts.stored_name_of_copy().items():
            weight = self.engine.parts.model.get_parameter(name).detach().cpu()
            save_file({stored: weight.contiguous()}, self.partial / shard_name(0, num_stages), {"format": "pt"})


def machine_ranks(rank: int, num_ranks: int) -> list[int]:
    """Ranks on this machine, as the launcher numbers them."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return list(range(first, min(num_ranks, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def save_model(engine: MeshEngine, folder: Path, write_extras: Callable[[Path], None], keep_local: bool) -> None:
    """Writes one ordinary Hugging Face checkpoint into `folder`, which may hold other files. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    site = SaveSite(engine, folder, "model", keep_local)
    site.write_weights()
    if site.is_leader and (site.rank == 0 or keep_local):
        write_extras(site.partial)
        install(site.partial, folder)
    elif site.is_leader:
        shutil.rmtree(site.partial)  # its weights are on rank 0's machine; half a model would be taken for a whole one
    site.barrier()


def save_checkpoint(
    engine: MeshEngine,
    final: Path,
    *,
    step: int,
    write_extras: Callable[[Path], None],
    optimizer: torch.optim.Optimizer | None,
    scheduler_state: dict,
    write_further: Callable[[Path], None],
    keep_local: bool,
) -> bool:
    """Writes a checkpoint to resume from, whole or not at all. Collective.

    Args:
        final: the checkpoint's folder.
        write_extras: writes tokenizer, trainer state and the like; called once per filesystem.
        optimizer: the torch optimizer; None saves the model only.
        write_further: writes what else belongs to a stage's optimizer; called once per filesystem and stage.

    Returns:
        Whether this rank is the one that clears older checkpoints of its filesystem away. All ranks have the new one.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    site = SaveSite(engine, final.parent, final.name, keep_local, exclusive=True)
    site.write_weights()
    if optimizer is not None:
        _write_state(site, optimizer, scheduler_state)
        if site.writes_stage:
            write_further(site.partial)
    site.barrier()
    if site.is_leader:
        write_extras(site.partial)
        save_mesh_info(site.partial, dataclasses.asdict(engine.mesh) | {"layers_per_chunk": layers_of(engine)}, step)
        commit(site.partial, final)
    site.barrier()
    return site.is_leader


def _write_state(site: SaveSite, optimizer: torch.optim.Optimizer, scheduler_state: dict) -> None:
    parts = site.engine.parts
    if site.writes_stage:
        copies = parts.stored_name_of_copy()
        named = [
            (copies.get(name, name), parameter)
            for name, parameter in parts.named_trainable()
            if site.keeps_copy or name not in copies
        ]
        save_optimizer_files(site.partial, site.engine.topology.stage, *optimizer_state_by_name(optimizer, named))
    save_sync_state(site.engine, site.partial, optimizer)
    fitted = fitted_for(site.engine.boundary) if site.engine.calibrated else None
    save_rank_state(
        site.partial,
        site.rank,
        rng=capture_rng(),
        scheduler=scheduler_state,
        tensors=boundary_state(site.engine),
        extra={"calibrated": fitted, "calibration_cost": site.engine.calibration_cost},
    )


def fitted_for(boundary: BoundaryConfig) -> list:
    """What a calibration's outcome depends on, as JSON gives it back."""
    fitted = [boundary.predictor, boundary.fits_transforms, boundary.codec == "transform" and boundary.loss_weighted]
    if boundary.adaptive:
        fitted += [boundary.target_step_seconds, boundary.link_bits_per_second, boundary.budget]
        fitted += [boundary.forward_share, boundary.exact_first_token]
    return fitted


def layers_of(engine: MeshEngine) -> list[int]:
    """Layers of every chunk, as they really were cut."""
    return [len(span) for span in engine.parts.spans]


def load_weights(engine: MeshEngine, folder: Path, weights_only: bool = False) -> None:
    """This rank's weights, or its adapters, from a checkpoint of any mesh shape.

    Args:
        weights_only: nothing else will be loaded from it, so that nothing else need be whole.

    Raises:
        ValueError: the checkpoint is not whole, of a larger model, or an adapter beside whole weights.
    """
    fault = checkpoint_fault(folder, weights_only)
    if fault is not None:
        raise ValueError(f"{folder} is not a whole checkpoint of a mesh run ({fault}): use another")
    parts = engine.parts
    if (folder / ADAPTER_WEIGHTS).exists() != (parts.adapter is not None):
        held, trained = ("a model", "an adapter") if parts.adapter is not None else ("an adapter", "a model")
        raise ValueError(
            f"{folder} holds {held}, and this run trains {trained}: resume with what wrote it, or start anew"
        )
    if parts.adapter is not None:
        load_stage_weights(parts.model, [], folder, parts.adapter_names)
    else:
        refuse_larger(folder, load_mesh_info(folder)["mesh"]["layers_per_chunk"], parts.layout)
        convert = functools.partial(read_part, parts, folder, engine.mesh, engine.topology.stage)
        load_stage_weights(parts.model, parts.saved_names(), folder, parts.stored_name_of_copy(), convert)
    engine.replication.restart()  # from these weights


def load_state(engine: MeshEngine, folder: Path, optimizer: torch.optim.Optimizer, scheduler) -> None:
    """Optimizer, scheduler, sync and boundary state; another mesh shape takes what is kept by parameter name."""
    named = engine.parts.stored_trainable()
    tensors, scalars = load_optimizer_files(folder, {name for name, _ in named})
    load_optimizer_state(optimizer, named, tensors, scalars)
    load_sync_state(engine, folder, optimizer)
    try:
        state = load_rank_state(folder, engine.topology.rank)
    except FileNotFoundError:
        state = load_rank_state(folder, 0)
    load_scheduler_state(scheduler, state.scheduler, optimizer)
    if engine.needs_calibration:
        _load_boundaries(engine, folder, state.extra)


def _load_boundaries(engine: MeshEngine, folder: Path, extra: dict) -> None:
    # All ranks must decide alike, those without a receiving boundary too: calibration is a pass through all stages.
    same_cut = load_mesh_info(folder)["mesh"]["layers_per_chunk"] == layers_of(engine)
    if extra["calibrated"] != fitted_for(engine.boundary) or not same_cut:
        if engine.topology.rank == 0:
            logger.warning("%s was written with other boundaries: they are calibrated anew", folder)
        return
    saved: dict[str, torch.Tensor] = {}
    for path in sorted((folder / MESH_STATE).glob("rank-*.json")):
        saved |= load_rank_state(folder, int(path.stem.split("-")[1])).tensors
    load_boundary_state(engine, saved)
    engine.calibration_cost = extra.get("calibration_cost")


def load_rng(engine: MeshEngine, folder: Path) -> None:
    """Random number generators of this rank; left alone when the checkpoint has none for it."""
    try:
        state = load_rank_state(folder, engine.topology.rank)
    except FileNotFoundError as error:
        logger.warning("%s; random numbers of this rank start anew", error)
    else:
        restore_rng(state.rng)
