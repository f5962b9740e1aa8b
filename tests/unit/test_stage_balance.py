"""The automatic split of models of real size: no slower than the best split, by the arithmetic of matrices per token.

Sizes are those of the published configurations; models are built on the meta device, without weights.
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

from hf_meshadapt.config import MeshConfig
from hf_meshadapt.pipeline.assembly import plan_spans
from hf_meshadapt.pipeline.layout import find_layout, parameters_per_layer

LLAMA_ROPE = {"vocab_size": 128256, "max_position_embeddings": 131072}
MODELS = {
    "Llama-3.2-1B": (
        "LlamaForCausalLM",
        {
            **LLAMA_ROPE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
        },
    ),
    "Llama-3.1-8B": (
        "LlamaForCausalLM",
        {
            **LLAMA_ROPE, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8,
        },
    ),
    "Qwen3-4B": (
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    "Gemma-2-2B": (
        "Gemma2ForCausalLM",
        {
            "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        },
    ),
    "SmolLM3-3B": (
        "SmolLM3ForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
# Published totals, tied matrices counted once: the sizes above are the models' own.
PARAMETERS = {
    "Llama-3.2-1B": 1.236e9, "Llama-3.1-8B": 8.030e9, "Qwen3-4B": 4.022e9, "Gemma-2-2B": 2.614e9,
    "SmolLM3-3B": 3.075e9,
}  # fmt: skip


@functools.lru_cache
def outline(name: str):
    class_name, sizes = MODELS[name]
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes))


def costs(model) -> tuple[list[int], int]:
    """Multiplications per token of every layer's matrices, and of the head."""
    layers = [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in model.model.layers]
    return layers, model.config.vocab_size * model.config.hidden_size


def slowest(spans: list[range], layers: list[int], head: int) -> int:
    stages = [sum(layers[index] for index in span) for span in spans]
    return max(*stages[:-1], stages[-1] + head)


def best_slowest(layers: list[int], head: int, stages: int) -> int:
    """The slowest stage of the best split, by dynamic programming over all of them."""

    @functools.cache
    def best(first: int, left: int) -> int:
        """Of the layers from `first` on, on `left` stages."""
        if left == 1:
            return sum(layers[first:]) + head
        ends = range(first + 1, len(layers) - left + 2)
        return min(max(sum(layers[first:end]), best(end, left - 1)) for end in ends)

    return best(0, stages)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_the_published_ones(name):
    assert sum(p.numel() for p in outline(name).parameters()) == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("stages", range(2, 17))
@pytest.mark.parametrize("name", MODELS)
def test_the_split_is_within_one_layer_of_the_best(name, stages):
    model = outline(name)
    layers, head = costs(model)
    spans = plan_spans(model, find_layout(model), MeshConfig(stages=stages))
    assert [index for span in spans for index in span] == list(range(len(layers)))
    best = best_slowest(layers, head, stages)
    assert slowest(spans, layers, head) <= best + max(layers)
    # In fact it is the best: norms and biases, which the plan counts and this does not, are too small to matter.
    assert slowest(spans, layers, head) == best


def test_of_experts_only_the_chosen_count():
    config = transformers.MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    attention, router, norms = 256 * (256 + 2 * 128 + 256), 8 * 256, 2 * 256
    expected = attention + router + norms + 2 * 3 * 256 * 512
    assert parameters_per_layer(model, find_layout(model)) == expected
