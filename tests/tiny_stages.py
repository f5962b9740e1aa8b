"""Tiny models cut into stages by hand, as the pipeline leaves them: foreign layers and parts are identities."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers
from torch import nn

from hf_meshadapt.checkpoint import save_stage

SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PARTS = {  # layers, input embedding, further parts of the first stage, of the last stage
    "llama": ("model.layers", "model.embed_tokens", (), ("model.norm",)),
    "gpt2": ("transformer.h", "transformer.wte", ("transformer.wpe",), ("transformer.ln_f",)),
}
KINDS = [(kind, tied) for kind in PARTS for tied in (False, True)]


def tiny_model(kind: str, tied: bool, seed: int = 0):
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=4, n_head=2, n_positions=32, tie_word_embeddings=tied, **SIZES
        )
        return transformers.GPT2LMHeadModel(config)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, tie_word_embeddings=tied, **heads, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def cut(whole, kind: str, tied: bool, stage: int, num_stages: int):
    """A pruned copy that is one stage of the model, and the names that it owns."""
    layers_name, embedding, firsts, lasts = PARTS[kind]
    model = copy.deepcopy(whole)
    first, last = stage == 0, stage == num_stages - 1
    layers = model.get_submodule(layers_name)
    mine = [i for i in range(len(layers)) if i * num_stages // len(layers) == stage]
    for i in range(len(layers)):
        if i not in mine:
            layers[i] = nn.Identity()
    if tied and last and not first:
        # A copy of its own, as on another machine.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if not first:
        model.set_submodule(embedding, nn.Identity())
    if not last:
        model.lm_head = nn.Identity()
    owners = [f"{layers_name}.{i}." for i in mine]
    owners += [f"{part}." for part in (embedding, *firsts) if first] + [f"{part}." for part in lasts if last]
    owners += ["lm_head."] if last and not tied else []
    return model, [name for name in model.state_dict() if name.startswith(tuple(owners))]


def save_all_stages(folder: Path, whole, kind: str, tied: bool, num_stages: int = 2, **options) -> None:
    for stage in range(num_stages):
        save_stage(*cut(whole, kind, tied, stage, num_stages), folder, stage, num_stages, **options)


def assert_same_weights(model, other) -> None:
    expected = other.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
