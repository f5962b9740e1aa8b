"""What every axis of the mesh sends in one optimizer step, from configuration alone.

The one model of traffic that the meter's check, the model card and the warnings read. Pure arithmetic: no torch, no
transformers. Bytes are payload bytes sent, so a message counts once, at its sender; `LinkBytes.messages` says how
many messages carry them and `framing_bytes` what gloo adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hf_meshadapt.anchor.schedule import AnchorTraffic
from hf_meshadapt.config import BoundaryConfig, DataParallelConfig, MeshConfig
from hf_meshadapt.link_bytes import GLOO_MESSAGE_BYTES, LinkBytes, all_gather_links, all_reduce_links
from hf_meshadapt.model_shape import ModelShape
from hf_meshadapt.sync_plan import check_links, low_rank_messages, message_links, sync_links

PLAN_AXES = ("pipeline", "tied", "data_parallel", "anchor", "control")

# Per optimizer step: each stage gathers every stage's squared gradient norm with a digest of its batches (two numbers),
# each replica sums its token count and whether its tokens are sound.
GRAD_NORM_BYTES = 24
MEAN_NORM_BYTES = 8  # of replicas that step apart
TOKEN_COUNT_BYTES = 16
# What rides along with an anchor: what a stage's link holds, and what replica 0's stages have agreed on.
FIGURE_BYTES = 8
NUM_LINK_FIGURES = 6
NUM_ANCHOR_COUNTS = 2
ANCHOR_RANK = -1  # in the links of a plan: it is no rank of the mesh


@dataclass(frozen=True)
class AnchorPlan:
    """What an anchor sends and gets, and how often: once in `anchor_every` optimizer steps."""

    traffic: AnchorTraffic
    anchor_every: int


@dataclass(frozen=True)
class BytePlan:
    """Bytes of one optimizer step, over all ranks. Made by `byte_plan`.

    Where a method takes `axis`, it is one of `PLAN_AXES` or `total`.
    """

    model: ModelShape
    mesh: MeshConfig
    boundary: BoundaryConfig
    sequences: int
    length: int
    accumulation: int
    links: tuple[LinkBytes, ...]
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    anchor: AnchorPlan | None = None

    @property
    def tokens(self) -> int:
        """Padded tokens of one optimizer step, over all replicas."""
        return self.sequences * self.length * self.accumulation * self.mesh.replicas

    @property
    def total_bytes(self) -> float:
        return self.axis_bytes("total")

    def axis_bytes(self, axis: str) -> float:
        """Payload bytes sent on an axis, summed over all ranks."""
        return sum(link.bytes for link in self._links_of(axis))

    def framing_bytes(self, axis: str) -> float:
        """What gloo's headers add to `axis_bytes`, summed over all ranks."""
        return sum(link.messages for link in self._links_of(axis)) * GLOO_MESSAGE_BYTES

    def boundary_bytes(self, boundary: int, direction: str) -> int:
        """Payload bytes over one boundary in one direction (`forward`, `backward`), summed over replicas."""
        return sum(link.bytes for link in self.links if (link.boundary, link.direction) == (boundary, direction))

    def uplink_bytes(self, rank: int, axis: str = "total") -> float:
        """Payload bytes that leave one rank."""
        return sum(link.bytes for link in self._links_of(axis) if link.from_rank == rank)

    def bytes_per_token(self, axis: str = "total") -> float:
        """Bytes of all ranks per padded token of all replicas."""
        return self.axis_bytes(axis) / self.tokens

    def dense(self) -> BytePlan:
        """The same step with nothing coded, the same wire dtype, gradients all-reduced whole and no anchor."""
        return byte_plan(
            self.model,
            self.mesh,
            replace(self.boundary, codec="none"),
            sequences=self.sequences,
            length=self.length,
            accumulation=self.accumulation,
        )

    def ratio_to_dense(self, axis: str = "total") -> float:
        """Bytes of an axis over the dense step's; 1 on an axis on which that sends nothing, as on the anchor's."""
        dense_bytes = self.dense().axis_bytes(axis)
        return self.axis_bytes(axis) / dense_bytes if dense_bytes else 1.0

    def to_dict(self) -> dict:
        """JSON-ready summary: per axis, per boundary and per link."""
        dense = self.dense()
        axes = {
            axis: {
                "bytes": self.axis_bytes(axis),
                "dense_bytes": dense.axis_bytes(axis),
                "framing_bytes": self.framing_bytes(axis),
                "bytes_per_token": self.bytes_per_token(axis),
            }
            for axis in (*PLAN_AXES, "total")
        }
        boundaries = [
            {f"{way}_bytes": self.boundary_bytes(index, way) for way in ("forward", "backward")}
            for index in range(self.mesh.num_boundaries)
        ]
        links = [
            {"axis": link.axis, "from_rank": link.from_rank, "to_rank": link.to_rank, "bytes": link.bytes}
            for link in self.links
        ]
        return {"tokens": self.tokens, "axes": axes, "boundaries": boundaries, "links": links}

    def _links_of(self, axis: str) -> Iterator[LinkBytes]:
        if axis not in (*PLAN_AXES, "total"):
            raise ValueError(f"axis={axis!r} is not one of {', '.join(PLAN_AXES)}, total")
        return (link for link in self.links if axis in (link.axis, "total"))


def byte_plan(
    model: ModelShape,
    mesh: MeshConfig,
    boundary: BoundaryConfig,
    *,
    sequences: int,
    length: int,
    accumulation: int = 1,
    data_parallel: DataParallelConfig | None = None,
    anchor: AnchorPlan | None = None,
) -> BytePlan:
    """Plans the bytes of one optimizer step; what replicas send every so many steps counts in each with its share.

    Not counted: what torch sends once per schedule to agree on static
    shapes (4 bytes each way over every boundary), the sync after a run's last step, checkpoints, and
    an anchor's first snapshot, which is whole.

    Args:
        sequences: rows per replica and accumulation step (microbatches x rows per microbatch).
        length: padded tokens per sequence.
        accumulation: accumulation steps per optimizer step.
        data_parallel: by default the dense all-reduce.
        anchor: what the anchor circuit adds, spread over the steps of a round; None without one.

    Raises:
        ValueError: a count below one, `chunk_parameters` not one per model chunk, or `sync_parts` not one per stage.
    """
    sync = data_parallel or DataParallelConfig()
    for name, value in (("sequences", sequences), ("length", length), ("accumulation", accumulation)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if len(model.chunk_parameters) != mesh.num_chunks:
        raise ValueError(
            f"chunk_parameters has {len(model.chunk_parameters)} entries, the mesh has {mesh.num_chunks} chunks "
            f"({mesh.stages} stages x {mesh.chunks_per_rank}); give one entry per chunk"
        )
    if sync.sync != "allreduce" and len(model.sync_parts) != mesh.stages:
        raise ValueError(f"sync_parts has {len(model.sync_parts)} entries; give one for each of {mesh.stages} stages")
    rows = sequences * accumulation
    boundary_bytes = {
        direction: [
            rows * boundary.at(index).sequence_bytes(length, model.hidden_size, direction)
            for index in range(mesh.num_boundaries)
        ]
        for direction in ("forward", "backward")
    }
    links = [
        *_pipeline(mesh, boundary_bytes, mesh.microbatches * accumulation),
        *_tied(model, mesh, sync),
        *_data_parallel(model, mesh, sync),
        *_control(mesh, sync, anchored=anchor is not None),
        *(_anchor(mesh, anchor) if anchor else ()),
    ]
    return BytePlan(model, mesh, boundary, sequences, length, accumulation, tuple(links), sync, anchor)


def _pipeline_ranks(mesh: MeshConfig, replica: int) -> list[int]:
    # The arithmetic of mesh.MeshTopology, which cannot be imported here: its module imports torch.
    return [replica * mesh.stages + stage for stage in range(mesh.stages)]


def _data_parallel_ranks(mesh: MeshConfig, stage: int) -> list[int]:
    return [replica * mesh.stages + stage for replica in range(mesh.replicas)]


def _pipeline(mesh: MeshConfig, packed_bytes: dict[str, list[int]], messages: int) -> Iterator[LinkBytes]:
    """Activations to the next chunk's rank and gradients back, per boundary and replica.

    Args:
        packed_bytes: by direction and boundary.
    """
    for replica in range(mesh.replicas):
        ranks = _pipeline_ranks(mesh, replica)
        for boundary in range(mesh.num_boundaries):
            near, far = ranks[boundary % mesh.stages], ranks[(boundary + 1) % mesh.stages]
            if near == far:
                continue  # chunks of one rank hand over in memory
            forward, backward = (packed_bytes[direction][boundary] for direction in ("forward", "backward"))
            yield LinkBytes("pipeline", near, far, forward, messages, boundary, "forward")
            yield LinkBytes("pipeline", far, near, backward, messages, boundary, "backward")


def _tied(model: ModelShape, mesh: MeshConfig, sync: DataParallelConfig) -> Iterator[LinkBytes]:
    if not model.tied_embeddings or mesh.stages < 2:
        return
    for replica in range(mesh.replicas):
        ranks = _pipeline_ranks(mesh, replica)
        ends = [ranks[0], ranks[-1]]
        if sync.sync == "allreduce":
            yield from all_reduce_links("tied", ends, model.embedding_bytes)
        else:
            yield from message_links("tied", ends, low_rank_messages([model.embedding_shape], sync))


def _data_parallel(model: ModelShape, mesh: MeshConfig, sync: DataParallelConfig) -> Iterator[LinkBytes]:
    """Accumulation steps do not synchronise."""
    for stage in range(mesh.stages):
        ranks = _data_parallel_ranks(mesh, stage)
        if sync.sync == "allreduce":
            yield from all_reduce_links("data_parallel", ranks, sum(model.chunk_bytes[stage :: mesh.stages]))
        else:
            yield from sync_links(ranks, model.sync_parts[stage], sync)


def _control(mesh: MeshConfig, sync: DataParallelConfig, anchored: bool) -> Iterator[LinkBytes]:
    norm_bytes = GRAD_NORM_BYTES + FIGURE_BYTES * NUM_LINK_FIGURES * anchored
    count_bytes = TOKEN_COUNT_BYTES + FIGURE_BYTES * NUM_ANCHOR_COUNTS * anchored
    for replica in range(mesh.replicas):
        yield from all_gather_links("control", _pipeline_ranks(mesh, replica), norm_bytes)
    for stage in range(mesh.stages):
        ranks = _data_parallel_ranks(mesh, stage)
        yield from all_reduce_links("control", ranks, count_bytes, FIGURE_BYTES)
        if sync.steps_apart:  # whose norms differ, and are averaged for the logs
            yield from all_reduce_links("control", ranks, MEAN_NORM_BYTES, FIGURE_BYTES)
    if sync.check_every:
        pipelines = [_pipeline_ranks(mesh, replica) for replica in range(mesh.replicas)]
        replicas = [_data_parallel_ranks(mesh, stage) for stage in range(mesh.stages)]
        yield from check_links(pipelines, replicas, sync.check_every)


def _anchor(mesh: MeshConfig, plan: AnchorPlan) -> Iterator[LinkBytes]:
    """Snapshots from replica 0 to the anchor, priors back to it, and from it to the other replicas.

    The links between the circuits have frames of their own, less than 0.1%, which are not counted.
    """
    for stage in range(mesh.stages):
        snapshot_bytes = plan.traffic.snapshot_bytes[stage] / plan.anchor_every
        prior_bytes = plan.traffic.returned_per_step(stage, plan.anchor_every)
        yield LinkBytes("anchor", stage, ANCHOR_RANK, snapshot_bytes, 0)
        yield LinkBytes("anchor", ANCHOR_RANK, stage, prior_bytes, 0)
        for rank in _data_parallel_ranks(mesh, stage)[1:]:
            yield LinkBytes("anchor", stage, rank, prior_bytes, 0)
