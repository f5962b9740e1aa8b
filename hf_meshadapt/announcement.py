"""What a run says of its mesh before it trains, in one line. Pure."""

from __future__ import annotations

from .config import BoundaryConfig, MeshConfig


def mesh_line(mesh: MeshConfig, layers_per_chunk: list[int], boundary: BoundaryConfig) -> str | None:
    """Stages with their layers, replicas and boundaries; None for a single process that is not cut."""
    replicas = f"{mesh.replicas} replica{'s' * (mesh.replicas > 1)}"
    if mesh.num_chunks == 1:
        if mesh.replicas == 1:
            return None
        return f"mesh: 1 stage x {replicas}: nothing crosses a boundary. Set pipeline_stages to cut the model"
    layers = "+".join(map(str, layers_per_chunk))
    chunks = f" of {mesh.num_chunks // mesh.stages} chunks" if mesh.num_chunks > mesh.stages else ""
    stages = f"{mesh.stages} stage{'s' * (mesh.stages > 1)}{chunks} ({layers} layers)"
    return f"mesh: {stages} x {replicas}, boundaries: {coding(boundary)}"


def coding(boundary: BoundaryConfig) -> str:
    """How boundaries are coded, in a few words."""
    if not boundary.coded:
        return "uncoded"
    if boundary.codec == "random_mask":
        return f"random masks of {boundary.mask_ratio:.0%}"
    return boundary.codec + (f" at {boundary.budget:.0%} of the bytes" if boundary.budget else "")
