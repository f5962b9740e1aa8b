"""The sizes of a model that decide its traffic, and how the stages of a mesh tell each other theirs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_meshadapt.data_parallel.sizes import Shape

if TYPE_CHECKING:
    from hf_meshadapt.pipeline.assembly import ModelParts


@dataclass(frozen=True)
class ModelShape:
    """What `planner.byte_plan` reads of a model.

    Attributes:
        hidden_size: width of the hidden stream that crosses boundaries.
        vocab_size: rows of the embedding matrix.
        num_layers: transformer blocks of the whole model.
        chunk_parameters: trainable parameters of every model chunk in order; a tied matrix counts on both its ends.
        tied_embeddings: input embedding and output head are one trainable matrix.
        gradient_bytes: bytes of one gradient value in an all-reduce; of the tied matrix, where they differ.
        chunk_gradient_bytes: bytes of all gradients of every chunk; by default all of its values have `gradient_bytes`.
        embedding_size: width of the embedding matrix, None where it is the hidden size.
        sync_parts: shapes of the parameters that synchronise together, by stage and exchange; not read where the sync is
            allreduce.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    chunk_parameters: tuple[int, ...]
    tied_embeddings: bool = False
    gradient_bytes: int = 4
    chunk_gradient_bytes: tuple[int, ...] | None = None
    embedding_size: int | None = None
    sync_parts: tuple[tuple[tuple[Shape, ...], ...], ...] = ()

    @property
    def chunk_bytes(self) -> tuple[int, ...]:
        """Bytes of every chunk's gradients."""
        if self.chunk_gradient_bytes is not None:
            return self.chunk_gradient_bytes
        return tuple(count * self.gradient_bytes for count in self.chunk_parameters)

    @property
    def embedding_shape(self) -> Shape:
        return self.vocab_size, self.embedding_size or self.hidden_size

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding matrix's gradient."""
        rows, columns = self.embedding_shape
        return rows * columns * self.gradient_bytes


def shared_shape(
    parts: ModelParts, sync_parts: dict[int, list[list[Shape]]], stage: int, share: Callable[[dict], dict]
) -> ModelShape:
    """The shape of a model that is cut over a pipeline; gradients have the dtype of what they are of.

    Args:
        parts: of this process.
        sync_parts: of this process, as `GradientSynchronizer.parts` gives them.
        share: merges {chunk or stage: JSON-able value} over the stages, see `Agreements.share`. Called alike on all.
    """
    layout = parts.layout
    tied = share({stage: [copy.element_size() for copy in parts.tied_copies()]})
    chunks = share({chunk: _sizes(module) for chunk, module in parts.stages.items()})
    synced = share(sync_parts)
    numbers, sizes_bytes = zip(*(chunks[chunk] for chunk in sorted(chunks)))
    tied_bytes = [size for sizes in tied.values() for size in sizes]
    return ModelShape(
        hidden_size=layout.hidden_size,
        vocab_size=layout.vocab_size,
        num_layers=layout.num_layers,
        chunk_parameters=numbers,
        tied_embeddings=bool(tied_bytes),
        gradient_bytes=max(tied_bytes, default=4),
        chunk_gradient_bytes=sizes_bytes,
        embedding_size=layout.embedding_size,
        sync_parts=tuple(tuple(tuple(map(tuple, part)) for part in synced[stage]) for stage in sorted(synced)),
    )


def _sizes(module) -> tuple[int, int]:
    """Number of trainable parameters of a chunk, and the bytes of their gradients."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return sum(p.numel() for p in trainable), sum(p.numel() * p.element_size() for p in trainable)
