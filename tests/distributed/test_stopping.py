"""Steps that no rank should take, on several processes: all of them stop at the same step, before the optimizer does; and
steps without labels, which all of them take."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

from tests.equality import VOCAB, Rows, mesh_trainer, tiny_model
from tests.launch import run_ranks
from tests.nonfinite import FAULTS, STEP, run_into
from tests.runs import collect_warnings

SHORT = {"max_steps": 3, "gradient_accumulation_steps": 1, "eval_strategy": "no", "link_timeout_seconds": 20.0}
ROWS, NUM_ROWS = 2, 24
MESHES = {"2x1": (2, 1), "2x2": (2, 2)}  # stages, replicas
STEPPING_APART = ("diloco", "streaming_diloco")


class Unlabelled(Rows):
    """Rows in order, some of them without labels."""

    def __init__(self, unlabelled: range):
        super().__init__(NUM_ROWS)
        for place in unlabelled:
            self.rows[place]["labels"] = torch.full_like(self.rows[place]["labels"], -100)


class Foreign(Rows):
    """One row has a token outside the vocabulary."""

    def __init__(self, place: int):
        super().__init__(NUM_ROWS)
        self.rows[place]["input_ids"][0] = VOCAB


def trainer_of(stages: int, folder: Path, name: str, dataset=None, replicas: int | None = None, **overrides):
    """Reads the rows in order and steps by plain gradient descent."""
    AcceleratorState._reset_state()
    options = {**SHORT, "pipeline_stages": stages, "train_sampling_strategy": "sequential", "learning_rate": 0.1}
    trainer = mesh_trainer(
        tiny_model("llama"), ROWS, str(folder / name.replace(" ", "-")), NUM_ROWS, optim="sgd", warmup_steps=0,
        data_parallel_replicas=replicas, **options, **overrides,
    )  # fmt: skip
    trainer.train_dataset = dataset or trainer.train_dataset
    return trainer


def labels_of(replicas: int) -> dict[str, range]:
    """Which rows of a run have none: of step 1 all, its last replica's (its last where there is one), or none."""
    step = ROWS * replicas
    last = range(2 * step - (ROWS if replicas > 1 else 1), 2 * step)
    return {"whole step": range(step, 2 * step), "last replica": last, "no row": range(0)}


def losses(trainer) -> dict:
    trainer.train()
    state = trainer.engine.parts.model.state_dict()
    return {
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "weights": {name: state[name].clone() for name in trainer.engine.parts.saved_names()},
    }


class OnOneRank(TrainerCallback):
    """Decides by what only one rank sees."""

    def __init__(self, rank: int, flags: dict[int, str]):
        self.rank, self.flags = rank, flags

    def on_step_end(self, args, state, control, **kwargs):
        if self.rank == 1 and state.global_step in self.flags:
            setattr(control, self.flags[state.global_step], True)


def decide_on_one_rank(rank: int, stages: int, folder: Path) -> tuple:
    """Rank 1 wants to evaluate, to save, to log and to stop: what the run has done."""
    options = {"logging_steps": 100, "save_strategy": "no"}
    trainer = trainer_of(stages, folder, "one rank", **options)
    trainer.args.max_steps = 8
    flags = {1: "should_evaluate", 2: "should_save", 3: "should_log", 4: "should_training_stop"}
    if rank == 1 or stages == 1:  # it may even be there on one rank only
        trainer.add_callback(OnOneRank(rank, flags))
    trainer.train()
    logs = [(log["step"], next(name for name in log if name.endswith("loss"))) for log in trainer.state.log_history]
    return trainer.state.global_step, logs, trainer.args.output_dir


@pytest.mark.parametrize("stages,ranks", [(2, 2), (1, 2)])
def test_what_a_callback_wants_on_one_rank_all_ranks_do(stages, ranks, tmp_path):
    function = functools.partial(decide_on_one_rank, stages=stages, folder=tmp_path / "runs")
    first, second = run_ranks(function, ranks, tmp_path / "ranks")
    assert first == second
    assert first[0] == 4 and first[1] == [(1, "eval_loss"), (3, "loss"), (4, "train_loss")]
    assert [path.name for path in Path(first[2]).iterdir()] == ["checkpoint-2"]


def stop(rank: int, stages: int, replicas: int, folder: Path) -> dict:
    """Everything on this rank: the errors of planted faults, of a foreign token, and runs with rows without labels."""
    said = {name: run_into(trainer_of(stages, folder, name), fault) for name, (fault, _) in FAULTS.items()}
    for sync in STEPPING_APART if replicas > 1 else ():
        trainer = trainer_of(stages, folder, sync, dp_sync=sync)
        said[sync] = run_into(trainer, FAULTS["loss"][0])
    place = ROWS * (replicas + 1) - 1  # of replica 0, step 1
    trainer = trainer_of(stages, folder, "foreign", Foreign(place))
    with pytest.raises(ValueError) as raised:
        trainer.train()
    said["foreign"] = (str(raised.value), trainer.state.global_step == STEP)
    warnings = collect_warnings()
    runs = {
        name: losses(trainer_of(stages, folder, name, Unlabelled(rows))) for name, rows in labels_of(replicas).items()
    }
    return {"said": said, "runs": runs, "warnings": warnings}


@pytest.fixture(scope="module", params=MESHES)
def outcome(request, tmp_path_factory):
    stages, replicas = MESHES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return stages, replicas, folder, run_ranks(stop, stages * replicas, folder, stages, replicas, folder)


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_stop_at_a_number_that_is_not_finite(outcome, name):
    _, _, _, ranks = outcome
    for said, kept in (rank["said"][name] for rank in ranks):
        assert kept and re.search(rf"at step {STEP} the gradient norm is not finite \(.* stage 0, .* stage 1\)", said)
    assert any(re.search(FAULTS[name][1], rank["said"][name][0]) for rank in ranks)


@pytest.mark.parametrize("sync", STEPPING_APART)
def test_a_replica_that_steps_apart_stops_the_others(outcome, sync):
    stages, replicas, _, ranks = outcome
    if replicas == 1:
        pytest.skip("one replica")
    for index, (text, kept) in enumerate(rank["said"][sync] for rank in ranks):
        whose = "the" if index < stages else "another replica's"  # the loss of replica 0 is infinite
        assert kept and f"at step {STEP} {whose} gradient norm is not finite" in text and "has not stepped" in text
    assert "the loss is inf" in ranks[stages - 1]["said"][sync][0]


def test_all_ranks_stop_at_a_token_outside_the_vocabulary(outcome):
    stages, _, _, ranks = outcome
    for index, rank in enumerate(ranks):
        text, stopped = rank["said"]["foreign"]
        expected = (
            f"input_ids has {VOCAB}, which is no entry" if index < stages else "another replica's batch cannot be run"
        )
        assert stopped and expected in text


def test_rows_without_labels_count_for_nothing(outcome):
    stages, replicas, folder, ranks = outcome
    for name, rows in labels_of(replicas).items():
        emulated = losses(trainer_of(stages, folder, f"{name} emulated", Unlabelled(rows), replicas))
        assert all(torch.tensor(emulated["loss"]).isfinite()) and (emulated["loss"][1] == 0.0) == (
            name == "whole step"
        )
        for rank in ranks:
            assert rank["runs"][name]["loss"] == pytest.approx(emulated["loss"], rel=1e-6)
            for key, tensor in rank["runs"][name]["weights"].items():
                torch.testing.assert_close(tensor, emulated["weights"][key], rtol=0, atol=1e-7)


def test_a_step_without_labels_is_warned_of_once(outcome):
    for index, rank in enumerate(outcome[-1]):
        found = [text for text in rank["warnings"] if "no row of any replica has a label" in text]
        assert len(found) == (index == 0) and all(f"At step {STEP} " in text for text in found)
