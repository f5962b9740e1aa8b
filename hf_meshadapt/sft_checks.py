"""What `MeshAdaptSFTConfig` and `MeshAdaptSFTTrainer` refuse of TRL, beside what every mesh trainer refuses."""

from __future__ import annotations

import inspect
import os

from .pipeline.adapters import is_adapted
from .pipeline.microbatch import largest_divisor
from .trl_data import given_datasets, refuse_empty

# Options of SFTConfig that a mesh would ignore or get wrong, and what to do instead.
UNSUPPORTED_OPTIONS = {
    "padding_free": "it makes one row of a batch, and microbatches are cut between rows. Unset it; packing=True needs it "
    "no more",
    "activation_offloading": "stages run outside of TRL's training step. Use gradient_checkpointing=True",
    "model_init_kwargs": "every rank loads its own stage. Set model_dtype, or pass a model that is loaded",
    "router_aux_loss_coef": "a stage has the routers of its own layers only. Set it to 0.0",
}
# Arguments of SFTTrainer that a mesh would ignore or get wrong.
UNSUPPORTED_ARGUMENTS = {
    "quantization_config": "quantized weights cannot be saved by stages. Leave it out and set model_dtype='bfloat16'",
}


def refuse_options(args) -> None:
    """Raises NotImplementedError for options of `MeshAdaptSFTConfig` before TRL resolves them."""
    for name, reason in UNSUPPORTED_OPTIONS.items():
        if getattr(args, name):
            raise NotImplementedError(f"{name}={getattr(args, name)!r}: {reason}")
    if args.loss_type != "nll":
        raise NotImplementedError(
            f"loss_type={args.loss_type!r}: the loss is the model's own, summed over the last stage. Use 'nll'"
        )
    template = args.chat_template_path
    if template is not None and not (os.path.isfile(template) and template.endswith((".jinja", ".j2"))):
        raise NotImplementedError(
            f"chat_template_path={template!r}: another tokenizer's template resizes the embedding, of which a stage has "
            "none or a part. Give a .jinja file, or call trl.clone_chat_template before you make the trainer"
        )


def refuse_arguments(model, args, trainer_arguments: dict) -> None:
    """Raises NotImplementedError for arguments of the trainer, ValueError for a data set without anything to train on.

    Args:
        model: as it was given, a name or a model.
        trainer_arguments: all others, by name.
    """
    for name, reason in UNSUPPORTED_ARGUMENTS.items():
        if trainer_arguments.get(name) is not None:
            raise NotImplementedError(f"{name}: {reason}")
    if args.trust_remote_code and isinstance(model, str):
        raise NotImplementedError(
            f"trust_remote_code=True with model={model!r}: stages of remote-code models are not loaded by name. Load the "
            "model with AutoModelForCausalLM.from_pretrained and pass it"
        )
    refuse_empty(trainer_arguments)
    prepares = not (args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
    tokenises = prepares and trainer_arguments.get("formatting_func") is None
    for name, dataset in given_datasets(trainer_arguments):
        # TRL looks at the first row too, where a stream does not know its columns.
        columns = (dataset.column_names or next(iter(dataset), ())) if hasattr(dataset, "column_names") else ()
        images = {"image", "images"} & set(columns)
        if images:
            raise NotImplementedError(
                f"{name} has a column {min(images)}: vision-language data cannot be cut into microbatches. Use a text "
                "data set, or remove the column"
            )
        if columns and tokenises:
            refuse_columns(name, set(columns), args.dataset_text_field)


def refuse_columns(name: str, columns: set[str], text_column: str) -> None:
    """Raises ValueError for a data set in which TRL finds nothing to tokenise: it would look for its text column, row by
    row, and fail with a bare KeyError."""
    if {"input_ids", "messages", "conversations", text_column} & columns or {"prompt", "completion"} <= columns:
        return
    raise ValueError(
        f"{name} has only {', '.join(sorted(columns))}: must have {text_column} or messages, or prompt and "
        "completion, or input_ids. Rename columns, for example dataset.rename_columns({'question': 'prompt', 'answer': "
        "'completion'}), set dataset_text_field, or pass formatting_func"
    )


def refuse_packing(model, args) -> None:
    """Raises NotImplementedError where packed sequences would not be kept apart.

    Transformers keeps them apart by positions that start anew: in the masks of sdpa and eager attention for any number
    of rows, under flash attention for one row at a time, and in recurrent layers not at all.
    """
    what = f"packing=True with packing_strategy={args.packing_strategy!r}: packed sequences"
    model = model.get_base_model() if is_adapted(model) else model
    kinds = set(getattr(model.config, "layer_types", None) or ())
    recurrent = getattr(model, "_is_stateful", False) or any("attention" not in k or "linear" in k for k in kinds)
    if recurrent or "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise NotImplementedError(
            f"{what} of a {type(model).__name__} would see each other: it takes no positions that start anew. Use "
            "packing_strategy='wrapped', which lets them, or packing=False"
        )
    attention, microbatches = model.config._attn_implementation, args.pipeline_microbatches
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
    for rows, name in ((getattr(args, name), name) for name in sizes):
        if "flash" in (attention or "") and rows != largest_divisor(rows, microbatches):
            raise NotImplementedError(
                f"{what} would see each other in {attention} with more than one row in a microbatch. Set {name}={rows} and "
                f"pipeline_microbatches={microbatches} to the same number, or use attn_implementation='sdpa'"
            )
