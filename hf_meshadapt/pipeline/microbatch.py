"""Turns one per-replica batch into equally shaped microbatches: pure tensor functions."""

from __future__ import annotations

import torch

from ..boundary.prf import microbatch_key

Batch = dict[str, torch.Tensor]


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Repeats the first sequence, with no label, until the batch has `rows` rows.

    Buffers of the pipeline are sized once, and torch cannot run uneven microbatches; rows without a label add nothing
    to loss or gradient.
    """
    missing = rows - len(batch["labels"])
    if missing <= 0:
        return batch
    padded = {name: torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for name, value in batch.items()}
    return mask_rows(padded, rows - missing)


def mask_rows(batch: Batch, first: int) -> Batch:
    """Takes the labels off all rows from `first` on."""
    labels = batch["labels"].clone()
    labels[first:] = -100
    return {**batch, "labels": labels}


def microbatch_keys(seed: int, step: int, accumulation: int, replica: int, num_microbatches: int) -> torch.Tensor:
    """One mask key per microbatch, int64 on the CPU, (num_microbatches,)."""
    return torch.tensor([microbatch_key(seed, step, accumulation, replica, i) for i in range(num_microbatches)])


def first_token_positions(batch: Batch) -> torch.Tensor:
    """Position of the first real token of every sequence, (B,): not 0 under left padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.zeros(len(batch["labels"]), dtype=torch.long, device=batch["labels"].device)
    return mask.int().argmax(dim=1)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
