"""The masks' pseudo-random function against a slow plain Python version, and its statistics."""

import math

import pytest
import torch

from hf_meshadapt.boundary.prf import boundary_key, kept_indices, microbatch_key

MASK32 = 2**32 - 1
SHAPES = [(64, 3), (64, 64), (96, 10), (576, 29), (576, 58), (100, 1)]


def triple32(x: int) -> int:
    x = (x ^ (x >> 17)) * 0xED5AD4BB & MASK32
    x = (x ^ (x >> 11)) * 0xAC4C1B51 & MASK32
    x = (x ^ (x >> 15)) * 0x31848BAB & MASK32
    return x ^ (x >> 14)


def oracle_row(key: int, row: int, hidden_size: int, num_kept: int) -> list[int]:
    row_hash = triple32(triple32(row ^ (key & MASK32)) ^ (key >> 32))
    rotation = triple32(row_hash) * hidden_size >> 32
    indices = []
    for stratum in range(num_kept):
        low = stratum * hidden_size // num_kept
        high = (stratum + 1) * hidden_size // num_kept
        word = triple32(row_hash ^ ((stratum + 1) * 0x9E3779B9 & MASK32))
        indices.append((low + (word * (high - low) >> 32) + rotation) % hidden_size)
    return indices


@pytest.mark.parametrize("hidden_size, num_kept", SHAPES)
@pytest.mark.parametrize("key", [0, 1, MASK32, 2**63 - 1, boundary_key(microbatch_key(1, 2, 3, 4, 5), 6)])
def test_equals_the_oracle(key, hidden_size, num_kept):
    indices = kept_indices(key, 7, hidden_size, num_kept, "cpu")
    assert indices.dtype == torch.int64
    assert indices.tolist() == [oracle_row(key, row, hidden_size, num_kept) for row in range(7)]


@pytest.mark.parametrize("hidden_size, num_kept", SHAPES)
def test_indices_of_a_row_are_distinct_and_in_range(hidden_size, num_kept):
    indices = kept_indices(11, 300, hidden_size, num_kept, "cpu")
    assert indices.min() >= 0 and indices.max() < hidden_size
    ordered = indices.sort(dim=1).values
    assert (ordered.diff(dim=1) > 0).all()


@pytest.mark.parametrize("hidden_size, num_kept", [(64, 3), (64, 7), (96, 10), (576, 29), (576, 58)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_entry_is_kept_with_probability_kept_over_hidden(hidden_size, num_kept, seed):
    """Entry counts over many rows of many keys: mean of the statistic = hidden, standard deviation sqrt(2 hidden)."""
    num_rows, num_keys = 512, 64
    counts = torch.zeros(hidden_size)
    for step in range(num_keys):
        indices = kept_indices(microbatch_key(seed, step, 0, 0, 0), num_rows, hidden_size, num_kept, "cpu")
        counts += torch.bincount(indices.flatten(), minlength=hidden_size)
    share = num_kept / hidden_size
    trials = num_rows * num_keys
    statistic = ((counts - trials * share) ** 2 / (trials * share * (1 - share))).sum().item()
    six_sigma = 6 * math.sqrt(2 * hidden_size)
    assert abs(statistic - hidden_size) < six_sigma


def test_draws_within_a_stratum_are_uniform():
    """With one stratum per 32 entries and the rotation undone, each of the 32 places is as likely."""
    rows, hidden_size, num_kept = 20_000, 64, 2
    offsets = kept_indices(3, rows, hidden_size, num_kept, "cpu").diff(dim=1).flatten() % hidden_size
    # The difference of two uniform draws, plus 32, is triangular on 1..63.
    expected = torch.tensor([rows * (32 - abs(place - 32)) / 32**2 for place in range(1, 64)])
    counts = torch.bincount(offsets, minlength=64)[1:]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < 63 + 6 * math.sqrt(2 * 63)


WORDS = {"seed": 5, "step": 7, "accumulation": 1, "replica": 2, "microbatch": 3}


@pytest.mark.parametrize("changed", [*WORDS, "boundary", "row"])
def test_masks_are_independent_between_coordinates(changed):
    """Two masks that differ in one coordinate share kept**2 / hidden entries a row, as independent ones do."""
    num_rows, hidden_size, num_kept = 2000, 576, 58
    base = kept_indices(boundary_key(microbatch_key(**WORDS), 1), num_rows, hidden_size, num_kept, "cpu")
    words = {**WORDS, changed: WORDS[changed] + 1} if changed in WORDS else WORDS
    key = boundary_key(microbatch_key(**words), 2 if changed == "boundary" else 1)
    other = kept_indices(key, num_rows, hidden_size, num_kept, "cpu")
    if changed == "row":
        other = other.roll(1, dims=0)
    masks = [torch.zeros(num_rows, hidden_size).scatter_(1, indices, 1.0) for indices in (base, other)]
    shared = (masks[0] * masks[1]).sum(1)
    standard_error = shared.std().item() / math.sqrt(num_rows)
    assert abs(shared.mean().item() - num_kept**2 / hidden_size) < 5 * standard_error


def test_swapped_coordinates_give_other_keys():
    keys = {
        boundary_key(microbatch_key(seed, step, accumulation, replica, microbatch), boundary)
        for seed in range(3)
        for step in range(3)
        for accumulation in range(3)
        for replica in range(3)
        for microbatch in range(3)
        for boundary in range(3)
    }
    assert len(keys) == 3**6


def test_keys_travel_in_int64():
    for seed in (0, 42, -1, 2**64 - 1, 2**80):
        key = microbatch_key(seed, 10**9, 63, 1000, 255)
        assert torch.tensor([key], dtype=torch.int64).item() == key >= 0
        assert 0 <= boundary_key(key, 6) < 2**63


def test_golden_numbers():
    """They fix the function for good: a resumed run must draw the masks it would have drawn.

    python -c "from hf_meshadapt.boundary.prf import *; m = microbatch_key(17, 100, 1, 2, 3); b = boundary_key(m, 4)
    print(m, b, kept_indices(b, 2, 576, 5, 'cpu').tolist(), kept_indices(b, 1, 2048, 4, 'cpu').tolist())"
    """
    key = microbatch_key(17, 100, 1, 2, 3)
    assert key == 4803301864733281000
    key = boundary_key(key, 4)
    assert key == 3618391582572494523
    assert kept_indices(key, 2, 576, 5, "cpu").tolist() == [[181, 313, 393, 478, 569], [198, 294, 437, 514, 125]]
    assert kept_indices(key, 1, 2048, 4, "cpu").tolist() == [[718, 1305, 1660, 2042]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_bits_on_cuda():
    on_cpu = kept_indices(2**62 + 12345, 4096, 2048, 205, "cpu")
    assert torch.equal(on_cpu, kept_indices(2**62 + 12345, 4096, 2048, 205, "cuda").cpu())
