"""The start-up check: wrong splits are planted and must be found; right ones must pass, quickly and without a trace."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.config import MeshConfig
from hf_meshadapt.pipeline import assembly
from hf_meshadapt.pipeline.layout import ForeignLayer
from hf_meshadapt.pipeline.split_check import check_split
from hf_meshadapt.pipeline.stage import EntryLayer, StageModule
from tests.architectures import ARCHITECTURES, FAST, make_architecture
from tests.equality import Rows, collate_fixed, tiny_model

MESHES = [MeshConfig(stages=2), MeshConfig(stages=4), MeshConfig(stages=2, emulated=True)]


def outline(name: str, **sizes):
    """A model of an architecture's default, real sizes, without weights."""
    model_class = getattr(transformers, ARCHITECTURES[name][0])
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in ARCHITECTURES])
def test_right_splits_pass(name, caplog):
    for mesh in MESHES:
        check_split(make_architecture(name), mesh)
    assert "not checked" not in caplog.text


# Architectures of real size; the configuration defaults of two do not make a model.
REAL = {
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "bloom": {"n_layer": 24, "hidden_size": 1024, "n_head": 16},
}
QUICK = ("llama", "gpt2", "opt", "mamba")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ARCHITECTURES]
)
def test_real_sizes_are_shrunk(name, caplog):
    model = outline(name, **REAL.get(name, {}))
    check_split(model, MeshConfig(stages=4))  # a real size would not fit in memory
    assert "not checked" not in caplog.text


# Planted faults ------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden, *args, **kwargs):
        once = self.layer(hidden, *args, **kwargs)
        return self.layer(once if isinstance(once, torch.Tensor) else once[0], *args, **kwargs)


def replace_a_layer(monkeypatch, make):
    """In every chunk but the first, the first layer becomes `make(layer, returns_tuple)`."""
    right = StageModule._set_view

    def wrong(stage, returns_tuple):
        right(stage, returns_tuple)
        if stage.span.start > 0:
            stage._views[str(stage.span.start)] = make(stage._views[str(stage.span.start)], returns_tuple)

    monkeypatch.setattr(StageModule, "_set_view", wrong)


def skip_a_layer(monkeypatch):
    replace_a_layer(monkeypatch, ForeignLayer)


def double_a_layer(monkeypatch):
    replace_a_layer(monkeypatch, lambda layer, returns_tuple: Doubled(layer))


def scale_twice(monkeypatch):
    monkeypatch.setattr(EntryLayer, "passed", lambda self, hidden: self.incoming * 1.01)


def scale_gradients(monkeypatch):
    """Right in the forward direction and wrong in the backward."""

    def passed(self, hidden):
        return self.incoming.detach() + 1.01 * (self.incoming - self.incoming.detach())

    monkeypatch.setattr(EntryLayer, "passed", passed)


def change_the_final_norm(monkeypatch, change):
    right = assembly._prune_for

    def wrong(model, layout, spans, mesh, stage):
        right(model, layout, spans, mesh, stage)
        name = next(n for n in ("model.norm", "transformer.ln_f") if n in dict(model.named_modules()))
        model.set_submodule(name, change(model.get_submodule(name)))

    monkeypatch.setattr(assembly, "_prune_for", wrong)


def leave_out_the_final_norm(monkeypatch):
    change_the_final_norm(monkeypatch, lambda norm: nn.Identity())


def reset_the_final_norm(monkeypatch):
    def reset(norm):
        nn.init.ones_(norm.weight)
        return norm

    change_the_final_norm(monkeypatch, reset)


def mix_up_the_order(monkeypatch):
    right = StageModule._set_view

    def wrong(stage, returns_tuple):
        right(stage, returns_tuple)
        first, last = str(stage.span.start), str(stage.span.stop - 1)
        stage._views[first], stage._views[last] = stage._views[last], stage._views[first]

    monkeypatch.setattr(StageModule, "_set_view", wrong)


FAULTS = [
    skip_a_layer, double_a_layer, scale_twice, scale_gradients, leave_out_the_final_norm, reset_the_final_norm,
    mix_up_the_order,
]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=["2", "4", "emulated"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "granite", "gemma2"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_splits_are_found(fault, name, mesh, monkeypatch):
    fault(monkeypatch)
    model = make_architecture(name)
    with pytest.raises(NotImplementedError, match=f"{type(model).__name__} cannot be cut into stages") as caught:
        check_split(model, mesh)
    assert caught.match("(loss|gradient of) .* instead of.*Use pipeline_stages=1")


def test_an_embedding_multiplier_applied_twice(monkeypatch):
    """What transformers' own pipeline does to Granite."""
    monkeypatch.setattr(EntryLayer, "passed", lambda self, hidden: self.incoming * 12.0)
    model = outline("granite", embedding_multiplier=12.0)
    with pytest.raises(NotImplementedError, match="GraniteForCausalLM cannot be cut.*loss"):
        check_split(model, MeshConfig(stages=2))


def test_one_stage_has_nothing_to_compare(monkeypatch):
    skip_a_layer(monkeypatch)
    check_split(make_architecture("llama"), MeshConfig(stages=1))


# Classes of the user's own -------------------------------------------------------------------------------------------


class OwnConfig(PreTrainedConfig):
    model_type = "own"
    attribute_map = {"hidden_size": "dim", "num_hidden_layers": "n_blocks", "num_attention_heads": "n_head"}

    def __init__(self, dim=768, n_blocks=12, n_head=12, vocab_size=5000, **kwargs):
        self.dim, self.n_blocks, self.n_head, self.vocab_size = dim, n_blocks, n_head, vocab_size
        super().__init__(**kwargs)


class OwnBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.mix = nn.Linear(config.dim, config.dim)

    def forward(self, x, first):
        return x + self.mix(self.norm(x)).cumsum(1) + first


class OwnModel(PreTrainedModel):
    """As remote code comes: names of its own, and a loss by hand where `counts` is off."""

    config_class = OwnConfig
    leaks, counts = False, True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(OwnBlock(config) for _ in range(config.n_blocks))
        self.out = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.out

    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, labels=None, **kwargs):
        x = embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x, 0.1 * embedded if self.leaks else 0)  # a leak is read by every block, on whatever stage
        logits = self.out(x)
        loss = None
        if labels is not None and self.counts:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        elif labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


class Leaking(OwnModel):
    leaks = True


class OwnLoss(OwnModel):
    counts = False


class Addition(OwnModel):
    """Adds a little that is not divided, as auxiliary losses are not."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 1e-3
        return output


class Strict(OwnModel):
    """Takes no other size than its own."""

    def __init__(self, config):
        if (config.dim, config.n_blocks) != (64, 4):
            raise ValueError("only the one size")
        super().__init__(config)


class NoCount(OwnModel):
    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, labels=None, use_cache=None):
        return super().forward(input_ids, inputs_embeds, attention_mask, labels)


def test_a_class_of_the_users_own(caplog):
    for mesh in MESHES:
        check_split(OwnModel(OwnConfig()), mesh)
    assert not [record for record in caplog.records if record.name.startswith("hf_meshadapt")]


def test_an_architecture_that_leaks(monkeypatch):
    """Every block reads the embedding, which the second stage has not."""
    for mesh in MESHES:
        with pytest.raises(
            NotImplementedError, match="Leaking cannot be cut into stages.*loss.*gradient of embed.weight"
        ):
            check_split(Leaking(OwnConfig()), mesh)
    check_split(Leaking(OwnConfig()), MeshConfig(stages=1))


@pytest.mark.parametrize("stages", [1, 2])
def test_losses_that_heed_no_count_of_tokens(stages, tmp_path):
    """Found on the model itself, and on a clone where its forward cannot even be told the count."""
    sizes = OwnConfig(dim=32, n_blocks=2, n_head=2, vocab_size=97)
    for model in (OwnLoss(sizes), Addition(sizes)):
        args = MeshAdaptArguments(output_dir=str(tmp_path), pipeline_stages=stages, use_cpu=True, report_to="none")
        with pytest.raises(NotImplementedError, match="the loss of .*num_items_in_batch.*self.loss_function"):
            MeshAdaptTrainer(model=model, args=args, train_dataset=Rows(4), data_collator=collate_fixed)
    with pytest.raises(NotImplementedError, match="NoCount: its forward takes no num_items_in_batch.*kwargs"):
        check_split(NoCount(OwnConfig()), MeshConfig(stages=stages))


def test_a_class_without_a_tiny_clone(caplog):
    """The layers are cut down first, so a class of one size only is not checked, and said to be not."""
    check_split(Strict(OwnConfig(dim=64, n_blocks=4, n_head=2)), MeshConfig(stages=3))
    assert not caplog.records  # its own size is tiny enough: 4 layers for 3 stages
    with caplog.at_level(logging.WARNING):
        model = Strict(OwnConfig(dim=64, n_blocks=4, n_head=2))
        check_split(model, MeshConfig(stages=2))
    assert "Strict: no tiny clone of it could be made, so its split is not checked" in caplog.text


# No trace ------------------------------------------------------------------------------------------------------------


def test_random_states_and_model_are_left_alone():
    model = make_architecture("gpt2").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    check_split(model, MeshConfig(stages=2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert model.training and model.config.to_dict() == config
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_same_finding_every_time(monkeypatch):
    scale_twice(monkeypatch)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with pytest.raises(NotImplementedError) as caught:
            check_split(make_architecture("llama", seed=seed), MeshConfig(stages=2))
        found.append(str(caught.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("by_name", [True, False])
def test_the_trainer_refuses_before_weights_are_read(by_name, monkeypatch, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    scale_twice(monkeypatch)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    args = MeshAdaptArguments(output_dir=str(tmp_path), pipeline_stages=2, use_cpu=True, report_to="none")
    model = str(tmp_path / "model") if by_name else tiny_model("llama")
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM cannot be cut into stages: a tiny clone"):
        MeshAdaptTrainer(model=model, args=args, train_dataset=Rows(4), data_collator=collate_fixed)
