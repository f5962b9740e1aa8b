"""What Trainer scripts use, each as one small run that plain Trainer and every mesh can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from peft import get_peft_model
from transformers import EarlyStoppingCallback, Trainer, set_seed

from hf_meshadapt.sampling import EpochSampler
from tests.equality import Rows

from . import data

NUM_ROWS, NUM_EVAL_ROWS = 21, 13  # neither divides by any batch


def train(trainer) -> dict:
    trainer.train()
    return {"metrics": trainer.evaluate()}


def evaluate_around_training(trainer) -> dict:
    before = trainer.evaluate()
    trainer.train()
    return {"before": before, "metrics": trainer.evaluate(metric_key_prefix="test")}


def train_twice(trainer) -> dict:
    trainer.train()
    return train(trainer)


def predict(trainer) -> dict:
    output = trainer.predict(Rows(NUM_EVAL_ROWS, seed=2))
    return {"metrics": output.metrics, "predictions": output.predictions, "labels": output.label_ids}


def predict_unlabelled(trainer) -> dict:
    trainer.data_collator = data.without_labels
    output = trainer.predict(Rows(3, seed=2))  # one batch, all of it on replica 0
    assert output.label_ids is None and not any(name.endswith("_loss") for name in output.metrics)
    return {"predictions": output.predictions}


def count_tokens(trainer) -> dict:
    return {**train(trainer), "tokens": {"seen": trainer.state.num_input_tokens_seen}}


def keep_best(trainer) -> dict:
    result = train(trainer)
    best = {"metric": trainer.state.best_metric, "step": trainer.state.best_global_step}
    return {**result, "best": {**best, "steps": trainer.state.global_step}}


def train_with_noise(trainer) -> dict:
    """Noise differs between meshes: the run must finish, have learnt with noise, and be without afterwards."""
    trainer.train()
    once, again = (trainer.evaluate()["eval_loss"] for _ in range(2))
    embedding = trainer.model.get_input_embeddings()
    assert once == again and np.isfinite(once) and not embedding._forward_hooks
    return {}


def train_at_random(trainer) -> dict:
    trainer.train()
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    return {}


def search(trainer) -> dict:
    return {"best": trainer.hyperparameter_search(n_trials=1)}


def own_optimizer(model) -> dict:
    return {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)}


def overriding_loss(trainer_class: type) -> type:
    return type("Scripts", (trainer_class,), {"compute_loss": lambda self, *args, **kwargs: None})


def with_epoch_sampler(trainer_class: type) -> type:
    """Gives plain Trainer the mesh's order, which does not depend on what else draws random numbers."""
    if trainer_class is not Trainer:
        return trainer_class

    def sampler(self, dataset=None):
        return EpochSampler(Trainer._get_train_sampler(self, dataset), self.args.seed)

    return type("Trainer", (Trainer,), {"_get_train_sampler": sampler})


def with_peft_config(trainer_class: type) -> type:
    """Gives plain Trainer what a script would do before it makes one."""
    if trainer_class is not Trainer:
        return trainer_class

    def init(self, model, args, peft_config, **kwargs):
        set_seed(args.seed)
        Trainer.__init__(self, model=get_peft_model(model, peft_config), args=args, **kwargs)

    return type("Trainer", (Trainer,), {"__init__": init})


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        name: as the table writes it.
        group: the table's heading.
        args: of the arguments.
        trainer: of the trainer's constructor, where it differs.
        model: makes the model.
        fresh: makes further constructor arguments from the model.
        run: what is done; returns figures to compare (dicts of numbers, and arrays) beside losses and weights.
        derive: makes the trainer's class from Trainer or MeshAdaptTrainer.
        tolerance: of figures, relative, and of weights, absolute.
        random: nothing can be compared: the run must end well.
        resumes: a checkpoint from which a second trainer goes on, after `run` of the first, and the arguments in which
            it differs; figures are the second one's.
        meshes: on which it is run.
    """

    name: str
    group: str
    args: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    model: Callable = data.llama
    fresh: Callable = lambda model: {}
    run: Callable = train
    derive: Callable = lambda trainer_class: trainer_class
    tolerance: float = 5e-6
    random: bool = False
    resumes: tuple[str, dict] | None = None
    meshes: tuple[str, ...] = ("1x1", "2x1", "2x2")


def metrics(**trainer) -> dict:
    return {"compute_metrics": data.accuracy, "preprocess_logits_for_metrics": data.greedy, **trainer}


def sets(make: Callable) -> Callable:
    """Data sets of every rank's own: ranks forked from one process would share the epoch of a `datasets.IterableDataset`,
    which it keeps in shared memory."""
    return lambda model: {"train_dataset": make(NUM_ROWS), "eval_dataset": make(NUM_EVAL_ROWS, 2)}


FINAL = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
BEST = {**FINAL, "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "max_steps": 4}
MADE_BY_INIT = {"model_init": lambda: data.unseeded_llama(), "model": None}
BOTH = {"include_for_metrics": ["inputs", "loss"]}
EVALUATION, LOSS, DATA, MODEL, LOOP = "Evaluation", "Loss", "Data", "Model and optimizer", "Loop"

FEATURES = [
    Feature("plain `train()` and `evaluate()`", LOOP),
    Feature("`compute_metrics`, with `preprocess_logits_for_metrics`", EVALUATION, BOTH, metrics(),
            run=evaluate_around_training),
    Feature("`preprocess_logits_for_metrics` that returns nested tensors", EVALUATION, {},
            metrics(preprocess_logits_for_metrics=data.top_two)),
    Feature("`compute_metrics` on whole logits", EVALUATION, {}, {"compute_metrics": data.accuracy}),
    Feature("`batch_eval_metrics`", EVALUATION, {"batch_eval_metrics": True, **BOTH}, metrics(),
            fresh=lambda model: {"compute_metrics": data.RunningAccuracy()}),
    Feature("`eval_accumulation_steps`", EVALUATION, {"eval_accumulation_steps": 2}, metrics()),
    Feature("`eval_do_concat_batches=False`", EVALUATION, {"eval_do_concat_batches": False},
            metrics(compute_metrics=data.accuracy_of_batches)),
    Feature("`prediction_loss_only`", EVALUATION, {"prediction_loss_only": True}, metrics()),
    Feature("several evaluation sets (a dict)", EVALUATION, {},
            metrics(eval_dataset={"short": Rows(3, 4), "long": Rows(9, 5)})),
    Feature("`predict()`", EVALUATION, {}, metrics(), run=predict),
    Feature("`predict()` of whole logits, without labels", EVALUATION, run=predict_unlabelled),
    Feature("evaluation on an iterable data set", EVALUATION, {}, metrics(eval_dataset=data.Stream(13, 2))),
    Feature("`eval_on_start`", EVALUATION, {"eval_on_start": True, "eval_strategy": "steps"}),
    Feature("`label_smoothing_factor`", LOSS, {"label_smoothing_factor": 0.1}),
    Feature("`compute_loss_func` that divides by `num_items_in_batch`", LOSS, {},
            {"compute_loss_func": data.summed_loss}),
    Feature("`compute_loss_func` that takes a mean", LOSS, {}, {"compute_loss_func": data.mean_loss}),
    Feature("a Trainer subclass with its own `compute_loss`", LOSS, derive=overriding_loss),
    Feature("masked language model with a token-normalised loss (ModernBERT)", LOSS, model=data.modern_bert),
    Feature("masked language model with a mean loss (BERT)", LOSS, model=data.bert),
    Feature("epochs that end on uneven batches", DATA, {"max_steps": -1, "num_train_epochs": 2}),
    Feature("batch size 1", DATA, {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}),
    Feature("`dataloader_drop_last`", DATA, {"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 2}),
    Feature("`train_sampling_strategy=group_by_length`, in an order drawn from seed and epoch", DATA, {
        "train_sampling_strategy": "group_by_length", "max_steps": -1, "num_train_epochs": 2}, metrics(),
        derive=with_epoch_sampler),
    Feature("`train_sampling_strategy=sequential`", DATA, {"train_sampling_strategy": "sequential"}),
    Feature("iterable data sets without a length", DATA, {"max_steps": 7}, fresh=sets(data.Stream)),
    Feature("iterable data sets with a length", DATA, {"max_steps": -1, "num_train_epochs": 2},
            fresh=sets(data.SizedStream)),
    Feature("`datasets.IterableDataset`, sharded", DATA, {"max_steps": 7}, fresh=sets(data.streamed_table)),
    Feature("`datasets.Dataset` with unused columns, removed", DATA, fresh=sets(data.table)),
    Feature("a column kept by `remove_unused_columns=False`, as a tensor", DATA, {"remove_unused_columns": False},
            {"data_collator": data.with_difficulty}, fresh=sets(data.table)),
    Feature("a column kept by `remove_unused_columns=False`, as text", DATA, {"remove_unused_columns": False},
            {"data_collator": data.with_question}, fresh=sets(data.table)),
    Feature("a collator that draws random numbers", DATA, {}, {"data_collator": data.masked_at_random},
            run=train_at_random, random=True),
    Feature("`dataloader_num_workers`", DATA, {"dataloader_num_workers": 1}),
    Feature("a tokenizer without a pad token", DATA, fresh=lambda model: {
        "processing_class": data.tokenizer_without_padding()}),
    Feature("`accelerator_config` with `split_batches`", DATA, {"accelerator_config": {"split_batches": True}}),
    Feature("a resized vocabulary, tied embeddings", MODEL, model=data.resized_llama),
    # Sums of bfloat16 gradients depend on their order.
    Feature("a model in bfloat16", MODEL, {"gradient_accumulation_steps": 1}, model=data.bfloat16_llama, tolerance=1e-2),
    Feature("`bf16` autocast", MODEL, {"bf16": True}, metrics(), tolerance=1e-2),
    Feature("`gradient_checkpointing`", MODEL, {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    Feature("`neftune_noise_alpha`", MODEL, {"neftune_noise_alpha": 5.0}, run=train_with_noise, random=True),
    Feature("dropout", MODEL, model=lambda: data.llama(attention_dropout=0.1), run=train_at_random, random=True),
    Feature("`model_init`", MODEL, {}, MADE_BY_INIT),
    Feature("`optimizers=`", MODEL, fresh=own_optimizer),
    Feature("`optimizers=`, tied embeddings", MODEL, model=data.tied_llama, fresh=own_optimizer),
    Feature("`optimizer_cls_and_kwargs`, tied embeddings", MODEL, {}, {
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}, model=data.tied_llama),
    Feature("a `PeftModel` (LoRA), tied embeddings", MODEL, model=data.llama_with_lora),
    Feature("`peft_config=LoraConfig(...)`", MODEL, fresh=lambda model: {"peft_config": data.lora()},
            derive=with_peft_config),
    Feature("`gradient_checkpointing` of a `PeftModel`", MODEL, {"gradient_checkpointing": True},
            model=data.llama_with_lora),
    Feature("`load_best_model_at_end` with a `PeftModel`", MODEL, {**BEST, "save_total_limit": 1}, metrics(),
            model=data.llama_with_lora, run=keep_best),
    Feature("prompt tuning (`PromptTuningConfig`)", MODEL, fresh=lambda model: {"peft_config": data.prompt_tuning()},
            derive=with_peft_config),
    Feature("`config.output_hidden_states`", MODEL, model=lambda: data.llama(output_hidden_states=True)),
    Feature("`train()` twice", LOOP, run=train_twice),
    Feature("`torch_empty_cache_steps`", LOOP, {"torch_empty_cache_steps": 1}),
    Feature("`include_num_input_tokens_seen=all`", LOOP, {
        "include_num_input_tokens_seen": "all", "max_steps": -1, "num_train_epochs": 2},
        {"data_collator": data.collate_sixteen}, run=count_tokens),
    Feature("`include_num_input_tokens_seen=non_padding`", LOOP, {
        "include_num_input_tokens_seen": "non_padding", "max_steps": 7}, fresh=sets(data.Stream), run=count_tokens),
    Feature("`load_best_model_at_end`, `EarlyStoppingCallback`", LOOP, BEST, metrics(), run=keep_best,
            fresh=lambda model: {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]}),
    Feature("`save_strategy=best`, evaluation by epoch", LOOP, {
        **BEST, "eval_strategy": "epoch", "save_strategy": "best", "max_steps": -1, "num_train_epochs": 3}, metrics(),
        run=keep_best),
    Feature("`lr_scheduler_type=reduce_lr_on_plateau`", LOOP, {
        **FINAL, "save_strategy": "no", "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}, "max_steps": 4}),
    Feature("`hyperparameter_search()`", LOOP, {}, MADE_BY_INIT, run=search),
]  # fmt: skip
