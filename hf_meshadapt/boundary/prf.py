"""Counter-based pseudo-random function behind the masks: a key and a position give the kept entries.

No state and no generator: both ends of a boundary derive the same indices, so no index ever travels, and a step can
be replayed. Integer arithmetic only, hence the same bits on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_MASK63 = (1 << 63) - 1
_MASK32 = (1 << 32) - 1
_GOLDEN_32 = 0x9E3779B9
# (shift, multiplier) rounds and last shift of triple32, https://github.com/skeeto/hash-prospector. A multiplier c from
# 2**31 up stands as c - 2**32, the same modulo 2**32: no product with a 32-bit word leaves int64.
_ROUNDS = ((17, 0xED5AD4BB - (1 << 32)), (11, 0xAC4C1B51 - (1 << 32)), (15, 0x31848BAB))
_LAST_SHIFT = 14


def microbatch_key(seed: int, step: int, accumulation: int, replica: int, microbatch: int) -> int:
    """Key of one microbatch, in [0, 2**63) so that it can travel in an int64 tensor.

    Args:
        seed: `BoundaryConfig.mask_seed`; any int, taken modulo 2**64.
        step: optimizer step.
        accumulation: index of the gradient accumulation step within the optimizer step.
        replica: data-parallel replica. Masks that differ between replicas average out part of their noise.
        microbatch: index of the microbatch within the replica's batch.
    """
    state = 0
    for word in (seed, step, accumulation, replica, microbatch):
        state = _splitmix64(state ^ (word & _MASK64))
    return state & _MASK63


def boundary_key(microbatch_key: int, boundary: int) -> int:
    """Key of one boundary for one microbatch, in [0, 2**63)."""
    return _splitmix64(microbatch_key ^ boundary) & _MASK63


def kept_indices(key: int, num_rows: int, hidden_size: int, num_kept: int, device: torch.device | str) -> Tensor:
    """Hidden entries that travel for each row: one per stratum, then rotated by one offset per row.

    Stratum i covers [floor(i x hidden / kept), floor((i + 1) x hidden / kept)). Strata of unequal width would favour
    some entries; the rotation makes each one kept with probability exactly kept / hidden (up to 2**-32 x hidden, the
    bias of scaling a 32-bit hash).

    Args:
        key: from `boundary_key`.
        num_rows: rows of the microbatch; row = sequence index x padded length + position.
        hidden_size: below 2**31.
        num_kept: entries kept per row, in [1, hidden_size].
        device: where the indices are made; the values do not depend on it.

    Returns:
        int64 tensor (num_rows, num_kept): distinct within a row, ascending up to the rotation.
    """
    assert 1 <= num_kept <= hidden_size < 1 << 31, (num_kept, hidden_size)
    strata = torch.arange(num_kept + 1, device=device)
    bounds = strata * hidden_size // num_kept
    rows = torch.arange(num_rows, device=device)
    row_hash = _mix32(_mix32(rows ^ (key & _MASK32)) ^ (key >> 32)).unsqueeze(1)
    # Counter 0 draws the row's rotation, counter i + 1 the entry of stratum i.
    rotation = _scale(_mix32(row_hash.clone()), hidden_size)
    counters = (strata[1:] * _GOLDEN_32).bitwise_and_(_MASK32)
    indices = _scale(_mix32(row_hash ^ counters), bounds.diff())
    indices += bounds[:-1] + rotation
    return indices.remainder_(hidden_size)


def _splitmix64(word: int) -> int:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014); a bijection of 64-bit words."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def _mix32(words: Tensor) -> Tensor:
    """Bijection of 32-bit words held in int64, in place: non-negative before every `>>`, so the shift is logical."""
    for shift, multiplier in _ROUNDS:
        words ^= words >> shift
        words.mul_(multiplier).bitwise_and_(_MASK32)
    words ^= words >> _LAST_SHIFT
    return words


def _scale(words: Tensor, width: Tensor | int) -> Tensor:
    """32-bit words to integers in [0, width), in place."""
    return words.mul_(width).bitwise_right_shift_(32)
