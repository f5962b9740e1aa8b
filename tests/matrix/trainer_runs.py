"""What scripts do with a Trainer that transformers tests on its own: each returns figures that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    DefaultFlowCallback,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_callback import ExportableState

from tests.equality import Rows

from . import data

# Of a log: what does not depend on the clock and is not the mesh's own.
LOGGED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "eval_loss",
    "eval_accuracy",
    "train_loss",
    "total_flos",
)
EVENTS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end",
    "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_prediction_step", "on_evaluate", "on_predict",
    "on_log", "on_save",
)  # fmt: skip


def numbered(names: Iterable[str]) -> dict[str, int]:
    """A sequence of names as figures."""
    return {f"{index} {name}": index for index, name in enumerate(names)}


def history(trainer) -> dict:
    """Everything that was logged, and when."""
    logs = {
        f"{i} {name}": log[name] for i, log in enumerate(trainer.state.log_history) for name in LOGGED if name in log
    }
    return {"history": logs}


def train(trainer) -> dict:
    """With what `train()` returns."""
    output = trainer.train()
    if engine := getattr(trainer, "engine", None):
        assert engine.waiter.step in (None, output.global_step)  # the mesh heard of every step
    kept = {name: output.metrics[name] for name in ("total_flos", "train_loss")}
    return {**history(trainer), "output": {**kept, "steps": output.global_step, "loss": output.training_loss}}


def train_and_list(trainer) -> dict:
    """With the checkpoints that are left, and what the last one says of the run."""
    result = train(trainer)
    trainer.accelerator.wait_for_everyone()  # one rank clears old checkpoints away
    folders = sorted(Path(trainer.args.output_dir).glob("checkpoint-*"))
    result["checkpoints"] = numbered(folder.name for folder in folders)
    if folders:
        state = TrainerState.load_from_json(str(folders[-1] / "trainer_state.json"))
        names = ("global_step", "max_steps", "epoch", "num_train_epochs", "train_batch_size", "save_steps")
        kept = {name: getattr(state, name) for name in (*names, "total_flos", "best_global_step", "best_metric")}
        result["state"] = {name: value for name, value in kept.items() if value is not None}
        result["best"] = numbered([Path(state.best_model_checkpoint or "none").name])
    return result


def save_and_reload(trainer) -> dict:
    """`save_model`, read back by transformers alone."""
    trainer.train()
    trainer.save_model()
    folder = trainer.args.output_dir
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    state = trainer.model.state_dict()
    engine = getattr(trainer, "engine", None)
    for name in engine.parts.saved_names() if engine else state:
        assert torch.equal(model.state_dict()[name], state[name]), name
    arguments = "training_args.json" if engine else "training_args.bin"
    assert Path(folder, arguments).exists() and len(AutoTokenizer.from_pretrained(folder)) == data.VOCAB
    return {"sums": {name: float(tensor.double().norm()) for name, tensor in model.state_dict().items()}}


def count(trainer) -> dict:
    """Sizes that Trainer tells."""
    loaders = {"train": trainer.get_train_dataloader(), "eval": trainer.get_eval_dataloader()}
    loaders["other"], loaders["test"] = trainer.get_eval_dataloader(Rows(9)), trainer.get_test_dataloader(Rows(5))
    sizes = {f"{name} batches": len(loader) for name, loader in loaders.items()}
    sizes |= {f"{name} examples": trainer.num_examples(loader) for name, loader in loaders.items()}
    sizes |= {f"{name} rows at once": loader.total_batch_size for name, loader in loaders.items()}
    return {"sizes": sizes, **train(trainer)}


def change_callbacks(trainer) -> dict:
    """Added by class and by instance, popped and removed."""

    def present() -> list[str]:
        return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]

    recorder, names = Recorder(), present()
    trainer.add_callback(recorder)
    trainer.add_callback(Stop)
    names += present()
    assert trainer.pop_callback(Recorder) is recorder and trainer.pop_callback(Recorder) is None
    flow = trainer.pop_callback(DefaultFlowCallback)
    trainer.remove_callback(Stop)
    trainer.add_callback(flow)
    return {"callbacks": numbered([*names, *present()]), **train(trainer)}


def events(trainer) -> dict:
    trainer.train()
    trainer.predict(Rows(3, seed=2))
    (recorder,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Recorder))
    return {"events": numbered(recorder.events), **history(trainer)}


def evaluate_others(trainer) -> dict:
    """Sets given at the call: one, several, and by name."""
    others = {"a": Rows(3, seed=4), "b": Rows(9, seed=5)}
    return {
        "one": trainer.evaluate(Rows(6, seed=3), metric_key_prefix="other"),
        "several": trainer.evaluate(others, metric_key_prefix="more"),
        "named": trainer.evaluate("short"),
    }


def predict_whole(trainer) -> dict:
    output = trainer.predict(Rows(3, seed=2), metric_key_prefix="mine")
    return {"metrics": output.metrics, "predictions": output.predictions, "labels": output.label_ids}


def raises(function: Callable) -> Callable:
    """What is raised, on all ranks alike; nothing may hang."""

    def run(trainer) -> dict:
        try:
            function(trainer)
        except Exception as error:
            return {"raised": numbered([type(error).__name__])}
        raise AssertionError("nothing was raised")

    return run


def training(trainer):
    return trainer.train()


class Recorder(TrainerCallback):
    """Every event, in order."""

    def __init__(self):
        self.events: list[str] = []

    def __getattribute__(self, name):
        if name in EVENTS:
            return lambda *args, **kwargs: self.events.append(name)
        return super().__getattribute__(name)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


class Flags(TrainerCallback):
    """Evaluates, logs, saves, and ends the epoch and the run when it likes."""

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        control.should_evaluate, control.should_log, control.should_save = step == 1, step == 2, step == 2
        control.should_epoch_stop, control.should_training_stop = step == 2, step == 4


class Counter(TrainerCallback, ExportableState):
    """Has a state that checkpoints keep."""

    def __init__(self, start: int = 0):
        self.start, self.num_steps = start, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1]["eval_accuracy"] = 100 * self.start + self.num_steps

    def state(self) -> dict:
        return {"args": {"start": self.start}, "attributes": {"num_steps": self.num_steps}}


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from Rows(5).rows


class Once(IterableDataset):
    """Gives its rows once, and nothing in a second epoch."""

    def __init__(self):
        self.left = list(Rows(21).rows)

    def __iter__(self):
        while self.left:
            yield self.left.pop(0)


class Chained:
    """Loaders one after the other, without a data set of its own."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __len__(self):
        return sum(map(len, self.loaders))

    def __iter__(self):
        for loader in self.loaders:
            yield from loader


def chaining_loaders(trainer_class: type) -> type:
    class Scripts(trainer_class):
        def get_train_dataloader(self):
            return Chained(super().get_train_dataloader(), super().get_train_dataloader())

        def get_eval_dataloader(self, eval_dataset=None):
            return Chained(super().get_eval_dataloader(eval_dataset), super().get_eval_dataloader(eval_dataset))

    return Scripts


def making_optimizers(trainer_class: type) -> type:
    class Scripts(trainer_class):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 1, gamma=0.5)
            return self.lr_scheduler

    return Scripts


def logging_more(trainer_class: type) -> type:
    class Scripts(trainer_class):
        def log(self, logs, *args, **kwargs):
            super().log({**logs, "eval_accuracy": 2.0 * self.state.global_step}, *args, **kwargs)

    return Scripts


def encoded(rows) -> BatchEncoding:
    return BatchEncoding(data.ragged(rows))
