"""What a snapshot and a prior of a run's model take, from the shapes of what is trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..anchor.budget import LEAST_CHOSEN
from ..anchor.config import AnchorConfig
from ..anchor.schedule import AnchorTraffic
from ..anchor.snapshot import snapshot_bytes
from ..planner import AnchorPlan
from ..spectral.config import SpectralConfig, prior_rank, prior_values

if TYPE_CHECKING:
    from ..engine import MeshEngine

PRIOR_VALUE_BYTES = 2  # bfloat16
Shapes = dict[str, tuple[int, ...]]


def plan_anchor(
    engine: MeshEngine, config: AnchorConfig, spectral: SpectralConfig, shapes: Shapes
) -> tuple[AnchorPlan, float]:
    """Bytes of a snapshot and a prior, and the share of the model's entries that have one. Collective.

    Args:
        shapes: of the parameters that are trained here, by the names under which they are stored.

    Raises:
        NotImplementedError: see `spectral.config.prior_rank`; on all stages.
    """
    mine, copies = {}, engine.parts.stored_name_of_copy()
    for chunk, stage in engine.parts.stages.items():
        stored = [copies.get(name, name) for name in stage.owned_names]
        trained = {name: shapes[name] for name in stored if name in shapes}
        try:
            mine[chunk] = _sizes(config, spectral, trained)
        except NotImplementedError as error:
            mine[chunk] = str(error)
    chunks, mesh = engine.share(mine), engine.mesh
    for sizes in chunks.values():
        if isinstance(sizes, str):
            raise NotImplementedError(sizes)
    by_stage = [
        [sum(column) for column in zip(*(chunks[chunk] for chunk in range(stage, mesh.num_chunks, mesh.stages)))]
        for stage in range(mesh.stages)
    ]
    snapshots, priors, held, entries = zip(*by_stage)
    plan = AnchorPlan(AnchorTraffic(tuple(snapshots), tuple(priors)), config.anchor_every or LEAST_CHOSEN)
    return plan, sum(held) / sum(entries)


def _sizes(config: AnchorConfig, spectral: SpectralConfig, shapes: Shapes) -> list[int]:
    """Of these parameters: bytes of a snapshot and of a prior, entries with a prior, entries."""
    values = sum(prior_values(spectral, name, shape) for name, shape in shapes.items())
    held = [shape for name, shape in shapes.items() if prior_rank(spectral, name, shape) is not None]
    return [
        snapshot_bytes(shapes, config.snapshot_bits),
        PRIOR_VALUE_BYTES * values,
        sum(map(math.prod, held)),
        sum(map(math.prod, shapes.values())),
    ]
