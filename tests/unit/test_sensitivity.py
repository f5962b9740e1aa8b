"""Which tokens are coded finer: whole numbers from tables against the regression that they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.observer import Observer
from hf_meshadapt.boundary.predictor import token_features
from hf_meshadapt.boundary.sensitivity import CAUTION, TokenSensitivity
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.boundary.symbol_model import UNITS

VOCAB, SIZE, HIDDEN = 30, 4, 8


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def table() -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(VOCAB, SIZE), dim=1).bfloat16()


def test_offsets_are_those_of_the_regression_up_to_rounding():
    features_of, felt = table(), 0.15 * torch.randn(2, 2 * SIZE + 1)
    felt[:, -1] += 1
    sensitivity = TokenSensitivity(BoundaryFit(torch.zeros(1, HIDDEN), None, None, 0.0, felt=felt), features_of)
    ids, kind = torch.randint(VOCAB, (40,)), torch.tensor(([FIRST] + [TOKEN, TARGET] * 7) * 2 + [PADDING] * 10)
    features = token_features(features_of, ids[None], kind[None] == FIRST)[0]
    roots = (features * felt[(kind == TARGET).long()]).sum(1).double()
    expected = -0.5 * CAUTION * 8 * roots.clamp(0.5, 2).log2() * UNITS
    offsets = sensitivity.offsets(ids.numpy(), kind.numpy())
    assert offsets.dtype == np.int64
    assert np.abs(offsets - expected.numpy()).max() <= 1


def test_without_a_regression_context_and_targets_are_told_apart():
    sensitivity = TokenSensitivity(BoundaryFit(torch.zeros(1, HIDDEN), None, None, 0.0, (0.25, 4.0)), None)
    offsets = sensitivity.offsets(np.zeros(3, dtype=np.int64), np.array([TOKEN, TARGET, PADDING]))
    assert offsets.tolist() == [UNITS, -UNITS, UNITS]


ANSWERS, PLAIN_TEXT = [FIRST] + [TOKEN] * 9 + [TARGET] * 10, [FIRST] + [TARGET] * 19


def observed(gradients_of, kinds: list[int] = ANSWERS) -> BoundaryFit:
    """A fit on batches whose gradients are `gradients_of(token_ids, kind)`, (B, T) norms."""
    torch.manual_seed(0)
    observer = Observer(HIDDEN, table(), "cpu")
    for _ in range(20):
        ids, kind = torch.randint(VOCAB, (8, 20)), torch.tensor(kinds).expand(8, 20)
        direction = torch.nn.functional.normalize(torch.randn(8, 20, HIDDEN), dim=2)
        passed = observer(torch.randn(8, 20, HIDDEN, requires_grad=True), ids, kind)
        passed.backward(direction * gradients_of(ids, kind)[..., None])
    return fit_boundary(observer.moments(), transforms=True), observer.table


def test_tokens_with_larger_gradients_are_coded_finer():
    loud = table()[:, 0] > 0
    fit, features_of = observed(lambda ids, kind: torch.where(loud[ids], 4.0, 1.0))
    ids = np.arange(VOCAB)
    offsets = TokenSensitivity(fit, features_of).offsets(ids, np.full(VOCAB, TOKEN))
    difference = offsets[~loud.numpy()].mean() - offsets[loud.numpy()].mean()
    # Four times the gradient is two octaves; less, since a linear function of four features tells the two sets apart.
    assert 0.3 * CAUTION * 2 * UNITS < difference < CAUTION * 2 * UNITS


@pytest.mark.parametrize("last", [TARGET, TOKEN])
def test_tokens_of_plain_text_are_told_apart_too(last):
    """Its last token predicts nothing: context, where it is not taken for a target, and no gradient reaches it."""
    loud = table()[:, 0] > 0
    fit, features_of = observed(
        lambda ids, kind: torch.where(kind == TARGET, torch.where(loud[ids], 4.0, 1.0), 0.0), PLAIN_TEXT[:-1] + [last]
    )
    ids, sensitivity = np.arange(VOCAB), TokenSensitivity(fit, features_of)
    context, targets = (sensitivity.offsets(ids, np.full(VOCAB, kind)) for kind in (TOKEN, TARGET))
    difference = targets[~loud.numpy()].mean() - targets[loud.numpy()].mean()
    assert 0.3 * CAUTION * 2 * UNITS < difference < CAUTION * 2 * UNITS
    assert (
        context == (0 if last == TARGET else round(4 * CAUTION * UNITS))
    ).all()  # as the mean, or as coarse as can be


def test_nothing_felt_is_nothing_fitted():
    fit, _ = observed(lambda ids, kind: torch.zeros(ids.shape), PLAIN_TEXT)
    assert fit.felt is None and fit.sensitivity == (1.0, 1.0)


def test_targets_are_coded_finer_than_context_by_the_ratio_of_their_gradients():
    fit, features_of = observed(lambda ids, kind: torch.where(kind == TARGET, 2.0, 1.0))
    sensitivity, ids = TokenSensitivity(fit, features_of), np.arange(VOCAB)
    context, targets = (sensitivity.offsets(ids, np.full(VOCAB, k)).mean() for k in (TOKEN, TARGET))
    assert context - targets == pytest.approx(CAUTION * UNITS, rel=0.1)


def test_scale_of_the_loss_does_not_matter():
    fits = []
    for scale in (1.0, 1e-3):
        fits.append(observed(lambda ids, kind, scale=scale: scale * (1.0 + ids % 3))[0])
    torch.testing.assert_close(fits[0].felt, fits[1].felt)
    assert math.isfinite(float(fits[0].felt.sum()))


def test_both_ends_come_to_the_same_numbers_from_the_same_fit():
    fit, features_of = observed(lambda ids, kind: 1.0 + ids % 5)
    other = BoundaryFit.from_state({name: tensor.clone() for name, tensor in fit.state().items()})
    ids, kind = np.arange(VOCAB), np.full(VOCAB, TARGET)
    first, second = (TokenSensitivity(f, features_of).offsets(ids, kind) for f in (fit, other))
    assert (first == second).all()
