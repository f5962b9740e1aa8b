"""Each rule against its full-SVD oracle, the identities that hold, weights of old priors, and refused settings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.spectral.config import FILTER_RULES, RULES, SpectralConfig, kind_of, prior_rank, prior_values
from hf_meshadapt.spectral.correction import alignment, correct_, filter_weights, filtered, prior_weight
from hf_meshadapt.spectral.factors import compress
from tests.spectral_oracle import correction_oracle, filter_oracle, gaussian, random_matrix

CORRECTING = RULES[:-1]
TAUS = [{"tau": 0.1}, {"tau": 1e-3, "tau_relative": False}]


def config_of(rule: str, **options) -> SpectralConfig:
    return SpectralConfig(rule=rule, **{key: value for key, value in options.items() if rule in FILTER_RULES})


def corrected(gradient, prior, *args) -> torch.Tensor:
    result = gradient.clone()
    correct_(result, prior, *args)
    return result


@pytest.mark.parametrize("shape,rank", [((9, 14), 4), ((14, 9), 9)], ids=str)
def test_alignment_is_that_of_dense_matrices(shape, rank):
    gradient, matrix = gaussian(*shape, seed=1), random_matrix(*shape, rank, seed=2)
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    inside = u[:, :rank] @ u[:, :rank].T @ gradient.double() @ vh[:rank].T @ vh[:rank]
    expected = [gradient.square().sum(), inside.square().sum(), (gradient * matrix).sum(), matrix.square().sum()]
    found = alignment(gradient, compress(matrix, rank, "a"))
    assert found.tolist() == pytest.approx([float(value) for value in expected], rel=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    rule=st.sampled_from(CORRECTING),
    shape=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    rank=st.integers(1, 30),
    tau=st.sampled_from(TAUS),
    weight=st.sampled_from([0.25, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_every_rule_equals_its_oracle_at_full_and_at_low_rank(rule, shape, rank, tau, weight, dtype, seed):
    matrix = random_matrix(*shape, min(rank, *shape), seed)
    gradient = gaussian(*shape, seed=seed + 1).to(dtype)
    config, weight = config_of(rule, **tau), 1.0 if rule == "anchor_only" else weight
    found = corrected(gradient, compress(matrix, rank, "weight"), config, weight, 0.5)
    assert found.dtype == dtype
    wanted = correction_oracle(gradient, matrix, config, weight, 0.5)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rule", ["blend", "control_variate", "anchor_only"])
def test_vectors_take_whole_priors(rule):
    gradient, prior = gaussian(9, seed=0), gaussian(9, seed=1)
    config, weight = SpectralConfig(rule=rule), 1.0 if rule == "anchor_only" else 0.5
    found = corrected(gradient, prior, config, weight, 0.5)
    wanted = correction_oracle(gradient, prior, config, weight, 0.5)
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rule", FILTER_RULES)
def test_a_zero_prior_passes_nothing(rule):
    gradient, prior = gaussian(6, 5, seed=0), compress(torch.zeros(6, 5), 4, "weight")
    weights = filter_weights(prior.s, 0.1, True)
    assert (weights == 0).all()
    left, right = filtered(rule, gradient, prior, weights)
    assert (left @ right == 0).all()
    torch.testing.assert_close(corrected(gradient, prior, SpectralConfig(rule=rule), 1.0), 0.3 * gradient)


def test_filter_weights():
    s = torch.tensor([4.0, 1.0, 0.0])
    torch.testing.assert_close(filter_weights(s, 1.0, relative=False), torch.tensor([0.8, 0.5, 0.0]))
    torch.testing.assert_close(filter_weights(s, 0.25, relative=True), torch.tensor([0.8, 0.5, 0.0]))
    assert filter_weights(torch.zeros(0), 0.1, relative=True).shape == (0,)


# With every singular value far above tau, a filter is a projection onto the prior's directions.
PROJECTIONS = [
    ("left", (6, 6), True),
    ("right", (6, 6), True),
    ("two_sided", (6, 6), True),
    ("diagonal", (6, 6), False),
    ("right", (9, 6), True),  # tall: all of the row space
    ("left", (6, 9), True),  # wide: all of the column space
    ("left", (9, 6), False),
    ("right", (6, 9), False),
    ("two_sided", (9, 6), False),
]


@pytest.mark.parametrize("rule, shape, identity", PROJECTIONS)
def test_full_rank_priors_let_through_what_they_span(rule, shape, identity):
    gradient = gaussian(*shape, seed=0)
    prior = compress(random_matrix(*shape, 6, seed=1, decay=0.9), 6, "weight")
    weights = filter_weights(prior.s, 1e-9, relative=True)
    left, right = filtered(rule, gradient, prior, weights)
    once = left @ right
    assert torch.allclose(once, gradient, atol=1e-4) == identity
    left, right = filtered(rule, once, prior, weights)
    torch.testing.assert_close(left @ right, once, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule, mirrored", [*((r, r) for r in ("diagonal", "two_sided")), ("left", "right")])
def test_rules_turn_with_the_matrix(rule, mirrored):
    gradient, matrix = gaussian(7, 5, seed=0), random_matrix(7, 5, 3, seed=1)
    found = corrected(gradient, compress(matrix, 3, "weight"), SpectralConfig(rule=rule), 1.0)
    turned = corrected(gradient.T.contiguous(), compress(matrix.T, 3, "weight"), SpectralConfig(rule=mirrored), 1.0)
    torch.testing.assert_close(found, turned.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", FILTER_RULES)
def test_filters_keep_the_scale_of_clipping_and_of_the_prior(rule):
    gradient, matrix = gaussian(7, 5, seed=0), random_matrix(7, 5, 3, seed=1)
    config, prior = SpectralConfig(rule=rule), compress(matrix, 3, "weight")
    found = corrected(gradient, prior, config, 1.0)
    torch.testing.assert_close(corrected(0.01 * gradient, prior, config, 1.0), 0.01 * found)
    torch.testing.assert_close(corrected(gradient, prior.scaled(100.0), config, 1.0), found)


@pytest.mark.parametrize("rule", FILTER_RULES)
def test_the_priors_own_direction_loses_what_the_filter_takes(rule):
    matrix = random_matrix(7, 5, 3, seed=1)
    config = SpectralConfig(rule=rule)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    d = s / (s + 0.1 * s[0])
    wanted = (u * (d.square() if rule == "two_sided" else d) * s) @ vh
    torch.testing.assert_close(filter_oracle(matrix, matrix, config).float(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", CORRECTING)
def test_gradients_need_not_be_contiguous(rule):
    gradient, prior = gaussian(5, 7, seed=0), compress(random_matrix(7, 5, 3, seed=1), 3, "weight")
    turned, plain = gradient.clone().T, gradient.T.contiguous()
    correct_(turned, prior, SpectralConfig(rule=rule), 1.0)
    correct_(plain, prior, SpectralConfig(rule=rule), 1.0)
    torch.testing.assert_close(turned, plain)


def test_anchor_only_forgets_even_a_gradient_that_is_not_finite():
    gradient, matrix = torch.full((7, 5), float("nan")), random_matrix(7, 5, 3, seed=1)
    correct_(gradient, compress(matrix, 3, "weight"), SpectralConfig(rule="anchor_only"), 1.0)
    torch.testing.assert_close(gradient, matrix, atol=1e-5, rtol=0)


def test_blend_of_a_zero_gradient_is_the_prior_alone():
    gradient, prior = torch.zeros(5), torch.ones(5)
    assert corrected(gradient, prior, SpectralConfig(rule="blend"), 1.0).tolist() == [0.5] * 5


@pytest.mark.parametrize(
    "age_steps, weight", [(0, 1.0), (20, 1.0), (25, 1.0), (30, 0.8), (49, 0.04), (50, 0.0), (500, 0.0)]
)
def test_weight_falls_with_age(age_steps, weight):
    assert prior_weight(age_steps, 10, max_staleness=50, ramp_steps=0) == pytest.approx(weight)


def test_weight_rises_with_use():
    weights = [prior_weight(0, live, max_staleness=50, ramp_steps=4) for live in range(6)]
    assert weights == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert prior_weight(30, 0, max_staleness=50, ramp_steps=4) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rule": "svd"}, "rule='svd' must be one of diagonal"),
        ({"alpha": 1.5}, r"alpha=1.5 must lie in \[0, 1\]"),
        ({"alpha": float("nan")}, r"alpha=nan must lie in \[0, 1\]"),
        ({"tau": 0.0}, "tau=0.0 must be above 0"),
        ({"tau": float("nan")}, "tau=nan must be above 0"),
        ({"matrix_rank": 0}, "matrix_rank=0 must be a whole number of at least 1"),
        ({"max_staleness": 2.5}, "max_staleness=2.5 must be a whole number"),
        ({"refresh_steps": 0}, "refresh_steps=0 must be"),
        ({"ramp_steps": -1}, "ramp_steps=-1 must be"),
        ({"ema_beta": 1.0}, "ema_beta=1.0 must lie in"),
        ({"rule": "blend", "blend_weight": -0.1}, "blend_weight=-0.1 must lie in"),
        ({"rule": "blend", "alpha": 0.5}, "alpha=0.5 has no effect with rule='blend'"),
        ({"rule": "anchor_only", "ramp_steps": 5}, "ramp_steps=5 has no effect with rule='anchor_only'"),
        ({"rule": "none", "matrix_rank": 32}, "matrix_rank=32 has no effect with rule='none'"),
        ({"blend_weight": 0.4}, "blend_weight=0.4 has no effect with rule='diagonal'.*blend"),
    ],
)
def test_wrong_settings_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        SpectralConfig(**options)


def test_defaults_of_the_mean():
    assert SpectralConfig().beta == 0.5 and SpectralConfig(rule="anchor_only").beta == 0.0
    assert SpectralConfig(rule="anchor_only", ema_beta=0.9).beta == 0.9


@pytest.mark.parametrize(
    "name, shape, kind",
    [
        ("model.layers.3.self_attn.q_proj.weight", (8, 8), "matrix"),
        ("transformer.h.0.attn.c_attn.weight", (8, 24), "matrix"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", (4, 8), "matrix"),
        ("0.weight", (4, 8), "matrix"),
        ("model.layers.3.input_layernorm.weight", (8,), "vector"),
        ("model.embed_tokens.weight", (100, 8), "embedding"),
        ("lm_head.weight", (100, 8), "embedding"),
        ("transformer.wpe.weight", (64, 8), "embedding"),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), "stack"),
    ],
)
def test_what_a_parameter_is(name, shape, kind):
    assert kind_of(name, shape) == kind


def test_tables_inside_blocks_can_be_named():
    assert kind_of("0.weight", (30, 8), embeddings={"0.weight"}) == "embedding"


def test_stacks_are_refused_where_all_parameters_need_priors():
    name, shape = "model.layers.0.mlp.experts.down_proj", (4, 8, 16)
    assert prior_rank(SpectralConfig(), name, shape) is None
    with pytest.raises(NotImplementedError, match="experts.down_proj.*diagonal"):
        prior_rank(SpectralConfig(rule="blend"), name, shape)


def test_bytes_of_factors_against_dense_gradients():
    """SmolLM2-135M and Llama-3.2-1B, embeddings excluded: under 20% and 15% at rank 64, under 5% at rank 16."""
    smollm2 = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
    smollm2 |= {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
    config = SpectralConfig()
    values = 30 * sum(prior_values(config, f"layers.0.{name}", shape) for name, shape in smollm2.items())
    assert values == 30 * 64 * (2 * 1153 + 2 * 769 + 3 * 2113)
    assert values / 134_515_008 < 0.2
    assert prior_values(config, "model.embed_tokens.weight", (49152, 576)) == 0
    blend = SpectralConfig(rule="blend")
    assert prior_values(blend, "model.embed_tokens.weight", (49152, 576)) == 64 * (49152 + 576 + 1)
    assert prior_values(blend, "model.norm.weight", (576,)) == 576
