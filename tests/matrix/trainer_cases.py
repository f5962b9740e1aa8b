"""What transformers tests of its own Trainer and a user can see, as further rows of the table: one process, two stages."""

from __future__ import annotations

from functools import partial

import datasets
import torch
from transformers import EarlyStoppingCallback
from transformers.trainer_utils import SchedulerType

from tests.equality import Rows

from . import data
from . import trainer_runs as runs
from .features import BEST, FINAL, Feature, metrics, sets, with_epoch_sampler

Case = partial(Feature, run=runs.train, meshes=("1x1", "2x1"))

LENGTH, CALLBACKS, LOADING = "Length of a run, logs", "Callbacks", "Data loaders"
STEPPING, EVALUATING = "Optimizers and schedules", "Evaluation and prediction, more"
SAVING, RESUMING, ERRORS = "Checkpoints", "Resuming", "Mistakes that Trainer reports"
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 2}
SAVE = {"save_strategy": "steps", "save_steps": 1}
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3}


def callbacks(*make):
    return lambda model: {"callbacks": [one() for one in make]}


def frozen(*names: str):
    """A model whose parameters of these names, or parts of names, are not trained."""

    def make():
        model = data.llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))
        return model

    return make


def stepping_down(model) -> dict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))}


def with_lengths(num_rows: int, seed: int = 1) -> datasets.Dataset:
    rows = [{**row, "tokens": len(row["input_ids"])} for row in data.plain_rows(num_rows, seed)]
    return datasets.Dataset.from_list(rows).with_format("torch")


SCHEDULES = {
    "linear": {"warmup_steps": 0.5},
    "cosine": {"warmup_steps": 1},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {"lr_scheduler_kwargs": {"lr_end": 1e-3, "power": 2}},
    "constant_with_warmup": {"warmup_steps": 2},
    "inverse_sqrt": {"warmup_steps": 1},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
    "cosine_warmup_with_min_lr": {"warmup_steps": 1, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "warmup_stable_decay": {"warmup_steps": 1, "lr_scheduler_kwargs": {"num_decay_steps": 1}},
    "greedy": {**BY_STEPS, "eval_steps": 1, "metric_for_best_model": "loss"},
}
OPTIMIZERS = {
    "adamw_torch": {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9},
    "adamw_torch_fused": {},
    "adafactor": {},
    "adagrad": {"optim_args": "lr_decay=0.1"},
    "rmsprop": {"optim_args": "momentum=0.5"},
}

CASES = [
    Case("`num_train_epochs=1.5`", LENGTH, {"max_steps": -1, "num_train_epochs": 1.5}),
    Case("`num_train_epochs=0`", LENGTH, {"max_steps": -1, "num_train_epochs": 0}),
    Case("`max_steps` past the second epoch", LENGTH, {"max_steps": 5, "gradient_accumulation_steps": 4}),
    Case("more accumulation steps than an epoch has batches", LENGTH, {**EPOCHS, "gradient_accumulation_steps": 10}),
    Case("`logging_first_step`, `logging_steps=2`", LENGTH, {"logging_first_step": True, "logging_steps": 2}),
    Case("`logging_steps` and `eval_steps` as shares, `eval_delay`", LENGTH, {
        **BY_STEPS, "max_steps": 6, "logging_steps": 0.5, "eval_steps": 0.34, "eval_delay": 3}),
    Case("`logging_strategy=epoch`, `eval_strategy=epoch`", LENGTH, {
        **EPOCHS, "logging_strategy": "epoch", "eval_strategy": "epoch"}),
    Case("`logging_strategy=no`", LENGTH, {"logging_strategy": "no"}),
    Case("a Trainer subclass with its own `log`", LENGTH, derive=runs.logging_more),
    Case("`max_grad_norm=0`", LENGTH, {"max_grad_norm": 0.0}),
    Case("`max_grad_norm` that clips", LENGTH, {"max_grad_norm": 0.01}),
    Case("`skip_memory_metrics=False`", LENGTH, {"skip_memory_metrics": False, **BY_STEPS}),
    Case("`debug=underflow_overflow`", LENGTH, {"debug": "underflow_overflow"}),
    Case("`activation_checkpointing`, every second layer", LENGTH, {
        "activation_checkpointing": True, "activation_checkpointing_kwargs": {
            "every_n_layers": 2, "use_reentrant": False}}),
    Case("order of callbacks' events", CALLBACKS, {**EPOCHS, **SAVE, **BY_STEPS, "logging_steps": 3}, run=runs.events,
         fresh=callbacks(runs.Recorder)),
    Case("`add_callback`, `pop_callback`, `remove_callback`", CALLBACKS, run=runs.change_callbacks),
    Case("a callback that stops the run", CALLBACKS, fresh=callbacks(runs.Stop)),
    Case("a callback that evaluates, logs, saves, ends the epoch and the run", CALLBACKS, {
        **EPOCHS, "num_train_epochs": 3, "logging_strategy": "no"}, fresh=callbacks(runs.Flags),
        run=runs.train_and_list),
    Case("sizes of data loaders, `num_examples()`", LOADING, run=runs.count),
    Case("the same, `dataloader_drop_last`", LOADING, {"dataloader_drop_last": True}, run=runs.count),
    Case("`data_seed`", LOADING, {**EPOCHS, "data_seed": 3}),
    Case("`use_seedable_sampler=False`, in an order drawn from seed and epoch", LOADING, {
        **EPOCHS, "accelerator_config": {"use_seedable_sampler": False}}, derive=with_epoch_sampler),
    Case("`sync_each_batch`", LOADING, {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}),
    Case("`dispatch_batches`", LOADING, {"accelerator_config": {"dispatch_batches": True}}, fresh=sets(data.Stream)),
    Case("`even_batches=False`", LOADING, {"accelerator_config": {"even_batches": False}}),
    Case("`dataloader_persistent_workers`, `dataloader_prefetch_factor`", LOADING, {
        **EPOCHS, "dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}),
    Case("`length_column_name`, in an order drawn from seed and epoch", LOADING, {
        **EPOCHS, "train_sampling_strategy": "group_by_length", "length_column_name": "tokens"},
        fresh=sets(with_lengths), derive=with_epoch_sampler),
    Case("`train_sampling_strategy=batch_rebalance`", LOADING, {"train_sampling_strategy": "batch_rebalance"}),
    Case("a Trainer subclass with data loaders of its own, without a data set", LOADING, EPOCHS,
         derive=runs.chaining_loaders, meshes=("1x1", "2x1", "2x2")),
    Case("a collator that returns `BatchEncoding`", LOADING, {}, {"data_collator": runs.encoded}),
    Case("an endless stream", LOADING, fresh=lambda model: {"train_dataset": runs.Endless()}),
    Case("a stream that ends for good before `max_steps`", LOADING, {
        "max_steps": 9, "accelerator_config": {"dispatch_batches": False}},
         fresh=lambda model: {"train_dataset": runs.Once()}),
    *(Case(f"`lr_scheduler_type={name}`", STEPPING, {"lr_scheduler_type": name, "max_steps": 4, **args})
      for name, args in SCHEDULES.items()),
    *(Case(f"`optim={name}`", STEPPING, {**ADAM, "optim": name, **args}, tolerance=2e-5)
      for name, args in OPTIMIZERS.items()),
    Case("`optim=lomo`", STEPPING, {"optim": "lomo"}),
    Case("an optimizer and a scheduler in `optimizers=`", STEPPING, fresh=stepping_down),
    Case("a Trainer subclass with its own `create_optimizer` and `create_scheduler`", STEPPING,
         derive=runs.making_optimizers),
    Case("frozen embeddings", STEPPING, model=frozen("embed_tokens")),
    Case("a frozen layer", STEPPING, model=frozen("layers.1.")),
    Case("all frozen but the output head", STEPPING, model=frozen("embed_tokens", "layers", "norm")),
    Case("all frozen but the embeddings", STEPPING, model=frozen("layers", "norm", "lm_head")),
    Case("`average_tokens_across_devices=False`", STEPPING, {"average_tokens_across_devices": False}),
    Case("`evaluate()` on other sets: one, several, and by name", EVALUATING, {}, metrics(
        eval_dataset={"short": Rows(3, 4), "long": Rows(9, 5)}), run=runs.evaluate_others),
    Case("`predict()` of whole logits, with a prefix", EVALUATING, run=runs.predict_whole),
    Case("`label_names`", EVALUATING, {"label_names": ["labels", "others"]}),
    Case("`eval_on_start` and the schedule `reduce_lr_on_plateau`", EVALUATING, {
        **BY_STEPS, "eval_steps": 1, "eval_on_start": True, "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0}}),
    Case("`EarlyStoppingCallback` with a threshold", EVALUATING, {**BEST, "metric_for_best_model": "loss"},
         run=runs.train_and_list, fresh=callbacks(lambda: EarlyStoppingCallback(1, early_stopping_threshold=10.0))),
    Case("`save_steps=2`", SAVING, {**SAVE, "save_steps": 2, "max_steps": 5}, run=runs.train_and_list),
    Case("`save_steps` as a share, `save_total_limit=2`", SAVING, {
        **SAVE, "save_steps": 0.2, "save_total_limit": 2, "max_steps": 5}, run=runs.train_and_list),
    Case("`save_strategy=epoch`, `save_only_model`", SAVING, {
        **EPOCHS, "save_strategy": "epoch", "save_only_model": True}, run=runs.train_and_list),
    Case("`load_best_model_at_end` by loss, `save_total_limit=1`", SAVING, {
        **FINAL, "save_steps": 1, "learning_rate": 5.0, "load_best_model_at_end": True, "save_total_limit": 1,
        "max_steps": 4}, run=runs.train_and_list, tolerance=1e-3),
    Case("`save_model()` with a tokenizer; arguments as training_args.json, which needs no unpickling", SAVING, {},
         {"processing_class": data.tokenizer_without_padding()}, run=runs.save_and_reload),
    Case("within an epoch and an accumulation", RESUMING, {**EPOCHS, **SAVE}, resumes=("checkpoint-2", {})),
    Case("at the end of an epoch", RESUMING, {**EPOCHS, **SAVE}, resumes=("checkpoint-3", {})),
    Case("with Adam and a schedule", RESUMING, {**ADAM, **SAVE, "lr_scheduler_type": "linear"}, tolerance=2e-5,
         resumes=("checkpoint-2", {})),
    Case("for more steps", RESUMING, SAVE, resumes=("checkpoint-2", {"max_steps": 5})),
    Case("with another batch size", RESUMING, SAVE, resumes=("checkpoint-2", {"per_device_train_batch_size": 2})),
    Case("with more accumulation", RESUMING, SAVE, resumes=("checkpoint-2", {"gradient_accumulation_steps": 3})),
    Case("with `ignore_data_skip`", RESUMING, {**SAVE, "max_steps": 5},
         resumes=("checkpoint-2", {"ignore_data_skip": True})),
    Case("with `include_num_input_tokens_seen`", RESUMING, {**SAVE, "include_num_input_tokens_seen": "all"},
         {"data_collator": data.collate_sixteen}, resumes=("checkpoint-2", {})),
    Case("with frozen layers", RESUMING, SAVE, model=frozen("layers.1."), resumes=("checkpoint-2", {})),
    Case("of an iterable data set", RESUMING, {**SAVE, "max_steps": 5}, fresh=sets(data.Stream),
         resumes=("checkpoint-2", {})),
    Case("with a callback's state, restored", RESUMING, {**SAVE, "restore_callback_states_from_checkpoint": True},
         fresh=callbacks(lambda: runs.Counter(3)), resumes=("checkpoint-2", {})),
    Case("with a callback's state, not restored", RESUMING, SAVE, fresh=callbacks(lambda: runs.Counter(3)),
         resumes=("checkpoint-2", {})),
    Case("of what `save_only_model` left", RESUMING, {**SAVE, "save_only_model": True}, resumes=("checkpoint-2", {})),
    Case("`evaluate()` without an evaluation set", ERRORS, {}, {"eval_dataset": None},
         run=runs.raises(lambda trainer: trainer.evaluate())),
    Case("`eval_strategy` without an evaluation set", ERRORS, BY_STEPS, {"eval_dataset": None}),
    Case("`metric_for_best_model` that no metric is", ERRORS, {**BEST, "metric_for_best_model": "beauty"},
         run=runs.raises(runs.training)),
    Case("a stream without `max_steps`", ERRORS, EPOCHS, fresh=sets(data.Stream)),
    Case("`train()` without a training set", ERRORS, {}, {"train_dataset": None}, run=runs.raises(runs.training)),
    Case("resuming from a folder that is not there", ERRORS, run=runs.raises(
        lambda trainer: trainer.train(resume_from_checkpoint="/no/checkpoint-1"))),
]  # fmt: skip

assert set(SCHEDULES) | {"constant", "reduce_lr_on_plateau"} >= {kind.value for kind in SchedulerType}
