"""The runs of a trial: one recipe after the other on the emulated mesh, from the same start over the same rows."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..arguments import MeshAdaptArguments
from ..extras import how_to_install
from ..trainer import MeshAdaptMixin, MeshAdaptTrainer
from .comparison import WIRE_DTYPE, Recipe, RunFigures

# Uncoded losses of the same model on the same rows differ by no more.
START_TOLERANCE = 1e-3


@dataclass(frozen=True)
class TrialOptions:
    """What is the same in all runs.

    Attributes:
        model: name or folder.
        stages, replicas: of the emulated mesh.
        dp_sync: as in `MeshAdaptArguments`.
        batch_size: rows per replica and step.
        max_length: tokens that rows are cut off at.
        num_steps: optimizer steps, at most.
        seconds_per_run: the run that decides on the number of steps ends after so long.
        eval_every_steps: between evaluations on the rows held out.
        learning_rate: constant, so that it does not depend on how far the runs get.
        seed: of data order and masks.
        bf16: passes under bfloat16 autocast; weights are in float32.
        calibration_tokens: as in `MeshAdaptArguments`.
        output: folder of what the trainer leaves behind.
    """

    model: str
    stages: int
    replicas: int
    dp_sync: str
    batch_size: int
    max_length: int
    num_steps: int
    seconds_per_run: float
    eval_every_steps: int
    learning_rate: float
    seed: int
    bf16: bool
    calibration_tokens: int | None
    output: Path


def run_all(
    recipes: list[Recipe], options: TrialOptions, rows: tuple[Dataset, Dataset], say: Callable[[str], None]
) -> tuple[list[RunFigures], int]:
    """Figures of every recipe in the given order, and the number of microbatches.

    Coded runs go first: what they compute beside the model makes them the slowest, so that the steps that one of them
    takes within its time are steps that the others can take.

    Args:
        rows: to train on, and held out.
        say: is told of progress.

    Raises:
        RuntimeError: the runs did not start from the same held-out loss.
    """
    figures: dict[Recipe, RunFigures] = {}
    num_steps, microbatches = options.num_steps, 1
    for recipe in sorted(recipes, key=lambda recipe: recipe.boundary_budget is None):
        say(f"{recipe.name}:")
        timed = None if figures else options.seconds_per_run
        figures[recipe], microbatches = run(recipe, options, rows, num_steps, timed, say)
        # A trainer refers to itself: without this, models and optimizer states of several runs would be there at once.
        clear_device_cache(garbage_collection=True)
        num_steps = figures[recipe].num_steps
    starts = [one.held_out[0][1] for one in figures.values()]
    if not max(starts) - min(starts) <= START_TOLERANCE:
        raise RuntimeError(
            f"the runs started at held-out losses of {min(starts)} to {max(starts)}: they do not compare"
        )
    return [figures[recipe] for recipe in recipes], microbatches


def run(recipe, options: TrialOptions, rows, num_steps: int, seconds: float | None, say) -> tuple[RunFigures, int]:
    """One recipe's figures, and its number of microbatches.

    Args:
        seconds: after which it ends, None: only after `num_steps`.
    """
    trainer = make_trainer(recipe, options, rows, num_steps)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(HeldOut(say))
    if seconds is not None:
        trainer.add_callback(StopAfter(seconds))
    held_out = {0: trainer.evaluate()["eval_loss"]}
    trainer.train()
    held_out |= {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    if trainer.state.global_step not in held_out:
        held_out[trainer.state.global_step] = trainer.evaluate()["eval_loss"]
    return make_figures(recipe, trainer, held_out), trainer.args.pipeline_microbatches


def make_figures(recipe: Recipe, trainer: MeshAdaptMixin, held_out: dict[int, float]) -> RunFigures:
    """
    Args:
        held_out: losses by step.
    """
    figures, steps = trainer.engine.ledger.run, trainer.state.global_step
    rows, accumulation = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    # Of the mean length, for rows are padded to the longest of each batch.
    length = round(figures.tokens / (steps * rows * accumulation * trainer.engine.mesh.replicas))
    plan = trainer.engine.plan(rows, length, accumulation)
    bytes_per_token = {axis: plan.bytes_per_token(axis) for axis in ("pipeline", "tied", "data_parallel", "control")}
    link_bytes = max(plan.uplink_bytes(rank) for rank in range(trainer.engine.mesh.num_ranks))
    cost = trainer.engine.calibration_cost
    if cost:  # it sends activations and gradients whole
        share = cost["tokens"] / (plan.tokens * steps)
        dense = plan.dense()
        bytes_per_token["calibration"] = share * dense.bytes_per_token("pipeline")
        link_bytes += share * max(
            dense.uplink_bytes(rank, "pipeline") for rank in range(trainer.engine.mesh.num_ranks)
        )
    return RunFigures(
        recipe=recipe,
        held_out=tuple(held_out.items()),
        training=tuple((log["step"], log["loss"]) for log in trainer.state.log_history if "loss" in log),
        step_seconds=figures.seconds / steps,
        bytes_per_token=bytes_per_token,
        link_bytes=link_bytes,
    )


def make_trainer(recipe: Recipe, options: TrialOptions, rows, num_steps: int) -> MeshAdaptMixin:
    """By TRL's data handling where it is installed, else for plain text.

    Raises:
        ImportError: chats, or prompts with completions, without trl.
    """
    on_device = torch.accelerator.is_available()
    arguments = {
        **{name: value for name, value in vars(recipe).items() if value is not None},
        "output_dir": str(options.output),
        "anchor": False,  # boundaries alone: the masks of preset=paper too
        "pipeline_stages": options.stages,
        "dp_sync": options.dp_sync,
        "data_parallel_replicas": options.replicas,
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "max_steps": num_steps,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "seed": options.seed,
        "bf16": options.bf16,
        "model_dtype": "float32",
        "wire_dtype": WIRE_DTYPE,
        "eval_strategy": "steps",
        "eval_steps": options.eval_every_steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not on_device,  # else bfloat16 is refused there
        "dataloader_pin_memory": on_device,
    }
    if recipe.boundary_budget is not None:
        arguments["calibration_tokens"] = options.calibration_tokens
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if importlib.util.find_spec("trl"):
        return _sft_trainer(options, arguments, rows, tokenizer)
    return _text_trainer(options, arguments, rows, tokenizer)


def _sft_trainer(options: TrialOptions, arguments: dict, rows, tokenizer) -> MeshAdaptMixin:
    from ..sft import MeshAdaptSFTConfig, MeshAdaptSFTTrainer

    args = MeshAdaptSFTConfig(max_length=options.max_length, gradient_checkpointing=False, **arguments)
    args.emulation_is_meant = True
    return MeshAdaptSFTTrainer(
        options.model, args, train_dataset=rows[0], eval_dataset=rows[1], processing_class=tokenizer
    )


def _text_trainer(options: TrialOptions, arguments: dict, rows, tokenizer) -> MeshAdaptTrainer:
    if "text" not in rows[0].column_names:
        raise ImportError(
            f"rows of {' and '.join(rows[0].column_names)} need trl, plain `text` does not: {how_to_install('trl')}"
        )

    def tokens_of(batch: dict) -> dict:
        return tokenizer(batch["text"], truncation=True, max_length=options.max_length)

    args = MeshAdaptArguments(**arguments)
    args.emulation_is_meant = True
    train, held_out = (part.map(tokens_of, batched=True, remove_columns=part.column_names) for part in rows)
    return MeshAdaptTrainer(
        options.model,
        args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


class StopAfter(TrainerCallback):
    """Ends training with the first step that ends later than `seconds` after this was made.

    Args:
        clock: seconds that only grow; a test passes its own.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.deadline = clock, clock() + seconds

    def on_step_end(self, args, state, control, **kwargs):
        if self.clock() > self.deadline:
            control.should_training_stop = True


class HeldOut(TrainerCallback):
    """Says the held-out loss whenever there is one.

    Raises:
        RuntimeError: it is not finite.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        loss = metrics["eval_loss"]
        if not math.isfinite(loss):
            raise RuntimeError(f"the held-out loss is {loss} at step {state.global_step}: lower --learning-rate")
        self.say(f"  step {state.global_step}: held-out loss {loss:.4f}")
