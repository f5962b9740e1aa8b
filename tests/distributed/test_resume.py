"""Resuming in new processes: at any step, after kills in the middle of saves, on another mesh shape."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import shutil
import signal
import weakref
from pathlib import Path

import pytest
import torch

from hf_meshadapt import checkpoint, mesh_checkpoint
from hf_meshadapt.folder_lock import FolderLock
from tests.architectures import make_architecture
from tests.equality import collate, mesh_trainer, tiny_model
from tests.launch import start_ranks
from tests.matrix.trainer_runs import Counter
from tests.runs import DENSE, INTERLEAVED, MASKED, NUM_ROWS, ROWS, TWO_STAGES, assert_same_run, fork, outcome, train

# Resume in a new process ---------------------------------------------------------------------------------------------

EVALUATED = dict(eval_strategy="steps", eval_steps=3)
UNMASKED = dict(mask_ratio=0.0, exact_first_token=None, boundary_predictor=None)
# An epoch is 3 steps with one replica and 2 with two.
RESUMES = {
    "2x1": (2, "llama_tied", (1, 2, 3, 5), dict(pipeline_stages=2, collator=collate, **EVALUATED)),
    "2x2": (4, "gpt2", (2, 3), TWO_STAGES),
    "3x1": (3, "llama", (3, 5), dict(pipeline_stages=3)),
    "1x2": (2, "gpt2", (1, 3), UNMASKED),
    "1x3": (3, "llama", (1, 2), UNMASKED),
    "grouped": (2, "gpt2", (5,), dict(pipeline_stages=2, train_sampling_strategy="group_by_length")),
    "interleaved": (2, "llama_tied", (2, 5), INTERLEAVED),
    "emulated": (1, "llama_tied", (1, 5), dict(pipeline_stages=2, data_parallel_replicas=2)),
}


@pytest.mark.parametrize("mesh", RESUMES)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, mesh):
    num_ranks, kind, steps, options = RESUMES[mesh]
    options = dict(folder=tmp_path / "run", kind=kind, dropout=0.2, **{**MASKED, **options})
    whole = fork(train, num_ranks, save_at=steps, **options)
    for step in steps[:-1]:
        resumed = fork(train, num_ranks, resume=tmp_path / "run" / f"checkpoint-{step}", **options)
        assert_same_run(resumed, whole)
    resumed = fork(train, num_ranks, resume=True, **options)
    assert_same_run(resumed, whole)
    assert not any(run["warnings"] for run in resumed)


def train_with_own_optimizer(rank: int, *, folder: Path) -> list[dict]:
    """A whole run and one that resumes it, of a mixture of experts, which transformers stores in another form, with an
    optimizer and a scheduler for all of the model's parameters."""
    outcomes = []
    for resume in (None, str(folder / "checkpoint-1")):
        model = make_architecture("mixtral")
        model.model.embed_tokens.weight.requires_grad_(False)
        # The first stage, which tells the rate, has nothing of the first group.
        optimizer = torch.optim.AdamW([{"params": p} for p in reversed(list(model.parameters()))], lr=1e-2)
        given = {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))}
        held = [weakref.ref(layer.self_attn.q_proj.weight) for layer in model.model.layers]
        options = dict(DENSE, max_steps=3, save_strategy="steps", save_steps=1, trainer=given, **TWO_STAGES)
        trainer = mesh_trainer(model, ROWS, str(folder), **options)
        gc.collect()
        assert [parameter() is not None for parameter in held] == [rank == 0] * 2 + [rank == 1] * 2
        trainer.train(resume_from_checkpoint=resume)
        rates = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
        outcomes.append(outcome(trainer) | {"rates": rates})
    return outcomes


def test_a_given_optimizer_resumes_and_keeps_no_other_stages_parameters(tmp_path):
    for whole, resumed in fork(train_with_own_optimizer, 2, folder=tmp_path):
        assert_same_run([resumed], [whole])
        assert whole["rates"] == resumed["rates"] and len(set(whole["rates"])) == 3


def test_callbacks_of_one_class_get_their_own_states_back(tmp_path):
    """Trainer gives them those of the beginning."""

    def run(checkpoint: str | None) -> list[tuple[int, int]]:
        options = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
        options |= {
            "restore_callback_states_from_checkpoint": True,
            "trainer": {"callbacks": [Counter(3), Counter(5)]},
        }
        trainer = mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), NUM_ROWS, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        kept = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Counter)]
        return [(callback.start, callback.num_steps) for callback in kept]

    whole = run(None)
    assert whole == [(3, 3), (5, 3)]
    assert run(str(tmp_path / "checkpoint-2")) == whole


# Killed while saving -------------------------------------------------------------------------------------------------

# Where in a save the ranks die: module and function about to be called, and the rank that comes there.
KILLS = {
    "before a stage's shards are in place": (checkpoint, "_move_out", 1),
    "before shards are merged": (mesh_checkpoint, "merge_index", 0),
    "between optimizer and rank state": (mesh_checkpoint, "save_rank_state", 1),
    "before the commit": (mesh_checkpoint, "commit", 0),
}


def train_and_be_killed(rank: int, *, pids: Path, kill: tuple, passes: int, folder: Path, **options) -> None:
    """Trains until the save of step 4; there one rank kills all, when it comes to `kill` after `passes` calls of it."""
    module, name, killer = kill
    (pids / str(rank)).write_text(str(os.getpid()))
    function, calls = getattr(module, name), itertools.count()

    def kill_all(*args, **kwargs):
        if (folder / ".partial-checkpoint-4").exists() and next(calls) == passes:
            for path in sorted(pids.iterdir(), key=lambda path: path.name == str(rank)):  # itself last
                os.kill(int(path.read_text()), signal.SIGKILL)
        return function(*args, **kwargs)

    if rank == killer:
        setattr(module, name, kill_all)
    train(rank, folder=folder, **options)


def run_until_killed(path: Path, kill: tuple, passes: int = 0, **options) -> None:
    (path / "pids").mkdir(parents=True)
    doomed = functools.partial(train_and_be_killed, pids=path / "pids", kill=kill, passes=passes, **options)
    processes = start_ranks(doomed, 2, path).processes
    for process in processes:
        process.join(60)
        process.kill()
    errors = [error.read_text() for error in path.glob("error-*")]
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2, errors
    assert (options["folder"] / ".partial-checkpoint-4").exists()
    assert not (options["folder"] / "checkpoint-4").exists()


def killed_options(folder: Path) -> dict:
    return dict(folder=folder, kind="llama_tied", dropout=0.2, save_at=(2, 4), **TWO_STAGES, **MASKED)


def test_a_run_killed_in_save_after_save_continues_from_the_last_whole_checkpoint(tmp_path):
    options = killed_options(tmp_path / "run")
    whole = fork(train, 2, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    (tmp_path / "run" / ".shared-00").touch()  # what ranks killed in is_shared leave behind
    for number, kill in enumerate(KILLS.values()):
        run_until_killed(tmp_path / f"killed-{number}", kill, resume=True, **options)
    assert_same_run(fork(train, 2, resume=True, **options), whole)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-2", "checkpoint-4"}


def test_a_run_killed_while_it_replaces_a_checkpoint_continues_from_the_old_one(tmp_path):
    options = killed_options(tmp_path / "run")
    whole = fork(train, 2, **options)
    between_renames = dict(kill=(os, "rename", 0), passes=1)
    run_until_killed(tmp_path / "killed", **between_renames, resume=tmp_path / "run" / "checkpoint-2", **options)
    assert (tmp_path / "run" / ".replaced-checkpoint-4").exists()
    resumed = fork(train, 2, resume=True, **options | {"save_at": ()})
    assert_same_run(resumed, whole)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-2", "checkpoint-4"}


# Damaged, or another run's -------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_or_refused_by_name_and_another_runs_folder_is_left_alone(tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", dropout=0.2, **TWO_STAGES, **DENSE)
    whole = fork(train, 2, save_at=(2, 4), **options)
    damaged = tmp_path / "run" / "checkpoint-4"
    (damaged / "mesh_state" / "rank-00001.safetensors").unlink()  # without it rank 1 alone would know
    with pytest.raises(AssertionError) as caught:
        fork(train, 2, resume=damaged, **options)
    fault = f"ValueError: {damaged} is not a whole checkpoint of a mesh run (FileNotFoundError"
    assert str(caught.value).count(fault) == 2 and "rank-00001.safetensors'): use another" in str(caught.value)
    (tmp_path / "run" / ".partial-checkpoint-6").mkdir()
    with FolderLock() as lock:
        lock.hold(tmp_path / "run")
        for chosen in (dict(resume=True), dict(save_at=(1,))):
            with pytest.raises(
                AssertionError, match="ValueError: output_dir=.*another run saves its checkpoints there"
            ):
                fork(train, 1, **options, **chosen)
        assert (tmp_path / "run" / ".partial-checkpoint-6").exists()  # the other run's
    resumed = fork(train, 2, resume=True, **options)
    assert_same_run(resumed, whole)
    assert all(f"{damaged} is not a whole checkpoint and is passed over" in run["warnings"][0] for run in resumed)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-2", "checkpoint-4"}


# Another mesh shape --------------------------------------------------------------------------------------------------


def assert_continues(ranks: list[dict], others: list[dict], tolerance: float = 1e-5) -> None:
    """Two meshes trained the same model; each rank's result holds its own stage."""
    assert ranks[0]["loss"] == pytest.approx(others[0]["loss"], rel=0, abs=tolerance)
    weights, expected = ({n: t for run in side for n, t in run["weights"].items()} for side in (ranks, others))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=10 * tolerance)


def test_another_mesh_shape_takes_over_weights_and_optimizer(tmp_path):
    options = dict(kind="llama_tied", **DENSE | dict(num_rows=24, learning_rate=1e-3))
    whole = fork(train, 2, folder=tmp_path / "run", save_at=(4,), **TWO_STAGES, **options)
    three = fork(train, 3, folder=tmp_path / "run", resume=True, pipeline_stages=3, **options)
    assert_continues(three, whole)
    assert [bool(run["warnings"]) for run in three] == [False, False, True]
    assert "random numbers of this rank start anew" in three[2]["warnings"][0]
    assert_continues(fork(train, 1, folder=tmp_path / "run", resume=True, pipeline_stages=2, **options), whole)
    one = fork(train, 1, folder=tmp_path / "run", resume=True, pipeline_stages=1, **options)
    whole[1]["weights"].pop("lm_head.weight")  # one weight with the embedding again
    assert_continues(one, whole)


def test_fewer_replicas_and_predicted_boundaries(tmp_path):
    """2x2 to 2x1 keeps the boundaries; 2x1 to 3x1 has others, which are calibrated anew, with a warning."""
    options = dict(folder=tmp_path / "run", kind="llama", **MASKED | dict(num_rows=24))
    fork(train, 4, save_at=(4,), **TWO_STAGES, **options)
    fewer = fork(train, 2, resume=True, rows=2 * ROWS, **TWO_STAGES, **options)
    assert not any(run["warnings"] for run in fewer)
    emulated = fork(train, 1, resume=True, rows=2 * ROWS, **TWO_STAGES, **options)
    assert not emulated[0]["warnings"]
    assert_continues(emulated, fewer, tolerance=0.0)
    other = fork(train, 3, resume=True, rows=2 * ROWS, pipeline_stages=3, **options)
    assert ["calibrated anew" in " ".join(run["warnings"]) for run in other] == [True, False, False]
