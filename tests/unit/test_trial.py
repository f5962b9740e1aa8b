"""`meshadapt try`: what is concluded from figures, and whole tiny trials."""

from __future__ import annotations

import importlib.util
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import HfArgumentParser

from hf_meshadapt import MeshAdaptArguments
from hf_meshadapt.cli.main import main
from hf_meshadapt.cli.trial import options_for
from hf_meshadapt.trial import runs as trial_runs
from hf_meshadapt.trial.comparison import (
    Recipe,
    RentedMesh,
    RunFigures,
    gap_closed,
    loss_at,
    losses_in_equal_time,
    recommend,
)
from hf_meshadapt.trial.data import hold_out
from hf_meshadapt.trial.report import results, results_table
from hf_meshadapt.trial.runs import StopAfter, TrialOptions, make_trainer, run_all
from tests.equality import tiny_model
from tests.sft import chats, texts, tokenizer

# Conclusions ---------------------------------------------------------------------------------------------------------


def figures(recipe: Recipe, losses: list[float], link_bytes: float, step_seconds: float = 0.8) -> RunFigures:
    held_out = tuple((10 * index, loss) for index, loss in enumerate(losses))
    return RunFigures(recipe, held_out, ((1, losses[0]),), step_seconds, {"pipeline": 1.0, "tied": 3.0}, link_bytes)


DENSE = figures(Recipe("dense"), [2.0, 1.5, 1.2, 1.0], 1e6)
CODED = figures(Recipe("anchored", 0.05), [2.0, 1.6, 1.3, 1.1], 5e4)


def mesh(bits_per_second: float) -> RentedMesh:
    return RentedMesh(stages=2, replicas=1, microbatches=4, bits_per_second=bits_per_second)


def test_step_time_is_passes_with_their_bubble_and_bytes():
    assert mesh(8e6).compute_seconds(DENSE) == pytest.approx(0.8 / 2 * 5 / 4)
    assert mesh(8e6).step_seconds(DENSE) == pytest.approx(0.5 + 1.0)
    assert RentedMesh(2, 2, 4, 8e6, speedup=5).compute_seconds(DENSE) == pytest.approx(0.05)


def test_losses_in_equal_time():
    # At 8 Mbit/s: 1.5 s and 0.55 s a step. When the coded run has ended, 16.5 s, dense training is at step 11.
    losses = losses_in_equal_time([DENSE, CODED], mesh(8e6))
    assert losses == pytest.approx({"dense": 1.5 - 0.3 * 0.1, "anchored 0.05": 1.1})
    assert loss_at(DENSE.held_out, 40) == 1.0 and loss_at(DENSE.held_out, 5) == pytest.approx(1.75)


def test_gradient_share():
    assert DENSE.gradient_share == 0.75


def test_gap_closed():
    assert gap_closed(2.0, 1.0, 1.1) == pytest.approx(0.9)
    assert gap_closed(2.0, 2.0, 1.1) is None


def test_slow_links_want_codes_and_fast_ones_do_not():
    slow, fast = (recommend([DENSE, CODED], mesh(rate)) for rate in (8e6, 1e12))
    assert slow.recipe == CODED.recipe and "anchored 0.05 is better at 8 Mbit/s" in slow.reason
    assert fast.recipe == DENSE.recipe and "dense is better at 1e+06 Mbit/s" in fast.reason
    assert CODED.recipe.options() == "--preset anchored --boundary_budget 0.05"


def test_codes_that_learn_nothing_are_not_recommended_on_any_link():
    useless = figures(Recipe("paper"), [2.0, 2.0, 2.0, 2.0], 5e4)
    assert recommend([DENSE, useless], mesh(1e5)).recipe == DENSE.recipe


def test_nothing_is_recommended_where_dense_training_learnt_nothing():
    idle = figures(Recipe("dense"), [2.0, 1.999], 1e6)
    assert recommend([idle, CODED], mesh(8e6)).recipe is None
    diverged = figures(Recipe("dense"), [2.0, 2.5], 1e6)
    found = recommend([diverged, CODED], mesh(8e6))
    assert found.recipe is None and "from 2 to 2.5 in 10 steps, too little" in found.reason
    assert results([diverged, CODED], mesh(8e6), found)["runs"][1]["gap_closed"] is None
    Console(quiet=True).print(results_table([diverged, CODED], mesh(8e6)))


def test_time_is_up_with_the_first_step_past_it():
    seconds = iter([0.0, 5.0, 11.0])
    stop = StopAfter(10.0, clock=lambda: next(seconds))

    class Control:
        should_training_stop = False

    for expected in (False, True):
        stop.on_step_end(None, None, Control)
        assert Control.should_training_stop is expected


# Whole trials --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    tiny_model("llama_tied").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def rows_file(tmp_path):
    def write(data) -> Path:
        data(40, 1).to_json(tmp_path / "rows.jsonl")
        return tmp_path / "rows.jsonl"

    return write


def test_a_trial_of_chats_with_all_presets(model, rows_file, tmp_path, capsys):
    options = "--steps 4 --eval-every 2 --batch-size 4 --max-length 24 --learning-rate 1e-2 --calibration-tokens 150"
    command = ["try", str(model), "--data", str(rows_file(chats)), "--output", str(tmp_path / "out"), *options.split()]
    assert main([*command, "--paper", "--budget", "0.25", "--link_mbps", "0.01"]) == 0
    found = json.loads((tmp_path / "out" / "try.json").read_text())
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    dense, *coded = found["runs"]
    assert [run["name"] for run in found["runs"]] == ["dense", "anchored 0.25", "paper"]
    for run in found["runs"]:
        assert run["loss_before"] == pytest.approx(dense["loss_before"], abs=1e-4)
        assert [step for step, _ in run["held_out"]] == [0, 2, 4] and len(run["training"]) == 4
    assert dense["loss_after"] < dense["loss_before"] and dense["gap_closed"] == 1.0
    assert all(run["bytes_per_token"]["pipeline"] < dense["bytes_per_token"]["pipeline"] for run in coded)
    assert coded[0]["bytes_per_token"]["calibration"] > 0 and "calibration" not in dense["bytes_per_token"]
    text = capsys.readouterr().out
    for word in (
        "gap closed",
        "bytes/token, pipeline",
        "of dense training's",
        "is better at 0.01 Mbit/s",
        "--pipeline_stages 2 --preset",
    ):
        assert word in text


@pytest.mark.parametrize(
    "recipe,replicas,sync,options",
    [
        (Recipe("dense"), 2, "allreduce", " --wire_dtype bfloat16"),
        (Recipe("dense"), 2, "powersgd", " --wire_dtype bfloat16 --dp_sync powersgd"),
        (Recipe("anchored", 0.25), 1, "allreduce", " --boundary_budget 0.25 --calibration_tokens 150"),
        (Recipe("paper"), 1, "allreduce", " --anchor false"),
        (Recipe("paper"), 2, "allreduce", " --anchor false --dp_sync allreduce"),
        (Recipe("paper"), 2, "streaming_diloco", " --anchor false"),
    ],
)
def test_what_is_recommended_is_what_was_run(recipe, replicas, sync, options, tmp_path, monkeypatch):
    args = SimpleNamespace(stages=3, replicas=replicas, dp_sync=sync, calibration_tokens=150)
    text = options_for(recipe, args)
    assert text == f"--pipeline_stages 3 --preset {recipe.preset}{options}"
    monkeypatch.setattr(trial_runs.AutoTokenizer, "from_pretrained", lambda name: tokenizer())
    for make in ("_sft_trainer", "_text_trainer"):
        monkeypatch.setattr(trial_runs, make, lambda options, arguments, rows, tokenizer: arguments)
    settings = tiny_options(tmp_path, tmp_path, stages=3, replicas=replicas, dp_sync=sync, calibration_tokens=150)
    ran = MeshAdaptArguments(**make_trainer(recipe, settings, None, 1))
    words = [*text.split(), "--data_parallel_replicas", str(replicas), "--output_dir", str(tmp_path)]
    (told,) = HfArgumentParser(MeshAdaptArguments).parse_args_into_dataclasses([*words, "--seed", "0", "--use_cpu"])
    for part in ("boundary_config", "mesh_config", "data_parallel_config", "anchor_config"):
        assert getattr(told, part)() == getattr(ran, part)(), part
    assert (told.has_anchor, told.calibration_tokens) == (ran.has_anchor, ran.calibration_tokens)


def tiny_options(model: Path, tmp_path: Path, **changes) -> TrialOptions:
    options = dict(
        model=str(model), stages=2, replicas=1, dp_sync="allreduce", batch_size=4, max_length=16, num_steps=4,
        seconds_per_run=60.0, eval_every_steps=2, learning_rate=1e-2, seed=0, bf16=False, calibration_tokens=None,
        output=tmp_path / "out",
    )  # fmt: skip
    return TrialOptions(**{**options, **changes})


def run_quietly(options: TrialOptions, data) -> list[RunFigures]:
    recipes = [Recipe("dense"), Recipe("paper")]
    return run_all(recipes, options, hold_out(data(40, 1), 8), lambda text: None)[0]


def test_with_and_without_trl_the_same_rows_are_learnt(model, tmp_path, monkeypatch):
    with_trl = run_quietly(tiny_options(model, tmp_path), texts)
    find = importlib.util.find_spec
    monkeypatch.setattr(trial_runs.importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))
    without = run_quietly(tiny_options(model, tmp_path), texts)
    for one, other in zip(with_trl, without):
        # TRL ends every text with the end-of-sequence token.
        assert one.loss == pytest.approx(other.loss, abs=0.3) and one.num_steps == other.num_steps == 4
    with pytest.raises(ImportError, match="rows of messages need trl"):
        run_quietly(tiny_options(model, tmp_path), chats)


def test_one_run_decides_on_the_steps_of_all_and_none_outlives_another(model, tmp_path, monkeypatch):
    trainers = []

    def make_alone(*args):
        assert not any(reference() for reference in trainers)
        trainer = make_trainer(*args)
        trainers.append(weakref.ref(trainer))
        return trainer

    monkeypatch.setattr(trial_runs, "make_trainer", make_alone)
    found = run_quietly(tiny_options(model, tmp_path, seconds_per_run=0.0), texts)
    assert len(trainers) == 2
    assert {run.num_steps for run in found} == {1} and [step for step, _ in found[0].held_out] == [0, 1]


def test_runs_that_start_apart_do_not_compare(model, tmp_path, monkeypatch):
    monkeypatch.setattr(trial_runs, "START_TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="the runs started at held-out losses of .*they do not compare"):
        run_quietly(tiny_options(model, tmp_path, num_steps=1), texts)


def test_numbers_out_of_range_are_refused_before_anything_is_loaded(capsys):
    for options, message in {
        "--stages 1": "must be at least 2",
        "--minutes 0": "must be positive",
        "--replicas 0": "must be positive",
        "--learning-rate -1": "must be positive",
        "--budget 2": "must lie in (0, 1]",
    }.items():
        assert main(["try", "nowhere", "--data", "/nowhere", *options.split()]) == 2
        assert message in capsys.readouterr().err
