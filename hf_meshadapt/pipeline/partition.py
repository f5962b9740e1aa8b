"""Which layers go to which model chunk: pure arithmetic, no torch.

The cost of a chunk is the arithmetic of its matrices per token, in units of one decoder layer. The output head is a
vocab x hidden product and often worth several layers; the input embedding is a table look-up and costs next to
nothing, however large it is.
"""

from __future__ import annotations


def split_layers(
    num_layers: int, num_chunks: int, head_cost: float = 0.0, embedding_cost: float = 0.0
) -> tuple[int, ...]:
    """Layers per chunk with the smallest slowest chunk; among equals the smallest sum of squared costs.

    Args:
        num_layers: decoder layers, each of cost 1.
        num_chunks: model chunks, each of which gets at least one layer.
        head_cost: cost of the output head, on the last chunk, in layers.
        embedding_cost: cost of the input embedding, on the first chunk, in layers.

    Raises:
        ValueError: more chunks than layers.
    """
    if num_chunks > num_layers:
        raise ValueError(
            f"pipeline_stages x pipeline_chunks_per_rank = {num_chunks}: more model chunks than the model's {num_layers} "
            f"layers. Use at most {num_layers}"
        )

    def cost(chunk: int, layers: int) -> float:
        return layers + embedding_cost * (chunk == 0) + head_cost * (chunk == num_chunks - 1)

    # best[n]: (slowest chunk, sum of squares, split) over the chunks so far with n layers placed.
    best = {n: (cost(0, n), cost(0, n) ** 2, (n,)) for n in range(1, num_layers + 1)}
    for chunk in range(1, num_chunks):
        placed: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for before, (slowest, squares, split) in best.items():
            for layers in range(1, num_layers - before + 1):
                here = cost(chunk, layers)
                candidate = (max(slowest, here), squares + here**2, (*split, layers))
                total = before + layers
                if total not in placed or candidate[:2] < placed[total][:2]:
                    placed[total] = candidate
        best = placed
    return best[num_layers][2]


def chunk_spans(layers_per_chunk: tuple[int, ...], num_layers: int) -> list[range]:
    """The layer indices of every chunk.

    Raises:
        ValueError: the split does not hold every layer exactly once.
    """
    if sum(layers_per_chunk) != num_layers or min(layers_per_chunk) < 1:
        raise ValueError(
            f"pipeline_split={','.join(map(str, layers_per_chunk))}: names {sum(layers_per_chunk)} layers, the model has "
            f"{num_layers}. Give every chunk at least one layer and let them add up to {num_layers}"
        )
    spans, start = [], 0
    for count in layers_per_chunk:
        spans.append(range(start, start + count))
        start += count
    return spans
