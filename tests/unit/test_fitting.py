"""What calibration looks at and what it makes of it: observer, running sums, and the fit of a boundary."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.observer import Observer, observing
from hf_meshadapt.boundary.predictor import project_embedding, token_features
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.boundary.statistics import BoundaryMoments

VOCAB, HIDDEN, SIZE = 40, 8, 6
NUM_FEATURES = 2 * SIZE + 1


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def table() -> torch.Tensor:
    return project_embedding(torch.randn(VOCAB, HIDDEN), SIZE)


def random_kind(batch: int, length: int) -> torch.Tensor:
    kind = torch.tensor([PADDING, TOKEN, FIRST, TARGET])[torch.randint(4, (batch, length))]
    return kind.to(torch.int8)


def observed(kind: torch.Tensor) -> torch.Tensor:
    return (kind == TOKEN) | (kind == TARGET)


# Observer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_table", [False, True])
def test_an_observer_sums_what_passes_and_changes_nothing(with_table):
    features_of = table() if with_table else None
    observer = Observer(HIDDEN, features_of, "cpu")
    collected = []
    for _ in range(3):
        hidden = torch.randn(2, 7, HIDDEN, requires_grad=True)
        ids, kind = torch.randint(VOCAB, (2, 7)), random_kind(2, 7)
        passed = observer(hidden, ids, kind)
        assert torch.equal(passed, hidden)
        gradient = torch.randn(2, 7, HIDDEN)
        gradient[0, 0] = 0.0
        passed.backward(gradient)
        assert torch.equal(hidden.grad, gradient)
        tokens = observed(kind)
        features = token_features(features_of, ids) if with_table else torch.ones(2, 7, 1)
        collected.append((features[tokens], hidden.detach()[tokens], gradient[tokens]))
    f, h, g = (torch.cat(parts).double() for parts in zip(*collected))
    g = torch.nn.functional.normalize(g, dim=1)  # a token that the loss does not feel stays zero
    moments = observer.moments()
    expected = {"features": f.T @ f, "cross": f.T @ h, "hidden": h.T @ h, "gradients": g.T @ g}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(moments, name).double(), value, rtol=0, atol=1e-5)
    assert moments.num_tokens == len(h)
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in moments.tensors())


def test_held_out_passes_are_kept_apart():
    observer = Observer(HIDDEN, table(), "cpu")
    observer.held_out = True
    hidden, ids = torch.randn(2, 5, HIDDEN, requires_grad=True), torch.randint(VOCAB, (2, 5))
    kind = torch.full((2, 5), TOKEN)
    observer(hidden, ids, kind).sum().backward()
    moments = observer.moments()
    for name in ("features", "cross", "hidden", "gradients", "energies"):
        assert not getattr(moments, name).any(), name
    f, h = token_features(observer.table, ids).flatten(0, 1), hidden.detach().flatten(0, 1)
    torch.testing.assert_close(moments.held_features, f.T @ f)
    torch.testing.assert_close(moments.held_cross, f.T @ h)
    torch.testing.assert_close(moments.held_energy, h.square().sum().view(1))


def test_half_precision_is_summed_in_single():
    observer = Observer(HIDDEN, None, "cpu")
    hidden = torch.randn(1, 300, HIDDEN).bfloat16().requires_grad_()
    observer(hidden, None, torch.full((1, 300), TOKEN)).sum().backward()
    h = hidden.detach().double().squeeze(0)
    torch.testing.assert_close(observer.moments().hidden.double(), h.T @ h, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("named", [False, True], ids=["positional", "named"])
def test_what_enters_a_layer_is_observed_in_single_precision_while_it_lasts(named):
    class Layer(torch.nn.Module):
        def forward(self, hidden_states, scale=2.0):
            return scale * hidden_states

    layers = torch.nn.ModuleList([Layer(), Layer()])
    plain, entering = Observer(HIDDEN, table(), "cpu"), Observer(HIDDEN, table(), "cpu")
    plain.table = entering.table
    hidden, ids, kind = torch.randn(2, 7, HIDDEN), torch.randint(VOCAB, (2, 7)), random_kind(2, 7)
    plain(hidden, ids, kind).sum().backward()
    with torch.autocast("cpu", torch.bfloat16), observing(layers._modules, {1: entering}, ids, kind):
        passed = layers[1](hidden_states=layers[0](hidden, 1.0), scale=3.0) if named else layers[1](hidden, 3.0)
    assert torch.equal(passed, 3 * hidden)
    (passed / 3).sum().backward()  # though nothing is trained
    layers[1](hidden)
    for name, expected in vars(plain.moments()).items():
        torch.testing.assert_close(getattr(entering.moments(), name), expected, msg=name)


def test_replicas_have_sums_of_their_own_that_add_up():
    both, alone = Observer(HIDDEN, None, "cpu", replicas=2), [Observer(HIDDEN, None, "cpu") for _ in range(2)]
    for replica in (1, 0):
        hidden, kind = torch.randn(2, 5, HIDDEN), torch.full((2, 5), TOKEN)
        both.replica = replica
        both(hidden, None, kind)
        alone[replica](hidden, None, kind)
    parts = zip(both.moments().tensors(), alone[0].moments().tensors(), alone[1].moments().tensors())
    assert all(torch.equal(total, first + second) for total, first, second in parts)


# Fit -----------------------------------------------------------------------------------------------------------------


def moments_of(
    num_tokens: int, noise: float, features_of: torch.Tensor | None, held_tokens: int = 500
) -> BoundaryMoments:
    """Of hidden states that are, but for noise, linear in the token's features, around a mean."""
    moments = BoundaryMoments.zeros(1 if features_of is None else NUM_FEATURES, HIDDEN, "cpu")
    truth = torch.randn(NUM_FEATURES, HIDDEN, generator=torch.Generator().manual_seed(1))
    source = table() if features_of is None else features_of
    for count, held_out in ((num_tokens, False), (held_tokens, True))[: 1 + bool(held_tokens)]:
        full = token_features(source, torch.randint(VOCAB, (1, count)))
        hidden = full @ truth + noise * torch.randn(1, count, HIDDEN)
        features = full if features_of is not None else torch.ones(1, count, 1)
        moments.add(features, hidden, torch.ones(1, count, dtype=torch.bool), held_out)
    gradient, all_tokens = torch.randn(1, num_tokens, HIDDEN), torch.ones(1, num_tokens, dtype=torch.bool)
    features = gradient.new_ones(1, num_tokens, len(moments.features))
    moments.add_gradient(features, gradient, all_tokens, ~all_tokens)
    return moments


def predicts_the_mean(fit: BoundaryFit, moments: BoundaryMoments) -> bool:
    return not fit.weights[:-1].any() and torch.allclose(fit.weights[-1], moments.cross[-1] / moments.num_tokens)


def test_the_token_predictor_is_kept_where_it_generalises():
    fit = fit_boundary(moments_of(1000, 0.1, table()), transforms=False)
    assert fit.explained > 0.9 and fit.weights[:-1].any()
    assert fit.forward is None and fit.backward is None


def test_a_token_predictor_that_overfits_falls_back_to_the_mean():
    moments = moments_of(2 * NUM_FEATURES, 30.0, table())
    fit = fit_boundary(moments, transforms=False)
    assert fit.explained < 0 and predicts_the_mean(fit, moments)


def test_without_held_out_tokens_nothing_is_trusted_but_the_mean():
    moments = moments_of(1000, 0.1, table(), held_tokens=0)
    fit = fit_boundary(moments, transforms=False)
    assert fit.explained == 0.0 and predicts_the_mean(fit, moments)


def test_a_constant_feature_gives_the_mean():
    moments = moments_of(100, 1.0, None)
    fit = fit_boundary(moments, transforms=True)
    assert fit.weights.shape == (1, HIDDEN) and predicts_the_mean(fit, moments)
    assert fit.explained == 0.0


def test_no_token_is_refused():
    with pytest.raises(ValueError, match="calibration saw no token.*longer sequences"):
        fit_boundary(BoundaryMoments.zeros(NUM_FEATURES, HIDDEN, "cpu"), transforms=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_transforms_fit_the_residual_and_the_gradients(weighted):
    """At full size: variances add up to the energy per token, weighted by C + 0.1 mean(diag C) I if asked for."""
    moments = moments_of(1000, 1.0, table())
    fit = fit_boundary(moments, transforms=True, weighted=weighted)
    f, h = moments.features.double(), moments.hidden.double()
    weights = fit.weights.double()
    cross = weights.T @ moments.cross.double()
    residual = (h - cross - cross.T + weights.T @ f @ weights) / moments.num_tokens
    metric = torch.eye(HIDDEN).double()
    if weighted:
        gradients = moments.gradients.double()
        metric = gradients / gradients.diagonal().mean() + 0.1 * metric
    assert float(fit.forward.variances.sum()) == pytest.approx(float((metric @ residual).trace()), rel=1e-4)
    assert float(fit.backward.variances.sum()) == pytest.approx(1.0, rel=1e-4)  # gradients of norm 1
    assert fit.forward.analysis.shape == fit.backward.synthesis.shape == (HIDDEN, HIDDEN)


def test_sensitivity_is_the_mean_squared_gradient_of_context_and_targets_relative_to_all():
    moments = moments_of(10, 1.0, None)
    assert fit_boundary(moments, transforms=False).sensitivity == (1.0, 1.0)  # no target was seen
    moments.energies.zero_()
    gradient, target = torch.randn(3, 20, HIDDEN), torch.rand(3, 20) < 0.4
    gradient[target] *= 3
    moments.add_gradient(torch.ones(3, 20, 1), gradient, ~target, target)
    squares = gradient.square().sum(2)
    expected = [float(squares[tokens].mean() / squares.mean()) for tokens in (~target, target)]
    assert fit_boundary(moments, transforms=False).sensitivity == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("transforms", [False, True])
@pytest.mark.parametrize("with_table", [False, True])
def test_a_fit_survives_as_named_tensors(transforms, with_table):
    fit = fit_boundary(moments_of(300, 1.0, table() if with_table else None), transforms=transforms)
    state = fit.state()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())  # as it is handed to the other end
    again = BoundaryFit.from_state({name: tensor.clone() for name, tensor in state.items()})
    assert again.state().keys() == state.keys()
    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in state.items())
