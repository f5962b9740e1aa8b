"""What one gradient sync of a replica takes by PowerSGD's rank, as planned, for whole models.

Bytes are the messages of one replica, `bytes` in bfloat16 factors; `ratio` is over dense gradients in bfloat16, and
`ratio_to_float32` over what the default all-reduce sends. `embedding_share` is the part of the embedding matrix.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import print_table, write_result
from hf_meshadapt.config import DataParallelConfig
from hf_meshadapt.sync_plan import sync_messages

MODELS = {
    "SmolLM2-135M": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "Llama-3.2-1B": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8,
    ),
}  # fmt: skip
RANKS = (4, 16, 23, 32, 64)


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Of all trainable parameters, the tied embedding once."""
    with torch.device("meta"):
        whole = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **MODELS[model]))
    return [tuple(parameter.shape) for parameter in whole.parameters()]


def sent_bytes(shapes: list[tuple[int, ...]], rank: int) -> int:
    return sum(size for _, size in sync_messages(shapes, DataParallelConfig("powersgd", matrix_rank=rank)))


def row(model: str, rank: int) -> dict:
    shapes = shapes_of(model)
    values, size = sum(map(math.prod, shapes)), sent_bytes(shapes, rank)
    return {
        "model": model,
        "matrix_rank": rank,
        "parameters": values,
        "bytes": size,
        "ratio": 2 * values / size,
        "ratio_to_float32": 4 * values / size,
        "embedding_share": sent_bytes(shapes[:1], rank) / size,
    }


def main() -> None:
    rows = [row(model, rank) for model in MODELS for rank in RANKS]
    print_table(rows, list(rows[0]))
    print(write_result("dp_bytes", rows, []).name)


if __name__ == "__main__":
    main()
