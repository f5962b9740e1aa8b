"""Calibrated boundaries over ranks: the emulated mesh's run bit for bit, resumed ones too, and the bytes on sockets."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from hf_meshadapt.calibration import calibration_interval, held_out
from tests import traffic
from tests.equality import collate, mesh_trainer, tiny_model
from tests.runs import ROWS, assert_same_run, fork, train

# A wide budget, so that 32 channels have room for an exact first token and a few bits each.
CALIBRATED = dict(
    preset="anchored", boundary_budget=0.4, calibration_tokens=600,
    num_rows=40, max_steps=4, learning_rate=1e-2, eval_steps=3,
)  # fmt: skip
INTERLEAVED = dict(pipeline_schedule="interleaved", pipeline_chunks_per_rank=2)
# Random masks take no budget.
MASKED = CALIBRATED | dict(mask_ratio=0.9, boundary_budget=None)


def collate_packed(rows):
    """Several sequences in every row, told by their positions alone."""
    ids, labels, positions = [], [], []
    for first in range(len(rows)):
        sequences = [rows[(first + i) % len(rows)] for i in range(3)]
        ids.append(torch.cat([s["input_ids"] for s in sequences])[:18])
        labels.append(torch.cat([torch.cat([torch.tensor([-100]), s["labels"][1:]]) for s in sequences])[:18])
        positions.append(torch.cat([torch.arange(len(s["input_ids"])) for s in sequences])[:18])
    return {"input_ids": torch.stack(ids), "labels": torch.stack(labels), "position_ids": torch.stack(positions)}


CASES = {
    # model, stages, replicas, further arguments
    "2x1": ("llama_tied", 2, 1, CALIBRATED),
    "2x2": ("gpt2", 2, 2, CALIBRATED),
    "3x1": ("llama", 3, 1, CALIBRATED),
    "interleaved": ("llama_tied", 2, 1, CALIBRATED | INTERLEAVED),
    "1f1b": ("gpt2", 2, 1, CALIBRATED | dict(pipeline_schedule="1f1b")),
    "bf16": ("llama", 2, 1, CALIBRATED | dict(bf16=True)),
    "left-padded": ("llama", 2, 1, CALIBRATED | dict(collator=functools.partial(collate, multiple=16, left=True))),
    "packed": ("llama", 2, 1, CALIBRATED | dict(collator=collate_packed)),
    "energy-weighted": ("gpt2", 2, 1, CALIBRATED | dict(loss_weighted=False, boundary_predictor="mean")),
    "masked-token": ("llama", 2, 2, MASKED | dict(exact_first_token=True, boundary_predictor="token")),
    "masked-mean": ("gpt2", 2, 1, MASKED | dict(boundary_predictor="mean", bf16=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_distributed_equals_emulated_bit_for_bit(case, tmp_path):
    ranks, emulated = run_both(*CASES[case], tmp_path)
    assert all(run["calibrations"] == 1 and not run["warnings"] for run in (*ranks, emulated))


def run_both(kind: str, stages: int, replicas: int, options: dict, folder: Path) -> tuple[list[dict], dict]:
    """Outcomes over ranks and in the emulated mesh, which are the same."""
    options = dict(kind=kind, pipeline_stages=stages, **options)
    ranks = fork(train, stages * replicas, folder=folder / "ranks", **options)
    (emulated,) = fork(train, 1, folder=folder / "emulated", data_parallel_replicas=replicas, **options)
    assert_same_as_emulated(ranks, emulated)
    return ranks, emulated


def assert_same_as_emulated(ranks: list[dict], emulated: dict) -> None:
    for part in ("weights", "fits"):
        held = {name: tensor for run in ranks for name, tensor in run[part].items()}
        assert held.keys() == emulated[part].keys()
        for run in ranks:
            for name, tensor in run[part].items():
                assert torch.equal(tensor, emulated[part][name]), name
    for run in ranks:
        assert run["loss"] == pytest.approx(emulated["loss"], rel=1e-6)  # the logs' mean rounds, weights do not
        assert run["grad_norm"] == pytest.approx(emulated["grad_norm"], rel=1e-6)
        assert run["eval_loss"] == pytest.approx(emulated["eval_loss"], rel=1e-6)


def test_what_is_calibrated_changes_the_run_and_a_wide_budget_is_nearly_dense(tmp_path):
    """The test above compares coded with coded: make sure that something is coded at all."""
    variants = {
        "dense": dict(preset="dense", wire_dtype="bfloat16", boundary_budget=None, calibration_tokens=None),
        "default": {},
        "energy": dict(loss_weighted=False),
        "mean": dict(boundary_predictor="mean"),
        "narrow": dict(boundary_budget=0.25),
        "wide": dict(boundary_budget=1.0, forward_share=0.5),
    }
    norms = {}
    for name, extra in variants.items():
        options = CALIBRATED | dict(max_steps=1, eval_strategy="no", pipeline_stages=2) | extra
        (run,) = fork(train, 1, folder=tmp_path / name, kind="llama", **options)
        norms[name] = run["grad_norm"][0]
        assert run["calibrations"] == (name != "dense")
    assert len({round(norm, 6) for norm in norms.values()}) == len(norms), norms
    assert norms["wide"] == pytest.approx(norms["dense"], rel=0.02)


def test_boundaries_compute_outside_of_autocast(tmp_path):
    """Sums, fits and codes are single precision in a bfloat16 run too."""
    options = CALIBRATED | dict(max_steps=1, eval_strategy="no", bf16=True, pipeline_stages=2)
    trainer = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), **options)
    stages = list(trainer.engine.parts.stages.values())
    autocast = {"boundary": set(), "model": set()}
    note = lambda where: lambda *_: autocast[where].add(torch.is_autocast_enabled("cpu"))  # noqa: E731
    for end in (stages[0].send, stages[1].receive):
        end.register_forward_pre_hook(note("boundary"))
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(note("model"))
    trainer.train()
    assert autocast == {"boundary": {False}, "model": {True}}


# Resuming ------------------------------------------------------------------------------------------------------------

RESUMES = {
    "2x1": ("llama_tied", 2, 1, CALIBRATED | dict(dropout=0.2)),
    "2x2": ("gpt2", 2, 2, CALIBRATED | dict(dropout=0.2)),
    "interleaved": ("llama_tied", 2, 1, CALIBRATED | INTERLEAVED | dict(dropout=0.2)),
    "masked-token": ("llama", 2, 1, MASKED | dict(boundary_predictor="token", dropout=0.2)),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resumed_run_keeps_its_fits_and_equals_the_uninterrupted_one(case, tmp_path):
    kind, stages, replicas, options = RESUMES[case]
    options = dict(folder=tmp_path / "run", kind=kind, pipeline_stages=stages, **options)
    whole = fork(train, stages * replicas, save_at=(2,), **options)
    resumed = fork(train, stages * replicas, resume=True, **options)
    assert_same_run(resumed, whole)
    assert [run["calibrations"] for run in (*whole, *resumed)] == [1] * len(whole) + [0] * len(resumed)
    assert not any(run["warnings"] for run in resumed)


def test_the_emulated_mesh_takes_over_a_distributed_run_and_hands_it_back(tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", pipeline_stages=2, **CALIBRATED)
    whole = fork(train, 4, save_at=(2,), **options)
    (emulated,) = fork(train, 1, data_parallel_replicas=2, resume=True, save_at=(3,), **options)
    assert emulated["calibrations"] == 0 and not emulated["warnings"]
    assert_same_as_emulated(whole, emulated)
    back = fork(train, 4, resume=True, **options)
    assert not any(run["calibrations"] for run in back)
    assert_same_as_emulated(back, emulated)


def test_another_cut_is_calibrated_anew(tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", **CALIBRATED)
    fork(train, 2, save_at=(2,), pipeline_stages=2, **options)
    other = fork(train, 3, resume=True, pipeline_stages=3, **options)
    assert all(run["calibrations"] == 1 for run in other)
    assert ["calibrated anew" in " ".join(run["warnings"]) for run in other] == [True, False, False]


@pytest.mark.parametrize(
    "other",
    [MASKED | dict(boundary_predictor="mean"), CALIBRATED | dict(boundary_predictor="mean", loss_weighted=False)],
    ids=["masked", "energy-weighted"],
)
def test_another_codec_or_predictor_is_calibrated_anew(other, tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", pipeline_stages=2)
    for before, after in ((other, CALIBRATED), (CALIBRATED, other)):
        fork(train, 1, save_at=(2,), **options, **before)
        (resumed,) = fork(train, 1, resume=True, **options, **after)
        assert resumed["calibrations"] == 1 and "calibrated anew" in resumed["warnings"][0]


# A refresh that falls on the step at which the run is resumed, and one after it.
REFRESHED = CALIBRATED | dict(calibration_every=1, calibration_tokens=300)


def test_refreshed_fits_follow_the_model_alike_on_both_ends_and_through_a_resume(tmp_path):
    options = dict(kind="llama", pipeline_stages=2, **REFRESHED)
    whole = fork(train, 2, folder=tmp_path / "run", save_at=(2,), **options)
    resumed = fork(train, 2, folder=tmp_path / "run", resume=True, **options)
    assert_same_run(resumed, whole)
    assert [run["calibrations"] for run in (*whole, *resumed)] == [4, 4, 2, 2]
    (emulated,) = fork(train, 1, folder=tmp_path / "emulated", **options)
    assert_same_as_emulated(whole, emulated)
    (stale,) = fork(train, 1, folder=tmp_path / "stale", **options | dict(calibration_every=0))
    name = "1/weights"
    assert not torch.equal(stale["fits"][name], emulated["fits"][name])


def test_by_default_calibrations_cost_a_quarter_of_the_coded_bytes(tmp_path):
    """And a resumed run keeps the interval: it knows of no calibration that could tell."""
    tokens = 16  # one batch
    options = dict(
        kind="llama", pipeline_stages=2, **CALIBRATED | dict(calibration_tokens=tokens, boundary_budget=0.9)
    )
    whole = fork(train, 2, folder=tmp_path / "run", save_at=(2,), **options)
    resumed = fork(train, 2, folder=tmp_path / "run", resume=True, **options)
    assert_same_run(resumed, whole)
    # Accumulation of two: half a step's tokens, uncoded, against a quarter of nearly all of them.
    every = calibration_interval(1.0, 2.0, 0.9)
    assert every == 3 and [run["calibrations"] for run in (*whole, *resumed)] == [2, 2, 1, 1]


@pytest.mark.parametrize("tokens,step,ratio,every", [(16384, 700, 0.05, 1873), (16384, 32768, 0.05, 40), (1, 9, 1, 1)])
def test_interval_between_calibrations(tokens, step, ratio, every):
    assert calibration_interval(tokens, step, ratio) == every


@pytest.mark.parametrize("num_batches", [1, 2, 3, 4, 5, 9])
def test_the_predictor_is_checked_on_batches_that_it_was_not_fitted_on(num_batches):
    held = [held_out(index, num_batches) for index in range(num_batches)]
    assert sum(held) == (0 if num_batches == 1 else max(1, num_batches // 4))


def test_a_calibration_that_cannot_check_the_predictor_says_so(tmp_path):
    options = CALIBRATED | dict(calibration_tokens=1, max_steps=1, eval_strategy="no", pipeline_stages=2)
    (run,) = fork(train, 1, folder=tmp_path, kind="llama", **options)
    (warning,) = run["warnings"]
    assert "one batch only" in warning and "raise calibration_tokens" in warning
    assert float(run["fits"]["1/explained"]) == 0.0


# Sockets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages,budget", [(2, 0.05), (3, 0.05), (2, 0.2)])
def test_bytes_on_sockets_are_those_of_the_budget(stages, budget, tmp_path):
    result = traffic.run(tmp_path, stages, 1, preset="anchored", boundary_budget=budget, calibration_tokens=600)
    planned, framing = result["planned"]["pipeline"], result["framing"]["pipeline"]
    dense_bytes = traffic.ROWS * traffic.ACCUMULATION * (stages - 1) * 2 * 16 * 576 * 2
    assert 0.99 * budget * dense_bytes < planned <= budget * dense_bytes
    for measured in result["measured"]["pipeline"]:
        assert measured == pytest.approx(planned + framing, rel=0.03)
        assert measured <= budget * dense_bytes + framing
