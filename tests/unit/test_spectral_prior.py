"""Priors: the mean of factors is the mean of the matrices, versions change all at once, and state comes back."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.factors import Factors, compress
from hf_meshadapt.spectral.prior import AnchorPrior
from hf_meshadapt.spectral.priors import Priors
from tests.spectral_oracle import gaussian, random_matrix, truncated

MATRICES = {f"layers.{i}.{part}.weight": shape for i in range(3) for part, shape in (("q", (8, 8)), ("up", (12, 8)))}
SHAPES = {**MATRICES, "layers.0.norm.weight": (8,), "embed.weight": (20, 8)}


def make_priors(**options) -> Priors:
    config = SpectralConfig(matrix_rank=4, **options)
    return Priors([(name, torch.zeros(shape)) for name, shape in SHAPES.items()], config)


def arrival(priors: Priors, seed: int) -> dict[str, Factors | torch.Tensor]:
    """Factors for matrices and embeddings, tensors for vectors."""
    found = {}
    for i, name in enumerate(priors.held):
        shape = SHAPES[name]
        gradient = gaussian(*shape, seed=100 * seed + i)
        found[name] = compress(gradient, 4, name) if len(shape) == 2 else gradient
    return found


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(torch.equal(a, b) for a, b in zip(one, other))


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    beta=st.sampled_from([0.0, 0.5, 0.9]),
    num_updates=st.integers(1, 5),
    as_factors=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_mean_of_factors_is_the_mean_of_the_matrices_where_the_rank_suffices(
    shape, beta, num_updates, as_factors, seed
):
    prior = AnchorPrior("weight", shape, min(15, *shape), beta)
    dense, total = torch.zeros(shape), 0.0
    for version in range(num_updates):
        gradient = random_matrix(*shape, min(3, *shape), seed + version)
        prior = prior.update(compress(gradient, 3, "weight") if as_factors else gradient, version, 10 * version)
        dense, total = beta * dense + (1 - beta) * gradient, beta * total + 1 - beta
    torch.testing.assert_close(prior.mean.dense(), dense / total, atol=2e-5, rtol=0)
    assert (prior.num_updates, prior.version, prior.step) == (num_updates, num_updates - 1, 10 * num_updates - 10)


def test_a_mean_of_too_high_a_rank_stays_near_its_best_approximation():
    prior, dense, total = AnchorPrior("weight", (40, 30), 6, 0.5), torch.zeros(40, 30), 0.0
    steady = random_matrix(40, 30, 30, seed=0)
    for version in range(6):
        gradient = steady + 0.1 * random_matrix(40, 30, 30, seed=version + 1)
        prior = prior.update(compress(gradient, 6, "weight"), version, version)
        dense, total = 0.5 * dense + 0.5 * gradient, 0.5 * total + 0.5
    dense /= total
    assert (dense - prior.mean.dense()).norm() < 1.15 * (dense - truncated(dense, 6)).norm()


def test_vectors_are_averaged_whole():
    prior = AnchorPrior("norm", (2,), 0, 0.5).update(torch.tensor([1.0, 2.0]), 0, 0)
    assert prior.mean.tolist() == [1.0, 2.0]
    prior = prior.update(torch.tensor([4.0, 5.0]), 1, 7)
    torch.testing.assert_close(prior.mean, torch.tensor([3.0, 4.0]))
    assert prior.age_steps(9) == 2


def test_a_silent_anchor_gives_a_zero_prior_that_later_gradients_fill():
    prior = AnchorPrior("weight", (6, 5), 3, 0.5).update(torch.zeros(6, 5), 0, 0)
    assert (prior.mean.s == 0).all()
    matrix = random_matrix(6, 5, 3, seed=0)
    torch.testing.assert_close(prior.update(matrix, 1, 1).mean.dense(), matrix * 2 / 3, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", ["diagonal", "two_sided", "left", "right", "control_variate"])
def test_only_matrices_of_blocks_have_priors(rule):
    assert set(make_priors(rule=rule).held) == set(MATRICES)


@pytest.mark.parametrize("rule", ["blend", "anchor_only"])
def test_rules_that_add_the_prior_have_it_for_all_parameters(rule):
    priors = make_priors(rule=rule)
    assert set(priors.held) == set(SHAPES)
    priors.update(arrival(priors, 0), version=1, step=0)
    assert priors.get("embed.weight").s.shape == (4,) and priors.get("layers.0.norm.weight").shape == (8,)


def test_a_version_is_taken_in_by_slices_and_comes_into_use_whole():
    priors, at_once = make_priors(refresh_steps=4), make_priors(refresh_steps=1)
    first, second = arrival(priors, 0), arrival(priors, 1)
    priors.update(first, version=1, step=0)
    at_once.update(first, version=1, step=0)
    before = {name: priors.get(name) for name in priors.held}
    priors.receive(second, version=2, step=10)
    for _ in range(3):
        priors.advance()
        assert priors.version == 1 and priors.age_steps(15) == 15
        assert all(priors.get(name) is mean for name, mean in before.items())
    priors.advance()
    assert priors.version == 2 and priors.age_steps(15) == 5
    at_once.receive(second, version=2, step=10)
    at_once.advance()
    assert all(same(priors.get(name), at_once.get(name)) for name in priors.held)
    priors.advance()
    assert priors.version == 2


def test_stages_change_versions_with_the_whole_model():
    whole, names = make_priors(), list(MATRICES)
    stages = [Priors([(n, torch.zeros(SHAPES[n])) for n in part], whole.config) for part in (names[:1], names[1:])]
    for version in (1, 2):
        sent = arrival(whole, version)
        for priors in (whole, *stages):
            priors.receive({name: sent[name] for name in priors.held}, version, step=version)
        for _ in range(4):
            for priors in (whole, *stages):
                priors.advance()
            assert {priors.version for priors in stages} == {whole.version}
    for stage in stages:
        assert all(same(stage.get(name), whole.get(name)) for name in stage.held)


def test_a_stage_without_corrected_matrices_changes_versions_with_the_others():
    """As under adapters of late layers only; else its rank would say that there is no prior."""
    other, bare = make_priors(refresh_steps=2), Priors([("layers.0.norm.weight", torch.zeros(8))], SpectralConfig())
    bare.config = other.config
    for version in (0, 3):
        other.receive(arrival(other, version), version, step=version)
        bare.receive({}, version, step=version)
        for _ in range(3):
            again = Priors((), other.config)
            again.load_state(*json.loads(json.dumps(bare.state())))
            assert again.version == bare.version == other.version
            assert again.age_steps(9) == bare.age_steps(9) == other.age_steps(9)
            assert again.taking_in == bare.taking_in == other.taking_in
            other.advance(), bare.advance()
        assert bare.version == version
    with pytest.raises(ValueError, match="version 3 came after 3"):
        bare.receive({}, 3, step=3)
    old = other.state()[1]
    del old["newest"]  # of checkpoints that only told it by parameter
    again.load_state({}, old)
    assert again.version == 3 and again.age_steps(9) == 6


def test_a_version_that_overtakes_another_leaves_nothing_out():
    priors, patient = make_priors(), make_priors()
    for version in (1, 2, 3):
        priors.receive(arrival(priors, version), version, step=version)
        patient.update(arrival(priors, version), version, step=version)
        priors.advance()
    priors.finish()
    assert all(same(priors.get(name), patient.get(name)) for name in priors.held)
    assert priors.held["layers.0.q.weight"].num_updates == 3


def test_what_arrived_is_not_shared_with_the_sender():
    priors = make_priors(rule="anchor_only", refresh_steps=1)
    sent = arrival(priors, 0)
    priors.receive(sent, version=1, step=0)
    kept = sent["layers.0.norm.weight"].clone()
    sent["layers.0.norm.weight"].zero_()
    priors.advance()
    assert torch.equal(priors.get("layers.0.norm.weight"), kept)


def test_gradients_that_were_checked_are_neither_read_nor_copied_and_come_out_the_same():
    priors, checking = make_priors(refresh_steps=4), make_priors(refresh_steps=4)
    sent = {name: value.to(torch.bfloat16) for name, value in arrival(priors, 0).items()}
    checking.receive(sent, version=1, step=0)
    priors.receive(sent, version=1, step=0, checked=True)
    assert priors._arrival.gradients is sent and priors.taking_in
    restored = make_priors(refresh_steps=4)
    restored.load_state(*priors.state())
    for each in (checking, priors, restored):
        each.finish()
        assert not each.taking_in
        assert all(same(each.get(name), checking.get(name)) for name in priors.held)


def test_clipping_scales_what_arrives():
    priors, clipped = make_priors(rule="blend"), make_priors(rule="blend")
    priors.update(arrival(priors, 0), version=1, step=0)
    clipped.update(arrival(priors, 0), version=1, step=0, clip_coefficient=0.25)
    torch.testing.assert_close(clipped.get("embed.weight").dense(), 0.25 * priors.get("embed.weight").dense())
    torch.testing.assert_close(clipped.get("layers.0.norm.weight"), 0.25 * priors.get("layers.0.norm.weight"))


def broken(change: str, priors: Priors) -> dict:
    values = arrival(priors, 1)
    name = "layers.0.q.weight"
    if change == "missing":
        del values[name]
    if change == "foreign":
        values["layers.9.q.weight"] = values[name]
    if change == "shape":
        values[name] = compress(gaussian(8, 9, seed=0), 4, name)
    if change == "widths":
        values[name] = values[name]._replace(s=torch.ones(3))
    if change == "not finite":
        values[name] = values[name].scaled(float("nan"))
    if change == "factors of a vector":
        values["layers.0.norm.weight"] = compress(gaussian(8, 1, seed=0), 1, name)
    return values


@pytest.mark.parametrize(
    "change, version, words",
    [
        ("missing", 2, "version 2 lacks .*layers.0.q.weight.*must train the same parameters"),
        ("foreign", 2, "has foreign .*layers.9.q.weight"),
        ("shape", 2, r"layers.0.q.weight has shapes .*\(9, 4\)\], not .*\(8, 4\)\]"),
        ("widths", 2, r"layers.0.q.weight has shapes .*\(8, 4\)\], not .*\(8, 3\)\]"),
        ("not finite", 2, "version 2 is not finite"),
        ("factors of a vector", 2, "layers.0.norm.weight came as factors"),
        ("", 1, "version 1 came after 1"),
        ("", 0, "version 0 came after 1"),
    ],
)
def test_a_broken_arrival_is_named_and_changes_nothing(change, version, words):
    priors = make_priors(rule="blend")
    priors.update(arrival(priors, 0), version=1, step=0)
    held = dict(priors.held)
    with pytest.raises(ValueError, match=words):
        priors.update(broken(change, priors), version, step=1)
    assert priors.held == held and priors.version == 1


def test_a_clip_coefficient_without_effect_is_refused():
    priors = make_priors()
    with pytest.raises(ValueError, match="clip_coefficient=0.5 has no effect with rule='diagonal'"):
        priors.receive(arrival(priors, 0), version=1, step=0, clip_coefficient=0.5)


@pytest.mark.parametrize("num_advanced", [0, 2, 4])
def test_state_comes_back_bit_for_bit_even_half_way_through_a_version(num_advanced):
    priors, again = make_priors(rule="blend"), make_priors(rule="blend")
    priors.update(arrival(priors, 0), version=1, step=0)
    priors.receive(arrival(priors, 1), version=2, step=10)
    for _ in range(num_advanced):
        priors.advance()
    tensors, plain = priors.state()
    again.load_state(load(save(tensors)), json.loads(json.dumps(plain)))
    for _ in range(5):
        assert again.version == priors.version
        assert all(same(again.get(name), priors.get(name)) for name in SHAPES)
        priors.advance(), again.advance()
    assert priors.version == 2


def test_an_empty_state_comes_back():
    again = make_priors()
    again.load_state(*make_priors().state())
    assert again.version is None and again.age_steps(3) is None and again.get("layers.0.q.weight") is None


def test_a_stage_reads_its_own_entries_of_a_larger_state():
    priors = make_priors()
    priors.update(arrival(priors, 0), version=1, step=0)
    part = Priors([("layers.1.q.weight", torch.zeros(8, 8))], priors.config)
    part.load_state(*priors.state())
    assert same(part.get("layers.1.q.weight"), priors.get("layers.1.q.weight"))
    with pytest.raises(ValueError, match="no saved prior for .*layers.0.q.weight"):
        priors.load_state(*part.state())


def test_a_state_of_another_rank_is_refused():
    priors = make_priors()
    priors.update(arrival(priors, 0), version=1, step=0)
    other = Priors([("layers.1.q.weight", torch.zeros(8, 8))], SpectralConfig(matrix_rank=2))
    with pytest.raises(
        ValueError, match="layers.1.q.weight has shape .* rank 4, not .* and 2: resume with the prior_rank"
    ):
        other.load_state(*priors.state())
    assert other.version is None


def test_an_added_parameter_waits_for_the_next_version():
    priors = make_priors()
    first = arrival(priors, 0)
    priors.update(first, version=1, step=0)
    priors.add("layers.9.q.weight", torch.zeros(8, 8))
    assert priors.version == 1 and priors.get("layers.9.q.weight") is None
    priors.update({**first, "layers.9.q.weight": gaussian(8, 8, seed=0)}, version=2, step=1)
    assert priors.get("layers.9.q.weight") is not None
