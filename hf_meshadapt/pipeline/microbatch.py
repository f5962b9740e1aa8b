"""Turns one per-replica batch into equally shaped microbatches: pure tensor functions."""

from __future__ import annotations

import torch

from ..boundary.prf import microbatch_key
from ..boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from ..data_checks import row_fault

Batch = dict[str, torch.Tensor]

# Of `batch_digest`: an odd number with bits all over, and the range of what it makes.
DIGEST_FACTOR, DIGEST_RANGE = 2_654_435_761, 2**31


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Repeats the first sequence, with no label, until the batch has `rows` rows.

    Buffers of the pipeline are sized once, and torch cannot run uneven microbatches; rows without a label add nothing
    to loss or gradient.

    Raises:
        ValueError: it has more.
    """
    missing = rows - len(batch["labels"])
    if fault := row_fault(len(batch["labels"]), rows):
        raise ValueError(fault)
    if not missing:
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


def token_kinds(batch: Batch) -> torch.Tensor:
    """What every position is, (B, T) int8: padding, context, a token that predicts a label, or the first token of a
    sequence, packed ones included.

    Packed sequences come without a mask, and what fills their row up has position 0 throughout. A sequence of one token
    looks the same and counts as padding: no other token sees it, and it predicts nothing.
    """
    labels, mask, positions = batch["labels"], batch.get("attention_mask"), batch.get("position_ids")
    predicts = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
    if mask is not None:
        real = _real_tokens(mask)
    elif positions is not None:
        next_starts = torch.nn.functional.pad(positions[:, 1:], (0, 1)) == 0
        real = (positions != 0) | ~next_starts | predicts
    else:
        real = torch.ones_like(labels, dtype=torch.bool)
    if positions is not None:
        first = (positions == 0) & real
    else:
        first = torch.zeros_like(real).scatter(1, real.int().argmax(dim=1, keepdim=True), True)
    kinds = torch.where(real, torch.where(predicts, TARGET, TOKEN), PADDING)
    return torch.where(first, FIRST, kinds).to(torch.int8)


def _real_tokens(mask: torch.Tensor) -> torch.Tensor:
    """(B, T) bool of an attention mask: (B, T), or of pairs (B, heads or 1, T, T), where a token that does not even see
    itself is padding. Masks of pairs that are no whole numbers are added to scores: 0 lets see."""
    if mask.dim() == 2:
        return mask.bool()
    itself = mask.diagonal(dim1=-2, dim2=-1)
    return (itself == 0 if itself.is_floating_point() else itself != 0).any(dim=1)


def batch_digest(batch: Batch) -> torch.Tensor:
    """What tells batches apart that should be one: number of positions, and a number made of token ids and their places,
    (2,) int64; float64 holds sums of thousands of them."""
    tokens = batch["input_ids"].flatten()
    places = torch.arange(1, len(tokens) + 1, device=tokens.device)
    mixed = (tokens * (places * DIGEST_FACTOR % DIGEST_RANGE) % DIGEST_RANGE).sum() % DIGEST_RANGE
    return torch.stack([mixed.new_full((), len(tokens)), mixed])


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
