"""Priors between the link and the optimizer: what is refused, and how they reach the other replicas."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.anchor.messages import Message
from hf_meshadapt.anchoring.prior import Prior, pack, payload_bytes, read_prior, unpack
from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.factors import to_tensors
from hf_meshadapt.spectral.priors import Priors

SHAPES = {"layers.0.tall": (9, 4), "layers.0.norm": (4,), "embedding": (11, 4)}
CONFIG = SpectralConfig(rule="blend", matrix_rank=3)


def held(config: SpectralConfig = CONFIG) -> dict:
    return Priors(((name, torch.empty(shape)) for name, shape in SHAPES.items()), config).held


def message(**fields) -> Message:
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    fields = {"version": 6, "stage": 0, "num_batches": 2, "gradient_norm": 1.5, **fields}
    return Message("prior", fields, to_tensors(GradientCompressor(CONFIG).compress(gradients)))


def test_a_prior_reaches_other_replicas_bit_for_bit():
    prior = read_prior(message(), held())
    payload = pack(prior, held())
    assert len(payload) == payload_bytes(held())
    other = unpack(payload, held())
    assert (other.version, other.gradient_norm, other.num_batches) == (6, 1.5, 2)
    sent, arrived = to_tensors(prior.values), to_tensors(other.values)
    assert sent.keys() == arrived.keys()
    assert all(
        torch.equal(tensor, arrived[key]) and arrived[key].dtype == tensor.dtype for key, tensor in sent.items()
    )


def test_no_prior_is_told_too():
    assert unpack(pack(None, held()), held()) is None


def test_a_stage_without_priors_has_an_empty_one():
    prior = Prior(3, 0.5, 1, {})
    assert unpack(pack(prior, {}), {}) == prior


@pytest.mark.parametrize("norm", [None, float("nan"), float("inf"), "1.5", 2])
def test_a_prior_without_a_norm_is_refused(norm):
    with pytest.raises(ValueError, match="gradient_norm"):
        read_prior(message(gradient_norm=norm), held())


@pytest.mark.parametrize(
    "config", [SpectralConfig(rule="blend", matrix_rank=2), SpectralConfig(matrix_rank=3)], ids=str
)
def test_priors_of_another_form_are_refused(config):
    with pytest.raises(ValueError, match="Give both circuits the same model, correction_rule and prior_rank"):
        read_prior(message(), held(config))


def test_a_cold_compressor_depends_on_nothing_but_the_gradients():
    generator = torch.Generator().manual_seed(3)
    first, second = ({"layers.0.tall": torch.randn(9, 4, generator=generator)} for _ in range(2))
    after = GradientCompressor(CONFIG, warm=False)
    after.compress(first)
    alone, later = (to_tensors(one.compress(second)) for one in (GradientCompressor(CONFIG, warm=False), after))
    assert all(torch.equal(alone[key], later[key]) for key in alone)
