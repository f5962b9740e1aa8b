"""The transform codec's error law, its bits against a slow greedy oracle, and the edges of its domain."""

from __future__ import annotations

import heapq

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.transform import (
    DISTORTION,
    GAIN_BYTES,
    MAX_BITS,
    STEPS,
    TransformCodec,
    allocate_bits,
    fit_tables,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 64
BUDGETS = (6, 10, 18, 34, 50)  # bytes per token: from 0.5 to 6 bits per component


def random_covariance(hidden_size: int = HIDDEN, decay: float = 1.0) -> torch.Tensor:
    """Eigenvalues 1/k**decay in random directions, float64."""
    directions, _ = torch.linalg.qr(torch.randn(hidden_size, hidden_size, dtype=torch.float64))
    return (directions / torch.arange(1, hidden_size + 1) ** decay) @ directions.T


def gaussian(covariance: torch.Tensor, num_tokens: int = 4000) -> torch.Tensor:
    normal = torch.randn(num_tokens, len(covariance), dtype=torch.float64)
    return (normal @ torch.linalg.cholesky(covariance).T).float()


def round_trip(codec: TransformCodec, tokens: torch.Tensor, bytes_per_token: int) -> torch.Tensor:
    packed = codec.encode(tokens, bytes_per_token)
    assert packed.dtype == torch.uint8 and packed.shape == (len(tokens), bytes_per_token)
    decoded = codec.decode(packed)
    assert decoded.dtype == torch.float32 and decoded.shape == tokens.shape
    return decoded


def stated_error(codec: TransformCodec, bytes_per_token: int) -> float:
    """Mean squared error of a token, in the coded domain."""
    bits = allocate_bits(codec.variances, (bytes_per_token - GAIN_BYTES) * 8)
    return sum(float(v) * DISTORTION[b] for v, b in zip(codec.variances, bits))


# Quantiser -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_steps_and_distortions_are_those_of_the_optimal_uniform_quantiser(bits):
    """By quadrature over the normal density: the stated distortion, which no step 2% off undercuts."""
    x = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5 * (x[1] - x[0])

    def distortion(step: float) -> float:
        index = (x / step).floor().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return float(((x - (index + 0.5) * step).square() * density).sum())

    assert distortion(STEPS[bits]) == pytest.approx(DISTORTION[bits], rel=0.01)
    assert distortion(STEPS[bits]) < min(distortion(STEPS[bits] * factor) for factor in (0.95, 1.05))


# Bits ----------------------------------------------------------------------------------------------------------------


def greedy_bits(variances: list[float], total_bits: int) -> list[int]:
    """One bit after the other to the component that it helps most, the first one among equals."""

    def gain(component: int, bits: int) -> tuple[float, int]:
        drop = DISTORTION[bits] - DISTORTION[bits + 1] if bits < MAX_BITS else -1.0
        return -variances[component] * drop, component

    heap = [gain(component, 0) for component in range(len(variances))]
    bits = [0] * len(variances)
    for _ in range(min(total_bits, MAX_BITS * len(variances))):
        _, component = heapq.heappop(heap)
        bits[component] += 1
        if bits[component] < MAX_BITS:
            heapq.heappush(heap, gain(component, bits[component]))
    return bits


variance_lists = st.lists(st.floats(0, 1e6, width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(variance_lists, st.integers(0, 110))
@example([1.0, 1.0, 1.0, 0.0], 13)
def test_bits_are_those_of_the_greedy_oracle(values, total_bits):
    variances = sorted(values, reverse=True)
    bits = allocate_bits(torch.tensor(variances), total_bits)
    assert bits == greedy_bits(variances, total_bits)
    assert sum(bits) == min(total_bits, MAX_BITS * len(bits))
    assert bits == sorted(bits, reverse=True)


@pytest.mark.parametrize("bytes_per_token", BUDGETS)
def test_every_bit_of_a_token_is_spent(bytes_per_token):
    codec = TransformCodec(fit_tables(random_covariance(), None, HIDDEN))
    groups, steps, levels = codec.layout(bytes_per_token)
    assert sum(bits * count for bits, count in groups) == (bytes_per_token - GAIN_BYTES) * 8
    assert len(steps) == len(levels) == sum(count for _, count in groups) <= HIDDEN
    most = codec.layout(10 * HIDDEN)[0]
    assert most == ((MAX_BITS, HIDDEN),)


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_components", [HIDDEN, 20])
def test_synthesis_undoes_analysis(weighted, num_components):
    weight = random_covariance(decay=2.0) if weighted else None
    tables = fit_tables(random_covariance(), weight, num_components)
    analysis, synthesis = tables.analysis.double(), tables.synthesis.double()
    torch.testing.assert_close(analysis @ synthesis, torch.eye(num_components).double(), rtol=0, atol=1e-5)
    projection = synthesis @ analysis
    torch.testing.assert_close(projection @ projection, projection, rtol=0, atol=1e-5)
    assert float(projection.trace()) == pytest.approx(num_components, abs=1e-4)
    assert tables.num_bytes == 4 * (2 * num_components * HIDDEN + num_components)


@pytest.mark.parametrize("weighted", [False, True])
def test_components_are_decorrelated_with_the_stated_variances(weighted):
    covariance, weight = random_covariance(), random_covariance(decay=2.0) if weighted else None
    tables = fit_tables(covariance, weight, HIDDEN)
    analysis = tables.analysis.double()
    torch.testing.assert_close(analysis @ covariance @ analysis.T, tables.variances.double().diag(), rtol=0, atol=1e-5)
    assert torch.equal(tables.variances, tables.variances.sort(descending=True).values)
    assert bool((tables.variances >= 0).all())


def test_the_weight_is_regularised_relative_to_its_mean_diagonal():
    """A = (C + eps mean(diag C) I)^(1/2), so that C's scale does not matter."""
    covariance, weight = random_covariance(), random_covariance(decay=2.0)
    tables, scaled = (fit_tables(covariance, w, HIDDEN, epsilon=0.1) for w in (weight, 1e6 * weight))
    torch.testing.assert_close(tables.variances, scaled.variances)
    normal = weight / weight.diagonal().mean() + 0.1 * torch.eye(HIDDEN)
    analysis = tables.analysis.double()
    torch.testing.assert_close(analysis.T @ analysis, normal.double(), rtol=1e-4, atol=1e-5)  # Aᵀ A, U drops out


# Error law -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_token", BUDGETS)
def test_error_law_on_gaussian_tokens(bytes_per_token):
    covariance = random_covariance()
    codec = TransformCodec(fit_tables(covariance, None, HIDDEN))
    tokens = gaussian(covariance)
    error = (round_trip(codec, tokens, bytes_per_token) - tokens).square().sum(1).mean()
    assert float(error) == pytest.approx(stated_error(codec, bytes_per_token), rel=0.1)


@pytest.mark.parametrize("bytes_per_token", BUDGETS)
def test_error_law_of_a_weighted_fit_and_what_it_is_good_for(bytes_per_token):
    """The stated error is the one that the weight measures; there the weighted fit beats the plain one, and only there."""
    covariance, weight = random_covariance(), random_covariance(decay=2.0)
    codec, plain = (TransformCodec(fit_tables(covariance, w, HIDDEN)) for w in (weight, None))
    tokens = gaussian(covariance)
    metric = (weight / weight.diagonal().mean() + 0.1 * torch.eye(HIDDEN)).float()

    def errors(codec: TransformCodec) -> tuple[float, float]:
        error = round_trip(codec, tokens, bytes_per_token) - tokens
        return float(((error @ metric) * error).sum(1).mean()), float(error.square().sum(1).mean())

    (felt, energy), (plain_felt, plain_energy) = errors(codec), errors(plain)
    assert felt == pytest.approx(stated_error(codec, bytes_per_token), rel=0.1)
    assert felt < plain_felt and energy > plain_energy


def test_more_bytes_never_hurt():
    covariance = random_covariance()
    codec = TransformCodec(fit_tables(covariance, None, HIDDEN))
    tokens = gaussian(covariance, 1000)
    errors = [float((round_trip(codec, tokens, size) - tokens).square().mean()) for size in range(3, 66, 3)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < float(tokens.square().mean())


# Gain ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**-50, 2.0**-10, 2.0**10, 2.0**50])
def test_scale_does_not_matter(scale):
    """By powers of two not even in the last bit: the gain, a bfloat16, takes them up."""
    covariance = random_covariance()
    codec = TransformCodec(fit_tables(covariance, None, HIDDEN))
    tokens = gaussian(covariance, 50)
    assert torch.equal(round_trip(codec, tokens * scale, 18), round_trip(codec, tokens, 18) * scale)


def test_tokens_of_different_norms_have_the_same_relative_error():
    covariance = random_covariance()
    codec = TransformCodec(fit_tables(covariance, None, HIDDEN))
    tokens = gaussian(covariance, 2000)
    tokens *= torch.logspace(-4, 4, len(tokens)).unsqueeze(1)
    error = (round_trip(codec, tokens, 18) - tokens).square().sum(1) / tokens.square().sum(1)
    stated = stated_error(codec, 18) / float(covariance.trace())
    assert float(error[:1000].mean()) == pytest.approx(float(error[1000:].mean()), rel=0.1)
    assert float(error.mean()) == pytest.approx(stated, rel=0.2)  # a mean of ratios, not a ratio of means


def test_signs_do_not_matter():
    """Values are restored in the middle of their intervals: not a bit of bias."""
    covariance = random_covariance()
    codec = TransformCodec(fit_tables(covariance, None, HIDDEN))
    tokens = gaussian(covariance, 200)
    assert torch.equal(round_trip(codec, -tokens, 18), -round_trip(codec, tokens, 18))


# Edges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("bytes_per_token", [1, 2, 3, 18, 19, 66, 200])
def test_few_tokens_of_any_size(bytes_per_token, num_tokens):
    codec = TransformCodec(fit_tables(random_covariance(), None, HIDDEN))
    assert not round_trip(codec, torch.zeros(num_tokens, HIDDEN), bytes_per_token).any()
    decoded = round_trip(codec, torch.randn(num_tokens, HIDDEN), bytes_per_token)
    assert bool(decoded.isfinite().all())
    assert bytes_per_token > GAIN_BYTES or not decoded.any()  # nothing fits beside the gain


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_tokens_are_decoded_from_anywhere_in_a_payload(num_tokens, offset):
    codec = TransformCodec(fit_tables(random_covariance(), None, HIDDEN))
    packed = codec.encode(torch.randn(num_tokens, HIDDEN), 19)
    payload = torch.cat([torch.zeros(offset, dtype=torch.uint8), packed.flatten()])
    assert torch.equal(codec.decode(payload[offset:].view(num_tokens, 19)), codec.decode(packed.clone()))


def test_zero_tokens_among_others_stay_zero():
    codec = TransformCodec(fit_tables(random_covariance(), None, HIDDEN))
    tokens = torch.randn(4, HIDDEN)
    tokens[1] = 0
    decoded = round_trip(codec, tokens, 18)
    assert not decoded[1].any() and decoded[[0, 2, 3]].any(dim=1).all()


@pytest.mark.parametrize("hidden_size", [1, 2, 3])
def test_narrow_hidden_states(hidden_size):
    codec = TransformCodec(fit_tables(torch.eye(hidden_size), torch.eye(hidden_size), hidden_size))
    tokens = torch.randn(100, hidden_size)
    decoded = round_trip(codec, tokens, GAIN_BYTES + hidden_size)
    assert float((decoded - tokens).square().mean()) < 2e-3


def test_directions_that_calibration_never_saw_do_not_spoil_the_others():
    """GPT-2's boundary gradients have no component along the ones vector; few tokens span few directions."""
    covariance = random_covariance()
    values, vectors = torch.linalg.eigh(covariance)
    seen = vectors[:, HIDDEN // 2 :]
    projection = seen @ seen.T
    codec = TransformCodec(fit_tables(projection @ covariance @ projection, None, HIDDEN))
    tokens = (gaussian(covariance, 200).double() @ projection).float()
    decoded = round_trip(codec, tokens, GAIN_BYTES + HIDDEN)  # bits for all directions
    assert float((decoded - tokens).square().sum()) < 1e-3 * float(tokens.square().sum())


def test_nothing_to_code():
    """A residual that is always zero, and a gradient that never came."""
    zero = torch.zeros(HIDDEN, HIDDEN)
    for weight in (None, zero):
        codec = TransformCodec(fit_tables(zero, weight, HIDDEN))
        assert not round_trip(codec, torch.zeros(2, HIDDEN), 18).any()


def test_same_bytes_from_equal_tables():
    covariance = random_covariance()
    codecs = [TransformCodec(fit_tables(covariance, None, HIDDEN)) for _ in range(2)]
    tokens = gaussian(covariance, 20)
    packed = [codec.encode(tokens, 18) for codec in (*codecs, codecs[0])]
    assert torch.equal(packed[0], packed[1]) and torch.equal(packed[0], packed[2])
    assert torch.equal(codecs[0].decode(packed[1]), codecs[1].decode(packed[0]))
