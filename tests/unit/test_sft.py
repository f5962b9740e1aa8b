"""`MeshAdaptSFTConfig`, the packed rows, and what of TRL a mesh refuses; equality with TRL: tests/distributed."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers import (
    HfArgumentParser,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import hf_meshadapt
from hf_meshadapt import MeshAdaptArguments, MeshAdaptSFTConfig, MeshAdaptSFTTrainer
from hf_meshadapt.sft import PackedCollator
from hf_meshadapt.sft_checks import refuse_packing
from tests.equality import VOCAB, tiny_model
from tests.sft import mesh_trainer, texts, tokenizer

QUIET = {"use_cpu": True, "report_to": "none", "bf16": False}


@pytest.fixture
def build(tmp_path):
    """A trainer on text over two emulated stages, with some options changed."""

    def trainer(case: str = "text", model=None, **overrides) -> MeshAdaptSFTTrainer:
        return mesh_trainer(case, str(tmp_path), model, **overrides)

    return trainer


# Configuration -------------------------------------------------------------------------------------------------------


def test_every_field_is_that_of_who_changed_it():
    """Both bases bring all of TrainingArguments' fields along: what one of them changed must win."""
    ours, base = ({field.name: field for field in fields(owner)} for owner in (MeshAdaptSFTConfig, TrainingArguments))
    for owner in (MeshAdaptArguments, SFTConfig):
        for field in fields(owner):
            if field.name not in base or field.default != base[field.name].default:
                assert ours[field.name].default == field.default, field.name
                assert ours[field.name].metadata == field.metadata, field.name


def test_defaults_and_their_consequences(tmp_path):
    args = MeshAdaptSFTConfig(output_dir=str(tmp_path), use_cpu=True, pipeline_stages=2, preset="dense")
    assert (args.learning_rate, args.bf16, args.gradient_checkpointing, args.logging_steps) == (2e-5, True, True, 10)
    assert args.wire_dtype == "bfloat16"  # TRL's bf16 is known before the mesh chooses
    assert args.pad_to_multiple_of is None and args.ddp_timeout == 600
    recorded = MeshAdaptSFTConfig(output_dir=str(tmp_path), eos_token="</s>", **QUIET).to_dict()
    assert (recorded["eos_token"], recorded["exact_first_token"]) == ("</s>", False)
    assert MeshAdaptSFTConfig(output_dir=str(tmp_path), **QUIET).bf16 is False


def test_command_line(tmp_path):
    parser = HfArgumentParser(MeshAdaptSFTConfig)
    assert "--packing_strategy" in parser.format_help() and "--pipeline_stages" in parser.format_help()
    line = f"--output_dir {tmp_path} --use_cpu --pipeline_stages 2 --packing --pad_to_multiple_of 64 --mask_ratio 0.9"
    (args,) = parser.parse_args_into_dataclasses(line.split())
    assert (args.pipeline_stages, args.packing, args.pad_to_multiple_of, args.mask_ratio) == (2, True, 64, 0.9)


OPTIONS = [
    ({"loss_type": "dft"}, "loss_type='dft': .*Use 'nll'"),
    ({"loss_type": "chunked_nll"}, "loss_type='chunked_nll': .*Use 'nll'"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True: it replaces the forward pass"),
    ({"padding_free": True}, "padding_free=True: .*packing=True"),
    ({"padding_free": True, "packing": True}, "padding_free=True: .*Unset it"),
    ({"activation_offloading": True}, "activation_offloading=True: .*gradient_checkpointing"),
    ({"model_init_kwargs": {"dtype": "bfloat16"}}, "model_init_kwargs=.*: .*model_dtype"),
    ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1: .*0.0"),
    ({"chat_template_path": "some/tokenizer"}, "chat_template_path='some/tokenizer': .*clone_chat_template"),
]


@pytest.mark.parametrize("options,message", OPTIONS, ids=lambda value: str(value)[:40])
def test_options_that_are_refused(tmp_path, options, message):
    with pytest.raises(NotImplementedError, match=message):
        MeshAdaptSFTConfig(output_dir=str(tmp_path), **{**QUIET, **options})


def test_without_trl_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "hf_meshadapt.sft")
    with pytest.raises(ModuleNotFoundError, match=r"MeshAdaptSFTTrainer needs trl: run pip install '\.\[trl\]' in a"):
        hf_meshadapt.MeshAdaptSFTTrainer  # noqa: B018 (names load on first use)


# Trainer -------------------------------------------------------------------------------------------------------------


def test_other_arguments(tmp_path):
    for wrong in (MeshAdaptArguments(output_dir=str(tmp_path), **QUIET), SFTConfig(str(tmp_path), **QUIET), None):
        with pytest.raises(ValueError, match=f"args must be MeshAdaptSFTConfig, not {type(wrong).__name__}"):
            MeshAdaptSFTTrainer(tiny_model("llama"), wrong, train_dataset=texts(4, 1), processing_class=tokenizer())


def images():
    return datasets.Dataset.from_dict({"text": ["w1"], "images": [[0]]})


ARGUMENTS = [
    ({"quantization_config": SimpleNamespace()}, "quantization_config: .*model_dtype='bfloat16'"),
    ({"train_dataset": images()}, "train_dataset has a column images: vision-language data"),
    ({"train_dataset": images().to_iterable_dataset()}, "train_dataset has a column images: vision-language data"),
]


@pytest.mark.parametrize("arguments,message", ARGUMENTS, ids=["quantization", "images", "stream of images"])
def test_arguments_that_are_refused(build, arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        build(trainer=arguments)


@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "answer"), ("completion",)], ids=str)
@pytest.mark.parametrize("streams", [False, True], ids=["rows", "stream"])
def test_columns_with_nothing_to_train_on(build, names, streams):
    rows = datasets.Dataset.from_dict({name: ["w1 w2"] * 4 for name in names})
    data = rows.to_iterable_dataset() if streams else rows
    listed = ", ".join(sorted(names))
    with pytest.raises(
        ValueError, match=f"train_dataset has only {listed}: must have text or messages, or prompt and"
    ):
        build(trainer={"train_dataset": data})
    with pytest.raises(ValueError, match=f"eval_dataset has only {listed}: must have text or messages, or prompt and"):
        build(trainer={"eval_dataset": data})
    with pytest.raises(ValueError, match=rf"eval_dataset\['held_out'\] has only {listed}: must have text"):
        build(trainer={"eval_dataset": {"held_out": data}})


@pytest.mark.parametrize("named", [False, True], ids=["formatting_func", "dataset_text_field"])
def test_columns_that_a_person_names(build, named):
    rows = datasets.Dataset.from_dict({"question": ["w1 w2"] * 4, "answer": ["w3"] * 4})
    given = {"train_dataset": rows, "eval_dataset": None}
    if not named:
        given["formatting_func"] = lambda row: row["question"] + " " + row["answer"]
    options = {"dataset_text_field": "question"} if named else {}
    trainer = build(eval_strategy="no", trainer=given, **options)
    assert [len(row["input_ids"]) for row in trainer.train_dataset] == [3 if named else 4] * 4


def test_a_length_that_leaves_nothing_is_said_to(build):
    long = datasets.Dataset.from_list([{"prompt": "w1 w2 w3 w4 ", "completion": "w5"}] * 3)
    short = datasets.Dataset.from_list([{"prompt": "w1 ", "completion": "w5"}] * 4)
    message = "train_dataset is empty after TRL prepared it: at max_length=4 none of its 3 rows .*Raise max_length"
    with pytest.raises(ValueError, match=message):
        build("completion", max_length=4, trainer={"train_dataset": long})
    with pytest.raises(ValueError, match="^eval_dataset is empty after TRL prepared it"):
        build("completion", max_length=4, trainer={"train_dataset": short, "eval_dataset": long})
    for name in ("train_dataset", "eval_dataset"):  # from the beginning
        with pytest.raises(ValueError, match=f"^{name} is empty. Give it at least one row"):
            build("completion", trainer={name: long.select([])})


def test_a_model_and_its_tokenizer_by_name(build, tmp_path):
    folder = tmp_path / "model"
    tiny_model("llama_tied").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    trainer = build(model=str(folder), trainer={"processing_class": None})
    assert trainer.processing_class.decode([5, 1]) == tokenizer().decode([5, 1])


def test_arguments_by_position(tmp_path):
    args = MeshAdaptSFTConfig(output_dir=str(tmp_path), **QUIET)
    # model, args, data_collator, train_dataset
    with pytest.raises(NotImplementedError, match="vision-language data"):
        MeshAdaptSFTTrainer(tiny_model("llama"), args, None, images())


def test_remote_code_by_name(build):
    with pytest.raises(NotImplementedError, match="trust_remote_code=True with model='some/model': .*from_pretrained"):
        build(model="some/model", trust_remote_code=True)


def mixture():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, intermediate_size=64, num_local_experts=2, **shape))


def test_auxiliary_losses_of_routers(build):
    """TRL turns them on where nobody says otherwise."""
    with pytest.raises(NotImplementedError, match="output_router_logits=True.*router_aux_loss_coef=0.0"):
        build(model=mixture())
    build(model=mixture(), router_aux_loss_coef=0.0)


@pytest.mark.parametrize("name", ["compute_loss", "prediction_step"])
def test_methods_that_a_mesh_does_not_call(build, monkeypatch, name):
    """TRL's own are known and replaced; a person's are not."""
    assert getattr(MeshAdaptSFTTrainer, name) is getattr(SFTTrainer, name)
    monkeypatch.setattr(MeshAdaptSFTTrainer, name, lambda self, *args, **kwargs: None)
    with pytest.raises(NotImplementedError, match=f"MeshAdaptSFTTrainer.{name}: a mesh would not call it.*Pass"):
        build()


# Packing -------------------------------------------------------------------------------------------------------------


def test_packed_rows_stay_rows():
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "seq_lengths": [3, 1]},
        {"input_ids": [9, 10, 11], "labels": [9, 10, 11], "seq_lengths": [1, 2]},
        {"input_ids": [12, 13], "labels": [12, 13], "seq_lengths": [2]},
    ]
    batch = PackedCollator(0, 6)(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 11, 0, 0, 0], [12, 13, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    no = -100
    assert batch["labels"].tolist() == [[no, 6, 7, no, no, no], [no, no, 11, no, no, no], [no, 13, no, no, no, no]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences_do_not_see_each_other(attention):
    model = tiny_model("llama").eval()
    model.config._attn_implementation = attention
    collate = PackedCollator(0)
    one, other = ({"input_ids": [first, 4, 6, 7, 8], "labels": [0] * 5, "seq_lengths": [2, 3]} for first in (3, 9))
    alone = {"input_ids": [6, 7, 8], "labels": [0] * 3, "seq_lengths": [3]}
    with torch.no_grad():
        logits = [
            model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits  # as stages run it
            for batch in (collate([one, alone]), collate([other, alone]))
        ]
    assert torch.equal(logits[0][0, 2:], logits[1][0, 2:]) and not torch.equal(logits[0][0, :2], logits[1][0, :2])
    torch.testing.assert_close(logits[0][0, 2:], logits[0][1, :3], rtol=0, atol=1e-5)


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4))


def test_recurrent_models_are_packed_only_where_sequences_may_see_each_other(build):
    with pytest.raises(
        NotImplementedError, match="packing_strategy='bfd'.*MambaForCausalLM would see each other.*wrapped"
    ):
        build("bfd", model=mamba(), gradient_checkpointing=False)
    build("wrapped", model=mamba(), gradient_checkpointing=False)


def test_flash_attention_keeps_sequences_apart_one_row_at_a_time():
    class Model:
        config = SimpleNamespace(_attn_implementation="flash_attention_2")

        def forward(self, input_ids, position_ids): ...

    model = Model()
    args = dict(packing_strategy="bfd", per_device_train_batch_size=4, per_device_eval_batch_size=4)
    refuse_packing(model, SimpleNamespace(**args, pipeline_microbatches=4))
    with pytest.raises(NotImplementedError, match="flash_attention_2 with more than one row.*sdpa"):
        refuse_packing(model, SimpleNamespace(**args, pipeline_microbatches=2))
    with pytest.raises(NotImplementedError, match="Set per_device_eval_batch_size=8"):
        refuse_packing(model, SimpleNamespace(**{**args, "per_device_eval_batch_size": 8}, pipeline_microbatches=4))


def test_padding_to_a_multiple(build):
    for case in ("text", "bfd"):
        trainer = build(case, pad_to_multiple_of=32)
        lengths = {batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()}
        assert lengths == {32}


def test_an_anchor_reads_packed_rows(tmp_path):
    options = dict(anchor=True, anchor_every=1, prior_rank=4, eval_strategy="no", gradient_accumulation_steps=1)
    trainer = mesh_trainer("bfd", str(tmp_path), **options)
    trainer.train()
    assert trainer.mesh_report()["anchor"]["num_live_steps"] == 2
