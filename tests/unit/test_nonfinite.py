"""Losses, gradients and weights that are not finite stop the run before the optimizer steps."""

from __future__ import annotations

import gc
import math
import re

import pytest
import torch

from hf_meshadapt.config import CODECS
from hf_meshadapt.gradients import nonfinite_cause, spread_nonfinite
from tests.equality import mesh_trainer, tiny_model
from tests.nonfinite import FAULTS, STEP, run_into

SHORT = {"max_steps": 4, "gradient_accumulation_steps": 1, "eval_strategy": "no", "pipeline_stages": 2}
CALIBRATED = {"calibration_tokens": 100, "calibration_every": 0}


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Trainer collects garbage in full; what was there before is none."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", FAULTS)
def test_the_run_stops_and_says_where(name, tmp_path):
    fault, cause = FAULTS[name]
    trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 16, **SHORT)
    error, kept = run_into(trainer, fault)
    assert re.search(
        rf"at step {STEP} the gradient norm is not finite \(.* on stage 0, .* on stage 1\).*{cause}", error
    )
    assert "has not stepped" in error and "max_grad_norm" in error and kept


OPTIONS = [
    {"max_grad_norm": 0.0, "logging_nan_inf_filter": False},
    {"gradient_accumulation_steps": 2},
    {"pipeline_stages": 1},
    {"data_parallel_replicas": 2},
    {"data_parallel_replicas": 2, "dp_sync": "diloco"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_run_stops_whatever_else_is_set(options, tmp_path):
    trainer = mesh_trainer(tiny_model("llama"), 2, str(tmp_path), 16, **{**SHORT, **options})
    error, kept = run_into(trainer, FAULTS["loss"][0])
    assert f"at step {STEP}" in error and kept


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_a_coded_boundary_does_not_hide_it(codec, tmp_path):
    options = {**SHORT, **(CALIBRATED if codec in ("transform", "subspace") else {})}
    trainer = mesh_trainer(tiny_model("llama", 2), 4, str(tmp_path), 16, boundary_codec=codec, **options)
    error, kept = run_into(trainer, FAULTS["weight of stage 0"][0])
    assert kept, error


def test_a_model_that_is_not_finite_is_not_calibrated_on(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    trainer = mesh_trainer(model, 4, str(tmp_path), 16, preset="anchored", **SHORT)
    with pytest.raises(
        FloatingPointError, match="calibration saw .* not finite arrive at stage 1: the model's weights"
    ):
        trainer.train()


def test_the_gradient_of_a_finite_loss_is_left_alone():
    weight = torch.nn.Parameter(torch.randn(5))
    spread_nonfinite(weight.square().sum()).backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
    with torch.no_grad():
        assert math.isinf(spread_nonfinite(torch.tensor(torch.inf)))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(value):
    weight = torch.nn.Parameter(torch.randn(5))
    loss = spread_nonfinite(weight.sum() + value)
    loss.backward()
    assert not weight.grad.isfinite().any()
    assert float(loss.detach()) == value or math.isnan(value)


def test_nothing_wrong_on_this_rank():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    assert nonfinite_cause([("w", weight)], 1.0) == "every gradient is finite here"
    assert nonfinite_cause([("w", weight)], math.nan) == "the loss is nan"
