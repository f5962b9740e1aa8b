"""What every rank of a mesh would need for a model of a name, before any weight is read."""

from __future__ import annotations

from dataclasses import replace

import torch

from .arguments import MeshAdaptArguments
from .memory import describe, memory_plan, parts, table_bytes
from .pipeline.assembly import local_chunks
from .pipeline.footprint import rank_footprint
from .pipeline.layout import find_layout
from .pipeline.outline import outline_model
from .pipeline.schedule import rank_order


def plan_stages(
    model: str, stages: int, replicas: int, rows: int, length: int, *, optimizer: str, dtype: str
) -> list[str]:
    """The memory plan of each stage's ranks in words, with the preset's boundaries.

    Args:
        model: name or folder.
        rows: per replica and step.
        length: padded tokens per row.
        optimizer: as in `TrainingArguments.optim`.
        dtype: of the weights, `float32` or `bfloat16`.

    Raises:
        ValueError: no such mesh.
        NotImplementedError: a model that cannot be cut or planned.
    """
    args = MeshAdaptArguments(
        output_dir="unused",
        pipeline_stages=stages,
        data_parallel_replicas=replicas,
        per_device_train_batch_size=rows,
        optim=optimizer,
        report_to="none",
    )
    mesh, boundary = replace(args.mesh_config(), emulated=False), args.boundary_config()
    outline = outline_model(model)
    layout = find_layout(outline)
    on_cuda = torch.cuda.is_available()
    plans = []
    for stage in range(stages):
        weights, chunks = rank_footprint(
            outline,
            mesh,
            stage,
            rows // mesh.microbatches,
            length,
            dtype=getattr(torch, dtype),
            wire_dtype=boundary.wire_dtype,
            device="cuda" if on_cuda else "cpu",
        )
        ends = sum((chunk > 0) + (chunk < mesh.num_chunks - 1) for chunk in local_chunks(mesh, stage))
        plan = memory_plan(
            weights,
            chunks,
            rank_order(mesh, stage),
            mesh,
            optimizer=optimizer,
            on_cuda=on_cuda,
            # The width of the token features is known only after calibration: without them it is a lower bound.
            boundary_bytes=table_bytes(boundary, layout.hidden_size, layout.vocab_size, features=0, ends=ends),
        )
        plans.append(f"{describe(plan.peak_bytes)} ({parts(plan)})")
    return plans
