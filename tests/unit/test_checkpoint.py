"""Weights saved stage by stage, without process groups: merged, loaded by transformers and by other meshes."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from hf_meshadapt.checkpoint import load_stage_weights, merge_index, save_stage
from hf_meshadapt.checkpoint_folder import INDEX_NAME
from tests.tiny_stages import KINDS, PARTS, SIZES, assert_same_weights, cut, save_all_stages, tiny_model


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("kind,tied", KINDS)
def test_merged_stages_are_an_ordinary_checkpoint(tmp_path, kind, tied, num_stages):
    whole = tiny_model(kind, tied)
    save_all_stages(tmp_path, whole, kind, tied, num_stages)
    shards = merge_index(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(loaded, whole)
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.equal(loaded(tokens).logits, whole.eval()(tokens).logits)
    names = {path.name for path in tmp_path.iterdir()}
    weights = {f"model-{i:05d}-of-{num_stages:05d}.safetensors" for i in range(1, num_stages + 1)} | {INDEX_NAME}
    assert {path.name for path in shards} <= names
    assert names == {"config.json", "generation_config.json"} | ({"model.safetensors"} if num_stages == 1 else weights)


@pytest.mark.parametrize("kind,tied", KINDS)
def test_another_mesh_loads_its_stages_in_place(tmp_path, kind, tied):
    whole = tiny_model(kind, tied)
    save_all_stages(tmp_path, whole, kind, tied, num_stages=3)
    merge_index(tmp_path)
    for stage in range(2):
        expected, owned = cut(whole, kind, tied, stage, 2)
        model, _ = cut(tiny_model(kind, tied, seed=1), kind, tied, stage, 2)
        places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        extra = {"lm_head.weight": f"{PARTS[kind][1]}.weight"} if tied and stage == 1 else None
        load_stage_weights(model, owned, tmp_path, extra)
        for name in [*owned, *(extra or {})]:
            assert torch.equal(model.state_dict()[name], expected.state_dict()[name]), name
            assert model.state_dict()[name].data_ptr() == places[name]


def test_stages_may_have_several_shards_and_replace_an_earlier_save(tmp_path):
    for seed, num_stages, limit in [(0, 1, "50GB"), (1, 2, "4KB"), (2, 2, "50GB"), (3, 1, "50GB")]:
        whole = tiny_model("llama", True, seed)
        save_all_stages(tmp_path, whole, "llama", True, num_stages, max_shard_size=limit)
        shards = merge_index(tmp_path)
        assert len(shards) > 2 if limit == "4KB" else len(shards) == num_stages
        assert sorted(shards) == sorted(tmp_path.glob("model*.safetensors"))
        assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), whole)


def test_index_gives_the_size_of_all_weights(tmp_path):
    whole = tiny_model("llama", True)
    save_all_stages(tmp_path, whole, "llama", True)
    merge_index(tmp_path)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in whole.parameters())
    assert set(index["weight_map"]) == {name for name, _ in whole.named_parameters()}


def test_fused_experts_are_saved_as_transformers_saves_them(tmp_path):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    whole = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=4, **heads, **SIZES)
    )
    save_all_stages(tmp_path, whole, "llama", False)
    merge_index(tmp_path)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), whole)
    with pytest.raises(NotImplementedError, match="layers.0.mlp.experts.down_proj in another form.*from_pretrained"):
        load_stage_weights(*cut(whole, "llama", False, 0, 2), tmp_path)


def test_merge_refuses_what_is_not_complete(tmp_path):
    whole = tiny_model("llama", False)
    with pytest.raises(ValueError, match="no stage's shards"):
        merge_index(tmp_path)
    first = save_stage(*cut(whole, "llama", False, 0, 2), tmp_path, 0, 2)
    with pytest.raises(ValueError, match="stage 1 of 2"):
        merge_index(tmp_path)
    model, owned = cut(whole, "llama", False, 1, 2)
    leftover = "model.norm.weight"
    save_stage(model, owned, tmp_path, 1, 2)
    model, owned = cut(whole, "llama", False, 0, 2)
    save_stage(model, [*owned, leftover], tmp_path, 0, 2)
    with pytest.raises(ValueError, match=f"{leftover} was saved twice.*stage-00000.*stage-00001"):
        merge_index(tmp_path)
    shard = next(path for path in first if path.suffix == ".safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="where its header says"):
        merge_index(tmp_path)
    save_stage(model, owned, tmp_path, 0, 3)
    with pytest.raises(ValueError, match=r"meshes with \[2, 3\] stages"):
        merge_index(tmp_path)


def test_errors_name_the_weights(tmp_path):
    whole = tiny_model("llama", False)
    model, owned = cut(whole, "llama", False, 0, 2)
    with pytest.raises(ValueError, match="stage 0 .* does not hold: lm_head.weight"):
        save_stage(model, [*owned, "lm_head.weight"], tmp_path, 0, 2)
    with pytest.raises(ValueError, match="owns no weights"):
        save_stage(model, [], tmp_path, 0, 2)
    save_stage(model, owned, tmp_path, 0, 1)
    merge_index(tmp_path)
    last, owned_last = cut(whole, "llama", False, 1, 2)
    with pytest.raises(ValueError, match="lacks the weights lm_head.weight, model.layers.2"):
        load_stage_weights(last, owned_last, tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_stage_weights(last, owned_last, tmp_path / "nowhere")
    model.model.embed_tokens = nn.Embedding(1, 16)
    with pytest.raises(ValueError, match="shape"):
        load_stage_weights(model, owned, tmp_path)
