"""The range coder against plain Python, its streams against their stated length, and the codec's error law."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary import rans, step_size
from hf_meshadapt.boundary.entropy_coder import HEADER, EntropySequenceCoder
from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.sensitivity import TokenSensitivity
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN, SequenceCoder
from hf_meshadapt.boundary.symbol_model import (
    CLASS_UNITS,
    CONSTANTS,
    LARGEST,
    NUM_CLASSES,
    PRECISION,
    ROUNDING,
    SMALLEST,
    UNITS,
    symbol_model,
)
from hf_meshadapt.boundary.transform import TransformCodec, TransformTables, fit_tables
from tests.token_codecs import kinds
from tests.unit.test_transform import gaussian, random_covariance

HIDDEN = 64
MODEL = symbol_model()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Tables --------------------------------------------------------------------------------------------------------------


def entries(k: int) -> slice:
    return slice(MODEL.origins[k] - MODEL.reach[k], MODEL.origins[k] + MODEL.reach[k] + 1)


@pytest.mark.parametrize("k", range(0, NUM_CLASSES, 4))
def test_probabilities_are_those_of_a_gaussian_with_heavier_tails(k):
    widths, ratio = MODEL.widths[entries(k)], 2.0 ** ((k + SMALLEST) * CLASS_UNITS / UNITS)
    assert widths.sum() == 1 << PRECISION and widths.min() >= 1
    assert (MODEL.starts[entries(k)] == np.concatenate([[0], widths.cumsum()[:-1]])).all()
    assert MODEL.bits[entries(k)] == pytest.approx(PRECISION - np.log2(widths))
    normal = NormalDist(0, ratio)
    zero = normal.cdf(1 - ROUNDING) - normal.cdf(ROUNDING - 1)
    assert widths[MODEL.reach[k]] / (1 << PRECISION) == pytest.approx(zero, abs=0.03)


def test_at_fine_steps_a_symbol_takes_little_more_than_a_gaussians_entropy():
    k = 6 * UNITS // CLASS_UNITS - SMALLEST  # a step of 1/64 standard deviation
    assert MODEL.entropies[k] == pytest.approx(math.log2(64 * math.sqrt(2 * math.pi * math.e)), abs=0.1)


def test_compiled_code_is_of_these_constants():
    assert rans.COMPILED_FOR == step_size.COMPILED_FOR == CONSTANTS


@pytest.mark.parametrize("k", (0, NUM_CLASSES // 2, NUM_CLASSES - 1))
def test_every_slot_leads_to_its_symbol(k):
    slots = np.arange(1 << PRECISION)
    found = np.array([rans.find_symbol(slot, k, MODEL.bounds, MODEL.starts) for slot in slots])
    assert (MODEL.starts[found] <= slots).all() and (slots < MODEL.starts[found] + MODEL.widths[found]).all()
    assert (found >= entries(k).start).all() and (found < entries(k).stop).all()


def test_values_lie_in_their_bins_and_the_middle_is_zero():
    for k in range(NUM_CLASSES):
        values, reach = MODEL.values[entries(k)], MODEL.reach[k]
        assert values[reach] == 0 and values == pytest.approx(-values[::-1])
        magnitudes = np.arange(1, reach + 1)
        assert (values[reach + 1 :] >= magnitudes - ROUNDING - 1e-9).all()
        assert (values[reach + 1 :] <= magnitudes + 1 - ROUNDING + 1e-9).all()


# Coder ---------------------------------------------------------------------------------------------------------------


def streams(seed: int, tokens: int, components: int, step: int):
    generator = np.random.default_rng(seed)
    scales = np.sort(generator.integers(-300, 300, components))[::-1].astype(np.int64)
    symbols = generator.integers(-4, 5, tokens)
    steps = step + generator.integers(-30, 30, tokens)
    gains = (symbols + 2) * CLASS_UNITS
    y = generator.standard_normal((tokens, components)) * 2.0 ** ((scales + gains[:, None]) / UNITS)
    return y.astype(np.float32), scales, gains, steps, symbols


GAIN_CLASS = 2 * UNITS // CLASS_UNITS - SMALLEST


def encode(y, scales, gains, steps, symbols, num_words: int, python: bool = False) -> tuple[int, np.ndarray, float]:
    """First word in use, the words, and what was counted for the components; by the compiled functions, or in Python."""
    quantise_tokens, coder = rans.quantise_tokens, rans.encode
    if python:
        quantise_tokens, coder = quantise_tokens.py_func, coder.py_func
    entries = np.empty(len(y) + y.size, dtype=np.int32)
    entries[: len(y)] = MODEL.origins[GAIN_CLASS] + symbols
    tables = (MODEL.origins, MODEL.reach, MODEL.bits)
    count, bits = quantise_tokens(y, scales, gains, steps, *tables, entries[len(y) :])
    words = np.zeros(num_words, dtype=np.uint32)
    return coder(entries[: len(y) + count], MODEL.starts, MODEL.widths, words), words, bits


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 20), st.integers(-500, 700))
def test_what_goes_in_comes_out_and_takes_what_was_counted(seed, tokens, components, step):
    y, scales, gains, steps, symbols = streams(seed, tokens, components, step)
    first, words, counted = encode(y, scales, gains, steps, symbols, 1000)
    out = np.zeros(y.shape, dtype=np.float32)
    decoding = (MODEL.origins, MODEL.bounds, MODEL.starts, MODEL.widths, MODEL.values, out)
    used = rans.decode(words[first:], scales, steps, 2, GAIN_CLASS, *decoding)
    assert not out[:, used:].any() and (used == 0 or scales[used - 1] + (gains - steps).max() >= -9.5 * CLASS_UNITS)
    for n in range(tokens):
        for c in range(components):
            k = (int(scales[c] + gains[n] - steps[n]) + CLASS_UNITS // 2) // CLASS_UNITS - SMALLEST
            expected = 0.0
            if k >= 0:
                k = min(k, NUM_CLASSES - 1)
                # Beyond the tables a step of its own, LARGEST classes below the component's scale.
                size = 2.0 ** (max(steps[n], scales[c] + gains[n] - LARGEST * CLASS_UNITS) / UNITS)
                symbol = min(math.floor(abs(float(y[n, c])) / size + ROUNDING), MODEL.reach[k])
                expected = math.copysign(MODEL.values[MODEL.origins[k] + symbol] * size, y[n, c])
            assert out[n, c] == pytest.approx(expected, rel=1e-6)
    bits = rans.count_bits(y, scales, gains, steps, MODEL.origins, MODEL.reach, MODEL.bits)
    assert bits == counted
    bits += MODEL.bits[MODEL.origins[GAIN_CLASS] + symbols].sum()
    assert bits <= 32 * (len(words) - first) <= bits + 32 * rans.STATE_WORDS + 2


def test_compiled_code_does_what_the_python_code_does():
    y, scales, gains, steps, symbols = streams(1, 5, 7, 0)
    (first, words, bits), (other, plain, counted) = (
        encode(y, scales, gains, steps, symbols, 200, python) for python in (False, True)
    )
    assert first == other and bits == counted and (words == plain).all()


def test_too_few_words_are_told():
    y, scales, gains, steps, symbols = streams(1, 5, 7, -100)
    assert encode(y, scales, gains, steps, symbols, rans.STATE_WORDS)[0] == -1


# Sequences -----------------------------------------------------------------------------------------------------------


def tables(decay: float = 1.0) -> TransformTables:
    return fit_tables(random_covariance(HIDDEN, decay), None, HIDDEN)


def make(num_bytes: int, exact_first: bool = True, sensitivity=None, fitted=None) -> EntropySequenceCoder:
    torch.manual_seed(0)
    return EntropySequenceCoder(fitted or tables(), HIDDEN, lambda length: num_bytes, exact_first, sensitivity)


@settings(max_examples=150, deadline=None)
@given(kinds(10), st.integers(1, 400).map(lambda pairs: 2 * pairs), st.booleans(), st.floats(1e-20, 1e20))
def test_any_shape_and_budget_survives(rows, num_bytes, exact_first, scale):
    kind = torch.tensor(rows, dtype=torch.int8)
    hidden, base = scale * torch.randn(*kind.shape, HIDDEN), torch.randn(*kind.shape, HIDDEN)
    packed = make(num_bytes, exact_first).encode(hidden, base, kind)
    assert packed.shape == (len(kind), num_bytes) and packed.dtype == torch.uint8
    decoded = make(num_bytes, exact_first).decode(packed, base, kind)  # the other end has a coder of its own
    assert decoded.dtype == torch.float32 and torch.isfinite(decoded).all()
    assert torch.equal(decoded[kind == PADDING], base[kind == PADDING])
    whole = (kind == FIRST) if exact_first and num_bytes >= 4 * HIDDEN * kind.shape[1] else torch.zeros_like(kind) > 0
    assert torch.equal(decoded[whole], hidden[whole].bfloat16().float())
    # Hardly worse than the prediction: a coded component errs by less than it held, but for rounding.
    error, missing = (decoded - hidden)[kind != PADDING].norm(), (base - hidden)[kind != PADDING].norm()
    assert error <= 1.1 * missing


@pytest.mark.parametrize("bytes_per_token", [4, 8, 16, 32])
def test_the_error_is_near_the_rate_distortion_function(bytes_per_token):
    """Within 1.6 times of a Gaussian's D(R), and below what whole bits per component reach at the same bytes."""
    covariance, length = random_covariance(), 500
    fitted, tokens = fit_tables(covariance, None, HIDDEN), gaussian(covariance, length)
    kind = torch.full((1, length), TOKEN)
    num_bytes, base = bytes_per_token * length, torch.zeros(1, length, HIDDEN)

    def distortion(coder) -> float:
        decoded = coder.decode(coder.encode(tokens[None], base, kind), base, kind)
        return float((decoded[0] - tokens).square().sum(1).mean())

    mine = distortion(make(num_bytes, fitted=fitted))
    fixed = distortion(SequenceCoder(TransformCodec(fitted), HIDDEN, lambda _: num_bytes, False))
    assert mine < 0.95 * fixed
    assert mine < 1.6 * rate_distortion(fitted.variances.double(), 8 * bytes_per_token)


def rate_distortion(variances: torch.Tensor, bits: float) -> float:
    """Reverse water-filling by bisection on the water level (Cover & Thomas 10.3.3)."""
    low, high = 1e-12, float(variances.max())
    for _ in range(100):
        level = math.sqrt(low * high)
        rate = float(0.5 * (variances / level).clamp(min=1).log2().sum())
        low, high = (level, high) if rate > bits else (low, level)
    return float(variances.clamp(max=level).sum())


def test_targets_get_the_share_that_their_sensitivity_says():
    kind = torch.tensor([[TOKEN, TARGET] * 200])
    tokens = gaussian(random_covariance(), 400)[None]
    fit = BoundaryFit(torch.zeros(1, HIDDEN), None, None, 0.0, sensitivity=(0.4, 1.6))
    coder, base = make(400 * 24, sensitivity=TokenSensitivity(fit, None)), torch.zeros(1, 400, HIDDEN)
    error = (coder.decode(coder.encode(tokens, base, kind), base, kind) - tokens).square().sum(2)
    assert float(error[kind == TOKEN].mean() / error[kind == TARGET].mean()) == pytest.approx(4, rel=0.2)


def test_larger_tokens_get_more_bits_and_err_alike():
    kind = torch.full((1, 400), TOKEN)
    tokens = gaussian(random_covariance(), 400)[None]
    tokens[:, ::2] *= 4
    coder, base = make(400 * 32), torch.zeros(1, 400, HIDDEN)
    error = (coder.decode(coder.encode(tokens, base, kind), base, kind) - tokens).square().sum(2)
    assert float(error[:, ::2].mean() / error[:, 1::2].mean()) == pytest.approx(1, abs=0.4)


def test_nearly_all_bytes_are_used():
    kind, base = torch.full((1, 400), TOKEN), torch.zeros(1, 400, HIDDEN)
    for num_bytes in (2000, 4000, 8000, 16000):
        (packed,) = make(num_bytes).encode(gaussian(random_covariance(), 400)[None], base, kind)
        assert int(packed.nonzero().max()) > 0.96 * num_bytes


def test_a_massive_channel_does_not_set_the_step_of_all_others():
    """As in real models, where one channel is far larger: the rest errs less the more bytes there are."""
    covariance, kind = torch.eye(HIDDEN, dtype=torch.float64), torch.full((1, 400), TOKEN)
    covariance[0, 0] = 40.0**2
    tokens, base = gaussian(covariance, 400)[None], torch.zeros(1, 400, HIDDEN)
    errors = []
    for bits in (4, 6, 8):  # per component
        coder = make(400 * HIDDEN * bits // 8, fitted=fit_tables(covariance, None, HIDDEN))
        (packed,) = encoded = coder.encode(tokens, base, kind)
        assert int(packed.nonzero().max()) > 0.96 * len(packed)
        errors.append(float((coder.decode(encoded, base, kind) - tokens)[..., 1:].square().mean()))
    # A quarter for every bit. At a step of 1/128 of the channel it would be 0.008 whatever the bytes.
    assert errors[0] < 0.012 and errors[1] < errors[0] / 12 and errors[2] < errors[1] / 12


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_at_the_other_end(value):
    kind, base = torch.tensor([[TOKEN] * 6, [TOKEN] * 6]), torch.zeros(2, 6, HIDDEN)
    hidden = torch.randn(2, 6, HIDDEN)
    hidden[0, 3, 5] = value
    coder = make(200)
    decoded = coder.decode(coder.encode(hidden, base, kind), base, kind)
    assert decoded[0].isnan().all() and decoded[1].isfinite().all()


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=HEADER.itemsize + 8, max_size=200))
def test_any_bytes_decode_to_something(data):
    """What a broken or hostile peer sends must not touch memory that it should not."""
    data = data[: len(data) // 2 * 2]
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)[None].clone()
    kind, base = torch.full((1, 9), TOKEN), torch.zeros(1, 9, HIDDEN)
    assert make(len(data)).decode(packed, base, kind).shape == base.shape


def test_threads_change_nothing():
    kind, base, hidden = torch.full((4, 60), TOKEN), torch.zeros(4, 60, HIDDEN), torch.randn(4, 60, HIDDEN)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            packed = make(60 * 12).encode(hidden, base, kind)
            results.append((packed, make(60 * 12).decode(packed, base, kind)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
