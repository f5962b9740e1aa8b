"""What MeshAdaptTrainer refuses, all in one process: each error says what is wrong and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DefaultDataCollator,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.trainer_checks import BYPASSED_METHODS, _warn_of_emulation
from tests.equality import Rows, collate_fixed, tiny_model


@pytest.fixture
def build(tmp_path):
    """A trainer of two emulated stages on a tiny Llama of 4 layers, with some things changed."""

    def trainer(model=None, args: dict | None = None, **others) -> MeshAdaptTrainer:
        given = {"pipeline_stages": 2, "max_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        arguments = MeshAdaptArguments(output_dir=str(tmp_path), **{**given, **(args or {})})
        data = {"train_dataset": Rows(8), "data_collator": collate_fixed}
        return MeshAdaptTrainer(model=model or tiny_model("llama"), args=arguments, **{**data, **others})

    return trainer


def test_an_emulated_mesh_says_once_that_it_is_one(build, caplog, monkeypatch, tmp_path):
    _warn_of_emulation.cache_clear()
    monkeypatch.setattr("sys.argv", ["my dir/train.py", "--max_steps", "5"])
    build(args={"pipeline_stages": 1})  # an ordinary run
    assert not caplog.messages
    build(), build()
    (said,) = [message for message in caplog.messages if "emulated" in message]
    assert said.startswith("pipeline_stages=2, data_parallel_replicas=1 in one process without a launcher")
    assert said.endswith("meshadapt launch --num-processes 2 --cpu 'my dir/train.py' --max_steps 5")
    _warn_of_emulation.cache_clear()
    caplog.clear()
    args = MeshAdaptArguments(output_dir=str(tmp_path), pipeline_stages=2, report_to="none", use_cpu=True)
    args.emulation_is_meant = True
    MeshAdaptTrainer(model=tiny_model("llama"), args=args, train_dataset=Rows(8), data_collator=collate_fixed)
    assert not caplog.messages


def test_more_stages_than_layers(build):
    with pytest.raises(ValueError, match="pipeline_stages x pipeline_chunks_per_rank = 5.*4 layers.*at most 4"):
        build(args={"pipeline_stages": 5})


def test_a_split_that_does_not_add_up(build):
    with pytest.raises(ValueError, match="pipeline_split=2,3: names 5 layers, the model has 4.*add up to 4"):
        build(args={"pipeline_split": "2,3"})


def test_names_of_what_is_no_causal_language_model(build, tmp_path):
    t5().config.save_pretrained(tmp_path / "t5")
    with pytest.raises(NotImplementedError, match="model='.*t5': T5Config belongs to no causal language model"):
        build(model=tmp_path / "t5")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        NotImplementedError, match="model='.*lora': the folder of an adapter.*AutoPeftModelForCausalLM"
    ):
        build(model=tmp_path / "lora")
    with pytest.raises(OSError, match="model='.*nowhere': neither a model's folder.*nor could it be had from the Hub"):
        build(model=tmp_path / "nowhere")


def test_metrics_of_whole_logits_over_replicas(build):
    args = {"data_parallel_replicas": 2}
    with pytest.raises(NotImplementedError, match="compute_metrics without preprocess_logits.*2 replicas.*argmax"):
        build(args=args, compute_metrics=lambda prediction: {})
    build(
        args=args, compute_metrics=lambda prediction: {}, preprocess_logits_for_metrics=lambda logits, labels: logits
    )
    build(compute_metrics=lambda prediction: {})


def test_a_loss_function_that_takes_a_mean_given_by_position(tmp_path):
    args = MeshAdaptArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")

    def loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.mean()

    # model, args, data_collator, train_dataset, eval_dataset, processing_class, model_init, compute_loss_func
    with pytest.raises(NotImplementedError, match="compute_loss_func cannot be summed.*num_items_in_batch"):
        MeshAdaptTrainer(tiny_model("llama"), args, collate_fixed, Rows(4), None, None, None, loss)


def test_a_loss_function_that_fails(build):
    with pytest.raises(NotImplementedError, match="compute_loss_func.*it raises TypeError"):
        build(compute_loss_func=lambda outputs, labels: outputs.logits.sum())


@pytest.mark.parametrize("name", BYPASSED_METHODS)
def test_methods_that_a_mesh_does_not_call(build, monkeypatch, name):
    assert callable(getattr(Trainer, name))
    monkeypatch.setattr(MeshAdaptTrainer, name, lambda self, *args, **kwargs: None)
    with pytest.raises(NotImplementedError, match=f"MeshAdaptTrainer.{name}: a mesh would not call it"):
        build()


@pytest.mark.parametrize("what,trains", [("frozen", True), ("thawed", False)])
def test_parameters_that_change_once_there_are_replicas(build, what, trains):
    """Replicas would train apart, or wait for a gradient that never comes."""
    for replicas in (1, 2):
        model = tiny_model("llama")
        model.model.layers[0].requires_grad_(trains)
        trainer = build(model=model, args={"data_parallel_replicas": replicas, "preset": "dense"})
        trainer.model.model.layers[0].requires_grad_(not trains)
        if replicas == 1:
            trainer.train()
        else:
            with pytest.raises(ValueError, match=f"model.layers.0.* and 1 more: {what} after the trainer was made"):
                trainer.train()


def masked_bert():
    config = BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return BertForMaskedLM(config)


def mixture():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=97, intermediate_size=64, num_local_experts=2, output_router_logits=True, **shape
    )
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("stages", [1, 2])
def test_losses_that_are_not_sums_over_tokens(build, stages):
    args = {"pipeline_stages": stages}
    with pytest.raises(NotImplementedError, match="the loss of BertForMaskedLM cannot be summed.*num_items_in_batch"):
        build(model=masked_bert(), args=args)
    model = mixture()
    with pytest.raises(NotImplementedError, match="config.output_router_logits=True.*Set it to False"):
        build(model=model, args=args)


@pytest.mark.parametrize("name,remedy", [("peft_config", "Give the PeftModel"), ("hf_quantizer", "model in bfloat16")])
def test_models_that_could_be_trained_and_not_saved(build, name, remedy):
    model = tiny_model("llama")
    setattr(model, name, SimpleNamespace(is_trainable=True))
    with pytest.raises(NotImplementedError, match=f"LlamaForCausalLM with {name}.*{remedy}"):
        build(model=model)


def test_data_loaders_of_which_nothing_is_known(build, monkeypatch):
    """Where rows must be dealt out or, as here, boundaries calibrated; an evaluation does not ask for that."""
    trainer = build()
    batches = list(trainer.get_train_dataloader())
    monkeypatch.setattr(trainer, "get_train_dataloader", lambda: batches)
    monkeypatch.setattr(trainer, "get_eval_dataloader", lambda *_: batches)
    with pytest.raises(NotImplementedError, match="a data loader of your own .list.*calibrate boundaries. Return"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_training_again_from_model_init(tmp_path):
    args = MeshAdaptArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1, save_strategy="no"
    )
    trainer = MeshAdaptTrainer(
        args=args, model_init=lambda: tiny_model("llama"), train_dataset=Rows(8), data_collator=collate_fixed
    )
    trainer.train()
    with pytest.raises(NotImplementedError, match="again with model_init.*Make another trainer"):
        trainer.train()


ENTRIES = [
    ({"names": ["a"] * 4}, ValueError, "batch entry names .list.*4 sequences.*remove_unused_columns=True"),
    ({"max_length": 16}, ValueError, "batch entry max_length .int.*4 sequences"),
    ({"cu_seq_lens_q": torch.arange(6)}, ValueError, r"batch entry cu_seq_lens_q .shape \(6,\).*4 sequences"),
    ({"shift_labels": torch.zeros(4, 16)}, NotImplementedError, "shift_labels.*Let the collator give labels"),
]


@pytest.mark.parametrize("entry,error,message", ENTRIES, ids=lambda value: str(value)[:20])
def test_batches_that_cannot_be_cut(build, entry, error, message):
    rows = {"per_device_train_batch_size": 4}
    trainer = build(args=rows, data_collator=lambda rows: {**collate_fixed(rows), **entry})
    with pytest.raises(error, match=message):
        trainer.train()


def test_plain_training_arguments(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    for wrong in (args, None):
        with pytest.raises(ValueError, match=f"MeshAdaptArguments, not {type(wrong).__name__}"):
            MeshAdaptTrainer(model=tiny_model("llama"), args=wrong)


def test_no_model(tmp_path):
    args = MeshAdaptArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="model=None: give a model, or the name of one"):
        MeshAdaptTrainer(args=args)


def test_a_dtype_for_a_model_that_has_one(build):
    with pytest.raises(ValueError, match="model_dtype='bfloat16'.*Give the model's name"):
        build(args={"model_dtype": "bfloat16"})


def t5():
    config = T5Config(vocab_size=97, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def bert():
    return BertModel(
        BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    )


def base_llama():
    return LlamaModel(tiny_model("llama").config)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "make,reason",
    [
        (t5, "T5ForConditionalGeneration cannot be cut.*one list of 2 decoder layers.*decoder.block, encoder.block"),
        (bert, "BertModel has no output head.*AutoModelForCausalLM"),
        (base_llama, "LlamaModel has no output head.*AutoModelForCausalLM"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not a Hugging Face model"),
    ],
)
def test_models_that_cannot_be_cut(build, make, reason, stages):
    with pytest.raises(NotImplementedError, match=reason):
        build(model=make(), args={"pipeline_stages": stages})


def test_batches_without_labels(build):
    def collate(rows):
        return {name: tensor for name, tensor in collate_fixed(rows).items() if name != "labels"}

    trainer = build(data_collator=collate, eval_dataset=Rows(4))
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match="no labels.*input_ids, attention_mask.*DataCollatorForLanguageModeling"):
            run()


RAW = [
    (datasets.Dataset.from_dict({"text": ["a b"] * 4}), "text"),
    (datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}] * 4), "messages"),
    ([{"prompt": "a", "completion": "b"}] * 4, "prompt, completion"),
]


@pytest.mark.parametrize("data,columns", RAW, ids=["text", "messages", "a list"])
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_text_that_nobody_has_tokenised(build, data, columns, name):
    given = {"data_collator": DefaultDataCollator(), "train_dataset": token_table(), name: data}
    message = rf"{name} has no input_ids \(only {columns}\).*Tokenise it.*MeshAdaptSFTTrainer"
    with pytest.raises(ValueError, match=message):
        build(**given)
    if name == "eval_dataset":
        with pytest.raises(ValueError, match=message):
            build(**{**given, name: {"good": token_table(), "bad": data}})
    build(**{**given, "data_collator": lambda rows: None})  # may tokenise by itself


def test_text_that_is_tokenised_as_it_is_read(build):
    data = RAW[0][0].with_transform(lambda rows: {"input_ids": [[1, 2]] * len(rows["text"])})
    build(train_dataset=data, data_collator=DefaultDataCollator(), args={"remove_unused_columns": False})


def test_streams_of_text(build):
    with pytest.raises(ValueError, match="train_dataset has no input_ids"):
        build(train_dataset=RAW[0][0].to_iterable_dataset(), data_collator=DefaultDataCollator())


def token_table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 4, "labels": [[1, 2]] * 4})


class Empty(Rows):
    def __init__(self):
        super().__init__(0)


def test_empty_training_set(build):
    with pytest.raises(ValueError, match="train_dataset.*empty.*at least one row"):
        build(train_dataset=Empty()).train()


def test_no_training_set(build):
    with pytest.raises(ValueError, match="requires a train_dataset"):
        build(train_dataset=None).train()


def test_empty_evaluation_set(build):
    with pytest.raises(ValueError, match="evaluation dataset is empty.*at least one row"):
        build(eval_dataset=Empty()).evaluate()


def test_resuming_without_a_checkpoint(build):
    with pytest.raises(ValueError, match="resume_from_checkpoint=True: no whole checkpoint in"):
        build().train(resume_from_checkpoint=True)


def test_a_report_before_training(build):
    with pytest.raises(ValueError, match="before any training step"):
        build().mesh_report()
