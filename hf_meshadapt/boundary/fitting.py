"""From the running sums of unmasked passes to what a boundary needs: predictor and transforms. Pure tensor code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .predictor import fit_mean, fit_ridge, residual_covariance, residual_energy
from .statistics import BoundaryMoments
from .transform import TransformTables, fit_tables

# Ridge of the token predictor, in tokens, for features of norm 1, and of what the loss feels, which is noisier.
RIDGE, FELT_RIDGE = 1.2, 30.0


@dataclass
class BoundaryFit:
    """What calibration found out about one boundary; both ends hold the same.

    Attributes:
        weights: (F, H) float32, hidden = features @ weights; F is 1 for the channel mean.
        forward, backward: transforms of the two directions, None where the codec needs none.
        explained: share of the held-out energy around the channel mean that the token predictor explains.
        sensitivity: mean squared gradient of context tokens and of targets, relative to all.
        felt: (2, F) float32, features @ felt predicts the 1/4th power of a token's gradient norm, for context tokens and
            for targets, relative to the mean over all; None where it was not fitted. In plain text, where every token is
            a target, the row of context tokens says that they are felt as the mean, or not at all.
    """

    weights: Tensor
    forward: TransformTables | None
    backward: TransformTables | None
    explained: float
    sensitivity: tuple[float, float] = (1.0, 1.0)
    felt: Tensor | None = None

    @classmethod
    def empty(cls, hidden_size: int) -> BoundaryFit:
        """Of codecs that need no calibration: zero is predicted."""
        return cls(torch.zeros(1, hidden_size), None, None, 0.0)

    def state(self) -> dict[str, Tensor]:
        """Everything as named tensors, for checkpoints and for the other end."""
        state = {"weights": self.weights, "explained": torch.tensor(self.explained)}
        state["sensitivity"] = torch.tensor(self.sensitivity)
        if self.felt is not None:
            state["felt"] = self.felt
        for name in ("forward", "backward"):
            tables = getattr(self, name)
            if tables is not None:
                state |= {f"{name}/{part}": tensor for part, tensor in vars(tables).items()}
        return state

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> BoundaryFit:
        def tables(name: str) -> TransformTables | None:
            parts = {key.split("/")[1]: value for key, value in state.items() if key.startswith(f"{name}/")}
            return TransformTables(**parts) if parts else None

        sensitivity = tuple(state["sensitivity"].tolist())
        explained = float(state["explained"])
        return cls(state["weights"], tables("forward"), tables("backward"), explained, sensitivity, state.get("felt"))


def fit_boundary(
    moments: BoundaryMoments, *, transforms: bool, weighted: bool = True, predicted: bool = True
) -> BoundaryFit:
    """Fits predictor and transforms.

    The token predictor is kept only where it beats the channel mean on held-out tokens: with few tokens it overfits.

    Args:
        moments: sums over all replicas' tokens.
        transforms: fit the two transforms as well.
        weighted: weigh the forward transform by what the loss feels.
        predicted: there is a predictor; else zero is predicted, and the forward transform fits what is coded then.

    Raises:
        ValueError: no token was seen.
    """
    if moments.num_tokens == 0:
        raise ValueError("calibration saw no token: give the training set longer sequences")
    mean = fit_mean(moments.features, moments.cross)
    weights, explained = mean, 0.0
    if len(moments.features) > 1:
        held = (moments.held_features, moments.held_cross, float(moments.held_energy))
        fitted = fit_ridge(moments.features, moments.cross, RIDGE)
        around_mean = residual_energy(mean, *held)
        explained = 1.0 - residual_energy(fitted, *held) / around_mean if around_mean > 0 else 0.0
        weights = fitted if explained > 0 else mean
    if not predicted:
        weights = torch.zeros_like(mean)
    forward = backward = None
    if transforms:
        size = moments.hidden.shape[0]
        covariance = residual_covariance(weights, moments.features, moments.cross, moments.hidden)
        forward = fit_tables(covariance, moments.gradients if weighted else None, size)
        backward = fit_tables(moments.gradients / moments.num_tokens, None, size)
    return BoundaryFit(weights, forward, backward, explained, _sensitivity(moments), _felt(moments))


def _sensitivity(moments: BoundaryMoments) -> tuple[float, float]:
    counts, energies = moments.energies.double().T
    if not (counts.min() > 0 and energies.min() > 0):  # only one kind of token was seen
        return 1.0, 1.0
    means = (energies / counts) / (energies.sum() / counts.sum())
    # Single precision, as the other end gets it: both must divide bytes alike.
    return tuple(means.float().tolist())


def _felt(moments: BoundaryMoments) -> Tensor | None:
    """By kind: fitted; zeros where nothing was felt; the mean of all where the kind was not seen, for it may come yet."""
    counts, sums = moments.energies[:, 0].double(), moments.felt.double()
    if sums.shape[1] == 1 or not sums[:, -1].sum() > 0:
        return None
    mean = sums[:, -1].sum() / counts.sum()
    fitted = torch.zeros_like(sums)
    for kind in range(2):
        if sums[kind, -1] > 0:
            weights = fit_ridge(moments.felt_features[kind], moments.felt[kind][:, None], FELT_RIDGE)
            fitted[kind] = weights[:, 0].double() / mean
        elif counts[kind] == 0:
            fitted[kind, -1] = 1.0
    return fitted.float()
