"""What a batch must be like before a mesh can run it: each error says what is wrong with the data and what to do.

Whatever got past here would fail within torch, on a GPU as an assertion on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

IGNORED = -100  # a label that is none
# Names that the stages' own forward uses: a column of this name would take their place.
RESERVED = {
    *("key", "kind", "token_ids", "num_items", "num_items_in_batch", "inputs_embeds", "past_key_values", "use_cache"),
    *("logits_to_keep", "cache_position", "return_dict", "output_attentions", "output_hidden_states"),
}


@dataclass
class NamingCollator:
    """Around a data collator: what it cannot make a batch of is a ValueError that says so.

    Args:
        collate: the collator.
    """

    collate: Callable[[list], Mapping]

    def __call__(self, examples: list) -> dict:
        try:
            batch = self.collate(examples)
        except NotImplementedError:
            raise
        except Exception as error:  # a person's or a library's own code
            collate = getattr(self.collate, "data_collator", self.collate)  # within Trainer's, which drops columns
            name = getattr(collate, "__name__", type(collate).__name__)
            raise ValueError(
                f"the data collator ({name}) cannot make a batch of {len(examples)} rows: {type(error).__name__}: {error}. "
                "Rows need the same columns, of numbers, and one length, which a collator that pads gives them, such as "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            ) from error
        if not isinstance(batch, Mapping):
            raise ValueError(f"the data collator returned a {type(batch).__name__}: let it return a dict of tensors")
        return batch


def check_tokens(batch: dict) -> dict:
    """The batch, its tokens and labels as int64.

    Args:
        batch: tensors with one row for each sequence, `labels` among them.

    Raises:
        ValueError: tokens or labels are missing, no whole numbers, or of shapes that do not fit.
    """
    for name in sorted(RESERVED & batch.keys()):
        raise ValueError(
            f"batch entry {name}: the mesh sets it itself. Leave it out of the data, or rename the column"
        )
    if "input_ids" not in batch:
        raise ValueError(f"the batch has no input_ids (only {', '.join(batch) or 'nothing'}): tokenize the text first")
    shape = batch["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"input_ids of shape {tuple(shape)}: must be sequences x tokens, at least one of each. Leave empty rows out"
        )
    for name in ("input_ids", "labels", "position_ids"):
        if name in batch and (batch[name].is_floating_point() or batch[name].is_complex()):
            raise ValueError(
                f"{name} of dtype {batch[name].dtype}: must be whole numbers. Convert the column to int64"
            )
    for name in ("labels", "attention_mask", "position_ids", "token_type_ids"):
        if name in batch and batch[name].shape != shape and not (name == "attention_mask" and _of_pairs(batch)):
            raise ValueError(
                f"{name} of shape {tuple(batch[name].shape)} beside input_ids of shape {tuple(shape)}: must have one entry "
                "for each token. Pad both to the same length"
            )
    return {**batch, "input_ids": batch["input_ids"].long(), "labels": batch["labels"].long()}


def row_fault(found: int, rows: int) -> str | None:
    """What is wrong with a batch of so many rows where there is room for `rows`, with the remedy; None if nothing is."""
    if found <= rows:
        return None
    return (
        f"the data collator made a batch of {found} rows, and there is room for {rows}: per_device_train_batch_size, or "
        "per_device_eval_batch_size, for each replica of this process. Let it return one row for each example, and cut "
        "long examples into several beforehand, for example with dataset.map"
    )


def _of_pairs(batch: dict) -> bool:
    """Whether the mask says of every token which others it sees, (B, heads or 1, T, T): models take it as it is."""
    (rows, length), mask = batch["input_ids"].shape, batch["attention_mask"]
    return mask.dim() == 4 and (mask.shape[0], *mask.shape[2:]) == (rows, length, length)


def token_range(batch: dict) -> torch.Tensor:
    """Smallest and largest token, label (`IGNORED` left out; 0 if there is none) and position: (6,) int64, on the batch's
    device."""
    tokens, labels, positions = batch["input_ids"], batch["labels"], batch.get("position_ids")
    labels = labels.masked_fill(labels == IGNORED, 0)
    if positions is None:
        positions = torch.tensor([0, tokens.shape[1] - 1]).to(tokens.device, non_blocking=True)
    return torch.stack([extreme for values in (tokens, labels, positions) for extreme in values.aminmax()])


def range_fault(extremes: torch.Tensor, vocab_size: int, num_positions: int | None) -> str | None:
    """What of a `token_range` has no entry in the model's tables, with the remedy; None if all has.

    Args:
        num_positions: rows of a learned position table; None where the model has none.
    """
    *values, (first, last) = extremes.view(3, 2).tolist()
    if num_positions is not None and not 0 <= first <= last < num_positions:
        return (
            f"a sequence has position {first if first < 0 else last}, and the model's position table ends at "
            f"{num_positions - 1}. Truncate the rows to {num_positions} tokens, or take a model with a longer context"
        )
    for name, (least, most) in zip(("input_ids", "labels"), values):
        if least < 0 or most >= vocab_size:
            masked = f" (labels that do not count are {IGNORED})" if name == "labels" else ""
            return (
                f"{name} has {least if least < 0 else most}, which is no entry of the model's vocabulary of {vocab_size}"
                f"{masked}. Use the model's own tokenizer, or resize_token_embeddings before training"
            )
    return None
