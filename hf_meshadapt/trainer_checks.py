"""What `MeshAdaptTrainer` refuses at construction, beside its arguments' own checks, and the loss that it computes.

What would be ignored or wrong over stages is refused by name.
"""

from __future__ import annotations

import functools
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import has_length

from .anchoring.data import can_read, has_indices
from .arguments import MeshAdaptArguments
from .batches import source_of
from .engine import MeshEngine
from .pipeline.refusals import refuse_partial_outputs
from .pipeline.stage import LossFunction
from .sync_cost import tied_warning

logger = logging.getLogger(__name__)

# Methods that a mesh never calls, and what to use instead.
BYPASSED_METHODS = {
    "compute_loss": "Pass compute_loss_func",
    "prediction_step": "Pass preprocess_logits_for_metrics and compute_metrics",
    "compute_loss_context_manager": "Pass compute_loss_func",
    "autocast_smart_context_manager": "Set bf16",
    "_save": "Override save_model, or write further files in a callback's on_save",
    "_save_optimizer_and_scheduler": "Write further files in a callback's on_save",
    "_save_rng_state": "Write further files in a callback's on_save",
}
# Trainers of TRL that cannot stand over stages, by the name of their class.
UNSUPPORTED_TRAINERS = {
    name: "it generates answers in every step, and no stage has a whole model to generate with; over stages each token "
    "would cross every boundary. Make preference pairs beforehand and use MeshAdaptDPOTrainer"
    for name in ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer")
}
# Attributes of models whose weights a mesh cannot save as their library does, and what to do.
UNSAVABLE = {
    "hf_quantizer": "quantized weights cannot be saved by stages. Load the model in bfloat16 instead",
}

# Any of them says that a data set has been tokenised; TRL's pairs have prompt_ids.
TOKEN_COLUMNS = {"input_ids", "inputs_embeds", "prompt_ids"}


def refuse_unsupported(trainer_class: type, trainer_arguments: dict, args: MeshAdaptArguments) -> None:
    """Raises NotImplementedError for what needs no model to be known."""
    for base in trainer_class.__mro__:
        if base.__name__ in UNSUPPORTED_TRAINERS:
            raise NotImplementedError(f"{base.__name__} over a mesh: {UNSUPPORTED_TRAINERS[base.__name__]}")
    for name, remedy in BYPASSED_METHODS.items():
        if getattr(trainer_class, name, None) is not getattr(trainer_class.stands_in_for, name, None):
            raise NotImplementedError(
                f"{trainer_class.__name__}.{name}: a mesh would not call it: the model runs in stages. {remedy}"
            )
    replicas = args.data_parallel_replicas
    given = {name for name, value in trainer_arguments.items() if value is not None}
    if replicas > 1 and "compute_metrics" in given and "preprocess_logits_for_metrics" not in given:
        raise NotImplementedError(
            f"compute_metrics without preprocess_logits_for_metrics: the logits of {replicas} replicas, one number per "
            "token and vocabulary entry, would travel to one of them. Reduce them first, for example "
            "preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)"
        )


def tell_of_emulation(args: MeshAdaptArguments) -> None:
    """Warns, once, where one process runs what the arguments describe as a mesh: nobody may have meant it.

    `args.emulation_is_meant = True` keeps it silent.
    """
    num_ranks = args.pipeline_stages * args.data_parallel_replicas
    if args.emulated and num_ranks > 1 and not args.runs_anchor and not getattr(args, "emulation_is_meant", False):
        _warn_of_emulation(args.pipeline_stages, args.data_parallel_replicas, bool(args.use_cpu))


@functools.cache
def _warn_of_emulation(stages: int, replicas: int, on_cpu: bool) -> None:
    is_script = sys.argv[0].endswith(".py") and "ipykernel" not in sys.modules  # in a notebook it is the kernel's own
    script = shlex.join(sys.argv) if is_script else "train.py"
    cpu = "--cpu " if on_cpu else ""
    logger.warning(
        "pipeline_stages=%d, data_parallel_replicas=%d in one process without a launcher: the mesh is emulated, all of it "
        "on this device and nothing sent. For a real one: meshadapt launch --num-processes %d %s%s",
        *(stages, replicas, stages * replicas, cpu, script),
    )


def refuse_model(trainer) -> None:
    """Raises NotImplementedError for what only the model shows."""
    for name, reason in UNSAVABLE.items():
        if getattr(trainer.model, name, None) is not None:
            raise NotImplementedError(f"{type(trainer.model).__name__} with {name}: {reason}")
    refuse_partial_outputs(trainer.model.config)  # once more: TRL sets some when the model has been cut


def refuse_raw_data(trainer) -> None:
    """Raises ValueError for a data set of text or chats that would reach a collator of tokens.

    A collator of the person's own may tokenise. Streams of unknown columns are not looked at: they would be read.
    """
    if trainer.data_collator.__module__.split(".")[0] not in ("transformers", "trl"):
        return
    for name in ("train_dataset", "eval_dataset"):
        given = getattr(trainer, name)
        for dataset in given.values() if isinstance(given, dict) else [given]:
            columns = _columns(dataset)
            if columns and not TOKEN_COLUMNS & set(columns):
                raise ValueError(
                    f"{name} has no input_ids (only {', '.join(columns)}): the data collator takes tokens. Tokenise it, "
                    "for example with dataset.map(lambda row: tokenizer(row['text'])), or use MeshAdaptSFTTrainer, which "
                    "takes text, messages, and prompt with completion"
                )


def _columns(dataset) -> list[str] | None:
    """Names of the columns of a data set's rows, None where they cannot be known without reading a stream."""
    if not (hasattr(dataset, "__getitem__") and has_length(dataset)):
        return getattr(dataset, "column_names", None)
    if not len(dataset):
        return None
    # The row itself: `with_transform` tokenises as it is read. The run's own draws of random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        row = dataset[0]
    return list(row) if isinstance(row, Mapping) else None


def tell_of_tied(trainer) -> None:
    """At a run's first log, on a mesh: a tied embedding that sends more than all boundaries do. Collective."""
    engine, state = trainer.engine, trainer.state
    has_logged = any("loss" in log for log in state.log_history)
    if engine.mesh.emulated or not engine.parts.untied or has_logged:
        return
    plan = engine.plan(trainer._rows(training=True), trainer._batch_length, trainer.args.gradient_accumulation_steps)
    if (warning := tied_warning(plan)) and trainer.is_world_process_zero():
        logger.warning(warning)


def refuse_optimizer(trainer) -> None:
    """Raises NotImplementedError for an optimizer that was made for the whole model and lacks what a cut added; on all
    ranks."""
    if trainer.optimizer is None:
        return
    engine = trainer.engine
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    lacks = not all(id(copy) in held for copy in engine.parts.tied_copies())
    if any(engine.share({engine.topology.stage: lacks}).values()):
        raise NotImplementedError(
            "optimizers: the embedding and the output head were one matrix and are two over stages, of which this "
            "optimizer lacks one. Pass optimizer_cls_and_kwargs, or set optim"
        )


def refuse_foreign_loader(loader, engine: MeshEngine, trains: bool) -> None:
    """Raises NotImplementedError for a loader that does not tell of its data set, or of one that can be read once only,
    where the mesh must know it, or read it apart."""
    dealt = engine.mesh.replicas > 1 and not engine.mesh.emulated
    calibrates = trains and engine.boundary.needs_calibration
    if (dealt or calibrates) and not hasattr(loader, "total_batch_size"):
        raise NotImplementedError(
            f"a data loader of your own ({type(loader).__name__}): the mesh must know its data set, to deal rows out to "
            "replicas and to calibrate boundaries. Return what Trainer's own get_train_dataloader or get_eval_dataloader "
            "returns, for a data set that has all rows"
        )
    if calibrates:
        _refuse_single_pass(source_of(loader), engine)


def _refuse_single_pass(dataset, engine: MeshEngine) -> None:
    """The calibration reads the first rows, and training from the first on: what is read once only would lose them."""
    name, remedy = type(dataset).__name__, "let __iter__ begin anew, such as by opening the file in it"
    if not can_read(dataset):
        raise NotImplementedError(
            f"train_dataset is a {name}, which can be read once only: the calibration of the boundaries would take its "
            f"first rows from the training. Use a data set with a length and indices, {remedy}, or set preset='dense'"
        )
    held = [key for key, value in getattr(dataset, "__dict__", {}).items() if isinstance(value, Iterator)]
    if held and not has_indices(dataset) and engine.topology.rank == 0:
        logger.warning(
            "train_dataset (%s) keeps an iterator in .%s: if it goes on where that stands, the rows that the calibration "
            "of the boundaries reads are missing from the training. Then %s",
            *(name, held[0], remedy),
        )


def loss_function(trainer) -> LossFunction | None:
    """What computes the loss in the model's place: `compute_loss_func`, label smoothing, or nothing."""
    custom, smoother, upcasts = trainer.compute_loss_func, trainer.label_smoother, trainer.args.bf16
    if custom is None and smoother is None:
        return None
    name = getattr(trainer.model, "get_base_model", lambda: trainer.model)()._get_name()
    shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def loss(output, labels: torch.Tensor, num_items: torch.Tensor) -> torch.Tensor:
        if upcasts:  # as accelerate does with what a model returns
            output.logits = output.logits.float()
        if custom is not None:
            return custom(output, labels, num_items_in_batch=num_items)
        return smoother(output, labels, shift_labels=shifts, num_items_in_batch=num_items)

    return loss
