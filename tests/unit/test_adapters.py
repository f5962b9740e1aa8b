"""Adapters: what is refused, what a stage owns of one, what is counted, and files of stages that become one."""

from __future__ import annotations

import re

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.adapter_checkpoint import merge_adapter, save_stage_adapter
from hf_meshadapt.card import write_card
from hf_meshadapt.checkpoint import install
from hf_meshadapt.checkpoint_folder import weight_map
from hf_meshadapt.config import BoundaryConfig, MeshConfig
from hf_meshadapt.pipeline.assembly import cut_model, own_parts, wrap_chunks
from hf_meshadapt.pipeline.footprint import outline_weights
from hf_meshadapt.pipeline.intake import take_model
from hf_meshadapt.pipeline.layout import fill_in, find_layout, prune
from hf_meshadapt.pipeline.ownership import leftover_claims
from tests.adapters import adapted_model, lora
from tests.equality import Rows, collate_fixed, tiny_model
from tests.hub_cards import card_faults

QV = {"target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def build(tmp_path):
    """A trainer of two emulated stages."""

    def trainer(model, peft_config=None, save_strategy="no", **others) -> MeshAdaptTrainer:
        given = {"pipeline_stages": 2, "max_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        args = MeshAdaptArguments(output_dir=str(tmp_path), preset="dense", save_strategy=save_strategy, **given)
        data = {"train_dataset": Rows(8), "data_collator": collate_fixed}
        return MeshAdaptTrainer(model=model, args=args, peft_config=peft_config, **data, **others)

    return trainer


# Refused -------------------------------------------------------------------------------------------------------------

PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
CONFIGS = [
    (peft.PromptTuningConfig(**PROMPT), NotImplementedError, "peft_type=PROMPT_TUNING: .*virtual tokens.*LoraConfig"),
    (peft.PrefixTuningConfig(**PROMPT), NotImplementedError, "peft_type=PREFIX_TUNING: .*virtual tokens.*LoraConfig"),
    (peft.VeraConfig(), NotImplementedError, "peft_type=VERA: not tested over stages.*LoraConfig"),
    (lora(layer_replication=[(0, 2), (1, 4)]), NotImplementedError, "layer_replication=.*list of layers"),
    (lora(trainable_token_indices=[1]), NotImplementedError, "trainable_token_indices=.*two stages"),
    ({"r": 8}, ValueError, "peft_config is a dict: give a LoraConfig"),
]


@pytest.mark.parametrize("config,error,message", CONFIGS, ids=lambda value: str(value)[:24])
def test_configurations_that_are_refused(build, config, error, message):
    with pytest.raises(error, match=message):
        build(tiny_model("llama"), config)


def test_prompt_tuning_of_a_model_is_refused(build):
    model = get_peft_model(tiny_model("llama"), peft.PromptTuningConfig(**PROMPT))
    with pytest.raises(NotImplementedError, match="PROMPT_TUNING.*no stage owns it"):
        build(model)


def test_several_adapters_are_refused_by_name(build):
    model = adapted_model("llama", **QV)
    model.add_adapter("other", lora(**QV))
    with pytest.raises(NotImplementedError, match=r"2 adapters \(default, other\).*delete_adapter"):
        build(model)


def test_adapters_that_would_not_train_are_refused(build, tmp_path):
    adapted_model("llama", **QV).save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter")
    with pytest.raises(ValueError, match="nothing to train.*is_trainable=True"):
        build(loaded)
    merged = adapted_model("llama", **QV)
    merged.merge_adapter()
    with pytest.raises(ValueError, match="merged.*unmerge_adapter"):
        build(merged)


def test_adapters_twice_or_without_their_wrapper_are_refused(build):
    with pytest.raises(ValueError, match="peft_config and a PeftModel.*one of the two"):
        build(adapted_model("llama", **QV), lora(**QV))
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM with peft_config.*Give the PeftModel"):
        build(adapted_model("llama", **QV).get_base_model())


def test_values_made_from_the_weights_want_the_whole_model(build, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    config = lora(**QV, init_lora_weights="pissa")
    with pytest.raises(NotImplementedError, match="init_lora_weights='pissa' with a model's name.*Give the loaded"):
        build(str(tmp_path / "model"), config)
    build(tiny_model("llama"), config)


def test_what_does_not_reach_the_boundary_is_an_error(build):
    """As under reentrant checkpointing of inputs without gradient: plain autograd would train on, with zeros."""
    trainer = build(adapted_model("llama", **QV))
    layer = trainer.engine.parts.model.model.layers[1]
    layer.register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(RuntimeError, match="layers 0-1 train.*use_reentrant"):
        trainer.train()


def test_a_checkpoint_of_weights_is_not_one_of_adapters(build, tmp_path):
    build(tiny_model("llama"), save_strategy="steps").train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="checkpoint-1 holds a model, and this run trains an adapter"):
        build(tiny_model("llama"), lora(**QV)).train(resume_from_checkpoint=checkpoint)
    build(tiny_model("llama"), lora(**QV), save_strategy="steps").train()
    with pytest.raises(ValueError, match="checkpoint-1 holds an adapter, and this run trains a model"):
        build(tiny_model("llama")).train(resume_from_checkpoint=checkpoint)


# What is trained, counted and saved ----------------------------------------------------------------------------------


def test_only_adapters_are_trained_and_the_frozen_tie_sends_nothing(build):
    trainer = build(tiny_model("llama_tied"), lora(**QV))
    trainer.train()
    names = [name for name, _ in trainer.engine.parts.named_trainable()]
    assert len(names) == 16 and all("lora_" in name for name in names)
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(trainer.optimizer.state) == 16
    assert trainer.engine.plan(4, 16, 1).axis_bytes("tied") == 0
    assert isinstance(trainer.model, PeftModel)


def test_the_card_of_an_adapter_loads_it_as_it_says(build, tmp_path, monkeypatch):
    whole = tiny_model("llama")
    whole.save_pretrained(tmp_path / "base")
    trainer = build(str(tmp_path / "base"), lora(**QV))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    text = write_card(tmp_path / "adapter", base_model="me/base").read_text()
    assert card_faults(text) == [] and "| target modules | q_proj, v_proj |" in text and "| rank | 4 |" in text
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    monkeypatch.chdir(tmp_path / "adapter")  # the card names its own folder
    made = {}
    exec(code.replace('"me/base"', repr(str(tmp_path / "base"))), made)
    tokens = torch.arange(3, 11)[None]
    trained = trainer.model.eval()
    loaded = made["model"].eval()
    assert isinstance(loaded, PeftModel)
    found = {name: tensor for name, tensor in loaded.state_dict().items() if "lora" in name}
    assert found and all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in found.items())
    assert not torch.equal(loaded(tokens).logits, whole.eval()(tokens).logits)


def test_memory_counts_gradients_and_optimizer_state_of_adapters_only():
    model, mesh = adapted_model("llama", **QV, layers_to_transform=[0]).get_base_model(), MeshConfig(stages=2)
    first, last = (outline_weights(model, mesh, stage) for stage in (0, 1))
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert (first.trainable, last.trainable) == (trained, 0)
    assert first.weights > trained and last.weights > 0


def two_stages(model) -> list:
    """What two ranks hold of one model, made twice."""
    mesh = MeshConfig(stages=2)
    adapters = [model() for _ in range(2)]
    cuts = [cut_model(adapter.get_base_model(), mesh, stage) for stage, adapter in enumerate(adapters)]
    wrapped = [wrap_chunks(*cut, mesh, BoundaryConfig(), stage) for stage, cut in enumerate(cuts)]
    claims = leftover_claims(wrapped[0]) | leftover_claims(wrapped[1])
    parts = [own_parts(*cut, stages, claims) for cut, stages in zip(cuts, wrapped)]
    for part, adapter in zip(parts, adapters):
        part.take_adapter(adapter)
    return parts


OPTIONS = {
    "plain": QV,
    "dora": {**QV, "use_dora": True, "task_type": None},
    "modules": {**QV, "modules_to_save": ["model.norm", "lm_head"]},
    "ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "one-layer": {**QV, "layers_to_transform": [3]},
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("case", OPTIONS)
def test_files_of_stages_become_the_file_that_peft_writes(tmp_path, case):
    def model():
        return adapted_model("llama_tied" if case == "ends" else "llama", **OPTIONS[case])

    model().save_pretrained(tmp_path / "peft")
    parts = two_stages(model)
    folder = tmp_path / "mesh"
    folder.mkdir()
    for stage, part in enumerate(parts):
        save_stage_adapter(part.adapter, part.adapter_names, folder, stage, 2)
    merge_adapter(folder)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    mine, theirs = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "peft"))
    assert mine.keys() == theirs.keys() == weight_map(folder).keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    configs = [(path / "adapter_config.json").read_text() for path in (folder, tmp_path / "peft")]
    assert configs[0] == configs[1]


def test_a_peft_model_around_a_part_is_not_taken_for_the_whole(tmp_path):
    tokens = torch.ones(1, 3, dtype=torch.long)
    for stage in range(2):
        adapter, _ = take_model(adapted_model("llama", **QV), "auto", MeshConfig(stages=2), stage)
        calls = {"save_pretrained": (tmp_path / "saved",), "push_to_hub": ("me/adapter",), "forward": (tokens,)}
        for call, given in {**calls, "generate": (tokens,)}.items():
            with pytest.raises(NotImplementedError, match="a part of the whole.* on all ranks"):
                getattr(adapter, call)(*given)
    whole, _ = take_model(adapted_model("llama", **QV), "auto", MeshConfig(stages=2, emulated=True), 0)
    whole.save_pretrained(tmp_path / "saved")


def write_stage(folder, stage: int, num_stages: int, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.full((2,), float(stage)) for name in names}
    save_file(tensors, folder / f"adapter-stage-{stage:05d}-of-{num_stages:05d}.safetensors")


def test_a_merge_wants_every_stage_once(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(ValueError, match="meshes with no stages"):
        merge_adapter(folder)
    write_stage(folder, 0, 2, "a")
    with pytest.raises(ValueError, match=r"lacks the adapters of stages \[1\] of 2"):
        merge_adapter(folder)
    write_stage(folder, 1, 2, "a")
    with pytest.raises(ValueError, match="holds a, which another stage saved too"):
        merge_adapter(folder)
    write_stage(folder, 1, 2)  # a stage without adapters
    cut_off = folder / "adapter-stage-00001-of-00002.safetensors"
    whole = cut_off.read_bytes()
    cut_off.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="use another checkpoint"):
        merge_adapter(folder)
    assert not (folder / "adapter_model.safetensors").exists()
    cut_off.write_bytes(whole)
    merge_adapter(folder)
    assert load_file(folder / "adapter_model.safetensors").keys() == {"a"}


def test_an_adapter_leaves_a_model_beside_it_and_a_model_no_adapter(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()

    def put(*names: str) -> set[str]:
        partial = tmp_path / "partial"
        partial.mkdir()
        for name in names:
            (partial / name).write_text(name)
        install(partial, folder)
        return {path.name for path in folder.iterdir()}

    model, adapter = {"config.json", "model.safetensors"}, {"adapter_config.json", "adapter_model.safetensors"}
    assert put(*model) == model
    assert put(*adapter) == put(*adapter) == model | adapter
    assert put(*model) == model


def test_a_pruned_model_filled_in_looks_whole():
    whole = tiny_model("llama_tied")
    for first in (True, False):
        model = tiny_model("llama_tied")
        with torch.device("meta"):
            outline = type(model)(model.config)
        layout = find_layout(outline)
        prune(model, layout, [range(0, 2) if first else range(2, 4)], is_first=first, is_last=not first)
        fill_in(model, outline, layout)
        assert find_layout(model) == find_layout(whole)
        shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
        assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
        here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
        assert "model.embed_tokens.weight" in here
        assert {name.split(".")[2] for name in here if "layers" in name} == ({"0", "1"} if first else {"2", "3"})
