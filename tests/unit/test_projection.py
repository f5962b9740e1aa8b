"""Subspaces, fitted and random: what is kept, to what precision, and whose gradient comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.coder import BoundaryCoder, ReceiveCoded, SendCoded
from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.projection import BottleneckCodec, SubspaceCodec
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TOKEN
from hf_meshadapt.boundary.statistics import BoundaryMoments
from hf_meshadapt.boundary.transform import fit_tables
from hf_meshadapt.config import BoundaryConfig

from ..token_codecs import round_trip, tokens


def random_basis(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(size))).Q


# subspace ------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(x=tokens(), data=st.data())
def test_subspace_error_law(x, data):
    size = x.shape[1]
    basis = random_basis(size)
    codec = SubspaceCodec(basis)
    bytes_per_token = data.draw(st.integers(0, size + 5))
    dims = codec.num_dims(bytes_per_token)
    assert dims == min(size, max(0, bytes_per_token - 2))
    decoded = round_trip(codec, x, bytes_per_token)
    coordinates = x @ basis[:, :dims]
    outside = (x - coordinates @ basis[:, :dims].T).norm(dim=1)
    largest = coordinates.abs().amax(1) if dims else torch.zeros(len(x))
    inside = dims**0.5 * largest * (2**-7 + 2**-8)
    assert ((decoded - x).norm(dim=1) <= outside + inside + 1e-5 * x.norm(dim=1)).all()


def test_subspace_is_that_of_the_leading_principal_components():
    directions = random_basis(64).double()
    covariance = (directions / torch.arange(1, 65)) @ directions.T
    codec = SubspaceCodec(fit_tables(covariance, None, 64).synthesis)
    torch.testing.assert_close(codec.basis.T @ codec.basis, torch.eye(64), rtol=0, atol=1e-5)
    for dims in (1, 8, 32):
        overlap = codec.basis[:, :dims].double().T @ directions[:, :dims]
        torch.testing.assert_close(overlap.abs(), torch.eye(dims, dtype=torch.float64), rtol=0, atol=1e-4)
    x = (torch.randn(4000, 64, dtype=torch.float64) @ torch.linalg.cholesky(covariance).T).float()
    error = (round_trip(codec, x, 18) - x).square().sum(1).mean()
    assert float(error) == pytest.approx(sum(1 / k for k in range(17, 65)), rel=0.05)


def moments_of(hidden: torch.Tensor, gradients: torch.Tensor) -> BoundaryMoments:
    moments = BoundaryMoments.zeros(1, hidden.shape[-1], "cpu")
    everything = torch.ones(hidden.shape[:2], dtype=torch.bool)
    moments.add(torch.ones(*hidden.shape[:2], 1), hidden, everything, held_out=False)
    moments.add_gradient(torch.ones(*everything.shape, 1), gradients, ~everything, everything)
    return moments


def test_each_direction_is_fitted_to_what_it_codes():
    torch.manual_seed(0)
    hidden, gradients = torch.randn(4, 50, 16), torch.randn(4, 50, 16)
    hidden[..., 3] *= 20
    hidden[..., 7] += 300
    gradients[..., 11] *= 20
    fit = fit_boundary(moments_of(hidden, gradients), transforms=True, weighted=False)
    assert fit.forward.synthesis[:, 0].abs().argmax() == 3  # around the mean, which is predicted
    assert fit.backward.synthesis[:, 0].abs().argmax() == 11
    unpredicted = fit_boundary(moments_of(hidden, gradients), transforms=True, weighted=False, predicted=False)
    assert unpredicted.forward.synthesis[:, 0].abs().argmax() == 7 and not unpredicted.weights.any()


# bottleneck ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(x=tokens(), data=st.data())
def test_bottleneck_is_an_orthogonal_projection_up_to_rounding(x, data):
    size = x.shape[1]
    codec = BottleneckCodec(size)
    bytes_per_token = data.draw(st.integers(0, 2 * size + 3))
    decoded = round_trip(codec, x, bytes_per_token)
    columns = codec.rotation.inverse(torch.eye(size))[codec.order[: bytes_per_token // 2]]  # rows of P transposed
    projected = x @ columns.T @ columns
    assert ((decoded - projected).norm(dim=1) <= (2**-8 + 1e-5) * x.norm(dim=1)).all()
    # Less is a part of more: the subspaces are nested.
    less = codec.decode(codec.encode(decoded, bytes_per_token // 2))
    direct = codec.decode(codec.encode(x, bytes_per_token // 2))
    assert ((less - direct).norm(dim=1) <= 2**-6 * x.norm(dim=1)).all()


def test_bottleneck_keeps_its_share_of_the_energy_on_any_direction():
    codec = BottleneckCodec(576)
    kept = codec.decode(codec.encode(torch.eye(576), 2 * 144)).square().sum(1)
    assert float(kept.mean()) == pytest.approx(0.25, rel=0.01)
    assert float(kept.max()) < 0.5 and float(kept.min()) > 0.05


@pytest.mark.parametrize("exact", [False, True])
def test_the_gradient_of_a_bottleneck_is_the_true_one(exact):
    config = BoundaryConfig(
        codec="bottleneck", budget=0.3, exact_first_token=exact, wire_dtype="bfloat16", forward_share=0.75
    )
    kind = torch.tensor([[FIRST] + [TOKEN] * 7, [PADDING] * 3 + [FIRST] + [TOKEN] * 4, [FIRST, TOKEN] * 4])
    token_ids = torch.zeros(3, 8, dtype=torch.long)
    ends = [BoundaryCoder(config, 32, BoundaryFit.empty(32), None) for _ in range(2)]

    def through(hidden: torch.Tensor) -> torch.Tensor:
        payload, carrier = SendCoded.apply(hidden, ends[0], token_ids, kind)
        assert payload.shape[1] == config.sequence_bytes(8, 32, "forward") == 2 * carrier.shape[1]
        return ReceiveCoded.apply(payload, carrier, ends[1], token_ids, kind, torch.float32)

    hidden, weights = torch.randn(3, 8, 32, requires_grad=True), torch.randn(3, 8, 32)
    through(hidden).backward(weights)
    # The map is linear but for rounding: its true gradient is its transpose applied to the weights.
    identity = torch.eye(3 * 8 * 32).view(-1, 3, 8, 32)
    expected = torch.stack([(through(unit) * weights).sum() for unit in identity]).view(3, 8, 32)
    torch.testing.assert_close(hidden.grad, expected.detach(), rtol=0, atol=0.05)
    assert float((hidden.grad - expected).norm() / expected.norm()) < 0.01
    assert not hidden.grad[1, :3].any()
