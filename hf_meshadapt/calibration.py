"""Fits every boundary of the mesh on a few uncoded passes, so that both of its ends hold the same fit.

The receiving end of a boundary sees hidden states and gradients as they pass. Its sums are added up over the
replicas, it fits, and hands the fit to the sending end: two machines need not agree in the last bit of an
eigenvector, only on the bytes that they exchange. Collective over the mesh, before any coded pass.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .adaptive import PassTimer, Workload, adapt_budgets
from .boundary.fitting import BoundaryFit, fit_boundary
from .boundary.observer import Observer
from .boundary.predictor import FEATURE_SIZE, project_embedding
from .boundary.statistics import BoundaryMoments
from .config import BoundaryConfig
from .pipeline.microbatch import Batch

if TYPE_CHECKING:
    from .engine import MeshEngine

logger = logging.getLogger(__name__)

# Of every so many batches one only checks the predictor.
HELD_OUT_EVERY = 4
# Repeated calibrations take at most this share of the coded boundaries' bytes, unless asked for more.
MAX_CALIBRATION_SHARE = 0.25
# A stage's token features take at most this share of its weights' bytes.
MAX_FEATURE_SHARE = 0.05
MIN_FEATURE_SIZE = 16


def calibrate(engine: MeshEngine, batches: list[Batch], rows: int, accumulation: int) -> dict[str, float]:
    """Fits all boundaries and, where budgets are adaptive, chooses them.

    Args:
        batches: of this process's replicas, as for `MeshEngine.train_batch`; the same number on every rank.
        rows: rows per replica.
        accumulation: accumulation steps of an optimizer step.

    Returns:
        What it cost all ranks: `passes` (1, this calibration), `tokens`, `seconds`, `bytes`.
    """
    started = time.monotonic()
    with engine.ledger.apart() as sent:
        explained = fit_boundaries(engine, batches, rows, accumulation)
    ranks = 1 if engine.groups is None else engine.mesh.stages
    tokens = sum(batch["labels"].numel() for batch in batches) / ranks
    tokens, sent_bytes = engine.sum_over_ranks([tokens, float(sum(sent.values()))])
    length = round(sum(batch["labels"].shape[1] for batch in batches) / len(batches))
    ratio = engine.plan(rows, length, accumulation).ratio_to_dense("pipeline")
    engine.calibration_interval = calibration_interval(tokens, tokens / len(batches) * accumulation, ratio)
    cost = {"passes": 1, "tokens": tokens, "seconds": time.monotonic() - started, "bytes": sent_bytes}
    shares = ", ".join(f"chunk {chunk}: {share:.2f}" for chunk, share in explained.items()) or "none here"
    logger.info("Boundaries calibrated: %s; token predictor explains %s", cost, shares)
    return cost


def calibration_interval(cost_tokens: float, step_tokens: float, coded_ratio: float) -> int:
    """Optimizer steps between calibrations that cost `MAX_CALIBRATION_SHARE` of the coded bytes in between.

    Args:
        cost_tokens: that a calibration looks at, uncoded.
        step_tokens: of an optimizer step.
        coded_ratio: bytes of coded over those of uncoded boundaries.
    """
    return max(1, math.ceil(cost_tokens / (MAX_CALIBRATION_SHARE * coded_ratio * step_tokens)))


def fit_boundaries(engine: MeshEngine, batches: list[Batch], rows: int, accumulation: int) -> dict[int, float]:
    """Looks, fits, chooses budgets and hands over; arguments as for `calibrate`.

    Returns:
        Share of the held-out energy that the token predictor explains, by receiving chunk of this rank.
    """
    boundary, parts = engine.boundary, engine.parts
    engine.features = token_table(engine) if boundary.predictor == "token" else None
    observers = {
        chunk: Observer(parts.layout.hidden_size, engine.features, engine.device, len(engine.local_replicas))
        for chunk, stage in parts.stages.items()
        if stage.receive is not None
    }
    if boundary.predictor == "token" and len(batches) < 2 and engine.topology.rank == 0:
        logger.warning(
            "The calibration saw one batch only, so that the token predictor cannot be checked and the channel mean is "
            "used instead: raise calibration_tokens to two batches or more, of which the training set must have as many"
        )
    timer = PassTimer(engine)
    for index, batch in enumerate(batches):
        for observer in observers.values():
            observer.held_out = held_out(index, len(batches))
        engine.agree_on_length(batch["labels"].shape[1])
        with timer.timing():
            engine.runner.observe_batch(batch, rows, observers, gradients=boundary.fits_transforms)
    everything = {chunk: observer.moments() for chunk, observer in observers.items()}
    for moments in everything.values():
        for tensor in moments.tensors():
            tensor.copy_(engine.sum_over_replicas(tensor.cpu()))
    refuse_nonfinite(engine, everything)
    fits, energies = {}, {}
    for chunk, moments in everything.items():
        fits[chunk] = fit_of(moments, boundary)
        energies[chunk] = moments.gradient_energy
    if boundary.adaptive:
        length = round(sum(batch["labels"].shape[1] for batch in batches) / len(batches))
        adapt_budgets(engine, fits, energies, Workload(rows, length, accumulation, timer.busy_seconds()))
    hand_over(engine, {chunk: fit.state() for chunk, fit in fits.items()})
    return {chunk: fit.explained for chunk, fit in fits.items()}


def fit_of(moments: BoundaryMoments, boundary: BoundaryConfig) -> BoundaryFit:
    """What the codec and the predictor of a boundary need."""
    return fit_boundary(
        moments,
        transforms=boundary.fits_transforms,
        weighted=boundary.codec == "transform" and boundary.loss_weighted,
        predicted=boundary.predictor != "none",
    )


def refuse_nonfinite(engine: MeshEngine, moments: dict[int, BoundaryMoments]) -> None:
    """Raises FloatingPointError on all ranks where a boundary, by receiving chunk, saw a number that is not finite."""
    mine = {chunk: all(bool(tensor.isfinite().all()) for tensor in own.tensors()) for chunk, own in moments.items()}
    broken = [chunk for chunk, finite in engine.share(mine).items() if not finite]
    if broken:
        stages = ", ".join(str(chunk % engine.mesh.stages) for chunk in sorted(broken))
        raise FloatingPointError(
            f"the calibration saw hidden states or gradients that are not finite arrive at stage {stages}: the model's "
            "weights, or its loss on the first rows of the training set, are not finite. Load a model whose loss is"
        )


def held_out(index: int, num_batches: int) -> bool:
    """Whether a calibration batch only checks the predictor: every fourth, and the last of two or three."""
    every = min(HELD_OUT_EVERY, num_batches)
    return every > 1 and index % every == every - 1


def hand_over(engine: MeshEngine, states: dict[int, dict[str, Tensor]]) -> None:
    """Gives both ends of every boundary the fit that its receiving chunk holds.

    Args:
        states: `BoundaryFit.state` by receiving chunk of this rank.
    """
    stages, mesh = engine.parts.stages, engine.mesh
    shapes = {chunk: [(name, list(t.shape)) for name, t in state.items()] for chunk, state in states.items()}
    shapes = engine.share(shapes)

    def rank_of(peer: int) -> int:
        return engine.topology.rank_of(engine.topology.replica, peer)

    for chunk in range(1, mesh.num_chunks):
        state = states.get(chunk)
        giver, taker = chunk % mesh.stages, (chunk - 1) % mesh.stages
        if engine.groups is not None and giver != taker:
            if state is None and chunk - 1 in stages:
                state = {name: torch.empty(shape) for name, shape in shapes[chunk]}
                for tensor in state.values():
                    with engine.naming("the fit of a boundary from", [rank_of(giver)]):
                        dist.recv(tensor, group=engine.groups.control, group_src=giver)
            elif state is not None:
                for tensor in state.values():
                    with engine.naming("handing the fit of a boundary to", [rank_of(taker)]):
                        dist.send(tensor.float().cpu().contiguous(), group=engine.groups.control, group_dst=taker)
        set_fit(engine, chunk, state)


def set_fit(engine: MeshEngine, chunk: int, state: dict[str, Tensor] | None) -> None:
    """Sets the fit of the boundary before `chunk` at those of its ends that are here."""
    ends = []
    if chunk in engine.parts.stages:
        ends.append(engine.parts.stages[chunk].receive)
    if chunk - 1 in engine.parts.stages:
        ends.append(engine.parts.stages[chunk - 1].send)
    for end in ends:
        fit = BoundaryFit.from_state({name: tensor.to(engine.device) for name, tensor in state.items()})
        end.set_fit(fit, engine.features)


def token_table(engine: MeshEngine) -> Tensor:
    """Token features, equal on all stages: made from the input embedding where that is, and handed to the others."""
    parts = engine.parts
    layout = parts.layout
    stage_bytes = min(sum(p.numel() * p.element_size() for p in stage.parameters()) for stage in parts.stages.values())
    smallest = min(engine.share({chunk: stage_bytes for chunk in parts.stages}).values())
    size = int(MAX_FEATURE_SHARE * smallest / (2 * layout.vocab_size)) // 8 * 8
    size = min(FEATURE_SIZE, layout.hidden_size, max(MIN_FEATURE_SIZE, size))
    if 0 in parts.stages:
        table = project_embedding(parts.model.get_parameter(layout.embedding_weight), size)
    else:
        table = torch.empty(layout.vocab_size, size, dtype=torch.bfloat16, device=engine.device)
    if engine.groups is not None:
        data = table.cpu().contiguous().view(torch.uint8)
        topology = engine.topology
        others = topology.pipeline_ranks(topology.replica)
        sends = topology.stage == 0
        awaited = "handing token features to" if sends else "token features from"
        with engine.naming(awaited, others if sends else others[:1]):
            dist.broadcast(data, group=engine.groups.control, group_src=0)
        table = data.view(torch.bfloat16)
    return table.to(engine.device)


def boundary_state(engine: MeshEngine) -> dict[str, Tensor]:
    """What calibration found out, for this rank's checkpoint: `chunk/name` by receiving chunk, and the features."""
    if not engine.boundary.needs_calibration:
        return {}
    state = {} if engine.features is None else {"features": engine.features}
    if engine.boundary.budgets is not None:
        state["budgets"] = torch.tensor(engine.boundary.budgets, dtype=torch.float64)
    if engine.calibration_interval is not None:
        state["interval"] = torch.tensor(engine.calibration_interval)
    for chunk, stage in engine.parts.stages.items():
        for after, end in ((chunk, stage.receive), (chunk + 1, stage.send)):
            if end is not None and end.coder is not None:
                state |= {f"{after}/{name}": tensor for name, tensor in end.coder.fit.state().items()}
    return state


def load_boundary_state(engine: MeshEngine, state: dict[str, Tensor]) -> None:
    """Takes over what `boundary_state` of all ranks held together."""
    engine.features = state["features"].to(engine.device) if "features" in state else None
    if "budgets" in state:
        engine.set_budgets(tuple(state["budgets"].tolist()))
    if "interval" in state:
        engine.calibration_interval = int(state["interval"])
    for chunk in range(1, engine.mesh.num_chunks):
        prefix = f"{chunk}/"
        set_fit(engine, chunk, {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
    engine.calibrated = True
