"""Weights saved stage by stage, without process groups: merged, loaded by transformers and by other meshes."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_meshadapt.checkpoint import load_stage_weights, merge_index, save_stage
from hf_meshadapt.checkpoint_folder import INDEX_NAME
from hf_meshadapt.config import MeshConfig
from hf_meshadapt.pipeline.intake import read_part
from hf_meshadapt.pipeline.split_run import cut_apart
from tests.architectures import make_architecture
from tests.equality import mesh_trainer
from tests.equality import tiny_model as equality_model
from tests.tiny_stages import KINDS, PARTS, assert_same_weights, cut, save_all_stages, tiny_model


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


# A weight of the last stage that transformers stores in another form: experts by themselves, or under another name.
CONVERTED = {"mixtral": "model.layers.3.block_sparse_moe.experts.2.w2.weight", "gpt_neox": "embed_out.weight"}


@pytest.mark.parametrize("kind", CONVERTED)
def test_weights_in_another_form_are_saved_as_transformers_saves_them_and_loaded(tmp_path, kind):
    whole, mesh = make_architecture(kind), MeshConfig(stages=2)
    for stage, parts in enumerate(cut_apart(whole, mesh)):
        save_stage(parts.model, parts.saved_names(), tmp_path, stage, 2)
    merge_index(tmp_path)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), whole)

    (tmp_path / "config.json").unlink()  # a machine without the first stage has none
    for stage, parts in enumerate(cut_apart(make_architecture(kind, seed=1), mesh)):
        places = {name: tensor.data_ptr() for name, tensor in parts.model.state_dict().items()}
        names = (parts.saved_names(), tmp_path, parts.stored_name_of_copy())
        if kind == "mixtral" or stage == 1:
            with pytest.raises(
                ValueError, match=f"lacks the weights.*{'experts' if kind == 'mixtral' else 'lm_head'}"
            ):
                load_stage_weights(parts.model, *names)
        load_stage_weights(parts.model, *names, functools.partial(read_part, parts, tmp_path, mesh, stage))
        for name in parts.saved_names():
            assert torch.equal(parts.model.state_dict()[name], whole.state_dict()[name]), name
            assert parts.model.state_dict()[name].data_ptr() == places[name]
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    del index["weight_map"][CONVERTED[kind]]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"lacks the weights {CONVERTED[kind]}: it holds another"):
        load_stage_weights(parts.model, *names, functools.partial(read_part, parts, tmp_path, mesh, stage))


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


@pytest.mark.parametrize("kind,fault", [("llama", "4 layers, and this model has 3"), ("llama_tied", "lm_head.weight")])
def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path, kind, fault):
    options = dict(pipeline_stages=2, max_steps=1, eval_strategy="no", save_strategy="steps", save_steps=1)
    mesh_trainer(equality_model("llama"), 4, str(tmp_path), 16, **options).train()
    smaller = equality_model(kind, num_layers=3 if kind == "llama" else 4)
    trainer = mesh_trainer(smaller, 4, str(tmp_path), 16, **options)
    before = {name: tensor.clone() for name, tensor in smaller.state_dict().items()}
    with pytest.raises(ValueError, match=f"holds a model with {fault}.*: resume with the model that wrote it"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in smaller.state_dict().items())
