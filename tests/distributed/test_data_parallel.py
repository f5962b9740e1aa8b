"""Every way in which replicas synchronise, over processes: equal to the emulated mesh, to the dense average where it
should be, to itself when resumed, and to what the plan says of its bytes."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_meshadapt.data_parallel.exchange import OverGroup
from tests import runs
from tests.equality import collate, mesh_trainer, tiny_model
from tests.runs import DENSE, TWO_STAGES, assert_same_run, collect_warnings, fork, outcome, train

POWERSGD = dict(dp_sync="powersgd", matrix_rank=4)
DILOCO = dict(dp_sync="diloco", sync_every=3, outer_wire="int8")
STREAMING = dict(dp_sync="streaming_diloco", sync_every=4, num_fragments=2, overlap_steps=1, matrix_rank=4)
LOW_RANK = STREAMING | dict(outer_wire="powersgd", sync_chunk_bytes=1000)
EVALUATED = DENSE | dict(eval_strategy="steps", eval_steps=3)
TWO_REPLICAS = dict(data_parallel_replicas=2)


def weights_of(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """All stages' weights; replicas, and the copies of a tied embedding, must hold the same bits."""
    weights: dict[str, torch.Tensor] = {}
    for run in ranks:
        for name, tensor in run["weights"].items():
            name = {"lm_head.weight": "model.embed_tokens.weight"}.get(name, name) if run["tied"] else name
            assert torch.equal(weights.setdefault(name, tensor), tensor), name
    return weights


def run(rank: int, kind: str = "llama_tied", dtype: torch.dtype | None = None, **options) -> dict:
    if dtype is not None:
        runs.tiny_model = lambda *args, **kwargs: tiny_model(*args, **kwargs).to(dtype)  # in this forked rank only
    return train(rank, kind=kind, **options) | {"tied": kind != "llama"}


# Equal to the emulated mesh, and resumed -----------------------------------------------------------------------------

RUNS = {
    "2x2-powersgd": (4, "llama_tied", (3,), TWO_STAGES | POWERSGD),
    "1x2-streaming-bf16": (
        2,
        "llama_tied",
        (2,),
        STREAMING | dict(bf16=True, matrix_rank=None),
    ),  # a fragment is on its way then
}
SLOW_RUNS = {
    "2x2-diloco": (4, "llama_tied", (4,), TWO_STAGES | DILOCO | dict(matrix_rank=4)),  # of the tied exchange
    "2x2-streaming": (4, "gpt2", (4,), TWO_STAGES | LOW_RANK),
    "1x2-powersgd-bf16": (2, "llama", (2,), POWERSGD | dict(bf16=True)),
}


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_equals_the_emulated_mesh_and_a_resumed_run_the_uninterrupted_one(tmp_path, name):
    num_ranks, kind, steps, options = (RUNS | SLOW_RUNS)[name]
    options = dict(kind=kind, collator=collate, **EVALUATED, **options)
    emulated = fork(run, 1, folder=tmp_path / "emulated", save_at=steps, **TWO_REPLICAS, **options)
    whole = fork(run, num_ranks, folder=tmp_path / "run", dropout=0.0, save_at=steps, **options)
    expected = weights_of(emulated)
    for weight_name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, expected[weight_name]), weight_name
    assert whole[0]["grad_norm"] == pytest.approx(emulated[0]["grad_norm"], rel=1e-6)
    assert whole[0]["eval_loss"] == pytest.approx(emulated[0]["eval_loss"], rel=1e-6)
    for ranks, folder, count, mesh in ((whole, "run", num_ranks, {}), (emulated, "emulated", 1, TWO_REPLICAS)):
        resumed = fork(run, count, folder=tmp_path / folder, resume=True, **mesh, **options)
        assert_same_run(resumed, ranks)
        assert not any(each["warnings"] for each in resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh,sync",
    [
        ((3, dict()), POWERSGD),
        ((3, dict()), LOW_RANK),
        ((6, TWO_STAGES), LOW_RANK),
        ((2, dict()), DILOCO | dict(dtype=torch.bfloat16)),
        ((4, TWO_STAGES), POWERSGD | dict(dtype=torch.bfloat16)),
        ((4, dict(pipeline_stages=2, pipeline_chunks_per_rank=2, pipeline_schedule="interleaved")), STREAMING),
        ((4, dict(pipeline_stages=2, pipeline_chunks_per_rank=2, pipeline_schedule="interleaved")), POWERSGD),
    ],
    ids=str,
)
def test_resuming_with_more_replicas_dropout_and_chunks(tmp_path, mesh, sync):
    num_ranks, stages = mesh
    options = dict(folder=tmp_path / "run", kind="llama_tied", dropout=0.2, **DENSE, **stages, **sync)
    whole = fork(run, num_ranks, save_at=(2, 3, 5), **options)
    weights_of(whole)
    for step in (2, 3, 5):
        resumed = fork(run, num_ranks, resume=tmp_path / "run" / f"checkpoint-{step}", **options)
        assert_same_run(resumed, whole)


@pytest.mark.slow
def test_another_mesh_or_sync_starts_memories_anew_from_the_checkpoints_model(tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", **DENSE)
    fork(run, 2, save_at=(4,), **DILOCO, **options)
    for num_ranks, changed in ((2, POWERSGD), (2, DILOCO | dict(sync_every=2)), (3, DILOCO)):
        resumed = fork(run, num_ranks, resume=True, **options | changed)
        assert "start anew" in "\n".join(resumed[0]["warnings"])  # rank 0 says it for all
        weights_of(resumed)


# Frozen parameters, and parameters without gradient ------------------------------------------------------------------


def train_partly(rank: int, *, folder: Path, resume: bool = False, **options) -> dict:
    """The first layer is frozen; some rows leave the second's MLP out, on one replica or on all."""
    warnings = collect_warnings()
    model = tiny_model("llama")
    model.model.layers[0].requires_grad_(False)
    skipped = leave_out_by_row(model.model.layers[1].mlp)
    trainer = mesh_trainer(model, 4, str(folder), save_strategy="steps", save_steps=3, **DENSE_SAVED, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    return outcome(trainer) | {"warnings": warnings, "tied": False, "skipped": skipped}


def leave_out_by_row(module: torch.nn.Module) -> list[bool]:
    """Makes passes leave a module out, as the data say; returns a list that says of every pass whether it did."""
    forward, skipped = module.forward, []

    def forward_or_not(hidden: torch.Tensor) -> torch.Tensor:
        skipped.append(bool(hidden[0, 0, 0] > 0))
        return hidden if skipped[-1] else forward(hidden)

    module.forward = forward_or_not
    return skipped


DENSE_SAVED = {name: value for name, value in DENSE.items() if name != "save_strategy"}


@pytest.mark.parametrize(
    "sync",
    [pytest.param({}, marks=pytest.mark.slow), POWERSGD, pytest.param(LOW_RANK, marks=pytest.mark.slow)],
    ids=["allreduce", "powersgd", "streaming"],
)
def test_frozen_parameters_and_parameters_without_gradient(tmp_path, sync):
    options = dict(folder=tmp_path / "run", pipeline_stages=1, **sync)
    whole = fork(train_partly, 2, **options)
    weights = weights_of(whole)
    first, second = (run["skipped"] for run in whole)
    assert {True, False} == {*first} == {*second} and first != second
    start = tiny_model("llama").state_dict()
    frozen = [name for name in start if ".layers.0." in name]
    assert frozen and all(torch.equal(weights[name], start[name]) for name in frozen)
    emulated = fork(train_partly, 1, **options | TWO_REPLICAS | dict(folder=tmp_path / "emulated"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(emulated).items())
    assert_same_run(fork(train_partly, 2, resume=tmp_path / "run" / "checkpoint-3", **options), whole)


# Tied embeddings -----------------------------------------------------------------------------------------------------


EXCHANGES = {
    "whole": dict(logging_steps=3, logging_first_step=True),
    "powersgd": POWERSGD,
    "freeze": dict(tied_embeddings="freeze"),
}


def train_tied(rank: int, *, folder: Path, resume=None, **options) -> dict:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("hf_meshadapt").addHandler(handler)
    trainer = mesh_trainer(tiny_model("llama_tied"), 4, str(folder), save_steps=3, **DENSE, **options)
    trainer.add_callback(runs.SaveAt((3,)))
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer) | {"tied": True, "texts": texts, "report": trainer.mesh_report()}


def test_one_replica_sends_a_tied_embedding_whole_in_low_rank_or_not_at_all(tmp_path):
    three = dict(pipeline_stages=3, mask_ratio=0.9)
    emulated = three | dict(data_parallel_replicas=1)
    runs_of = {}
    for name, options in EXCHANGES.items():
        whole = fork(train_tied, 3, folder=tmp_path / name, **three, **options)
        weights = runs_of[name] = weights_of(whole)
        if name != "whole":
            alone = weights_of(fork(train_tied, 1, folder=tmp_path / f"{name}-emulated", **emulated, **options))
            assert all(torch.equal(weights[key], tensor) for key, tensor in alone.items()), name
        if name == "powersgd":  # remembers what it left out, and a stage in the middle nothing
            resume = tmp_path / name / "checkpoint-3"
            assert_same_run(fork(train_tied, 3, folder=tmp_path / name, resume=resume, **three, **options), whole)
        planned, measured = (
            whole[0]["report"][which].get("tied", 0.0) for which in ("planned_bytes_per_token", "bytes_per_token")
        )
        assert planned <= measured <= planned + 20  # headers of a few messages over 128 tokens
        assert "".join(whole[0]["texts"]).count("gradient of the tied embedding takes") == (name == "whole")
        assert (planned > 0) == (measured > 0) == (name != "freeze")
    embedding = "model.embed_tokens.weight"
    start = tiny_model("llama_tied").state_dict()[embedding]
    assert torch.equal(runs_of["freeze"][embedding], start)
    assert not torch.equal(runs_of["powersgd"][embedding], runs_of["whole"][embedding])


# Equal to the dense average ------------------------------------------------------------------------------------------


def test_powersgd_of_full_rank_and_diloco_of_one_step_equal_the_dense_average(tmp_path):
    options = dict(folder=tmp_path, kind="llama_tied", **TWO_STAGES, **DENSE, optim="sgd", max_grad_norm=0.0)
    exact = dict(matrix_rank=32, factor_dtype="float32")
    one_step = dict(dp_sync="diloco", sync_every=1, outer_wire="float32", outer_learning_rate=1.0, outer_momentum=0.0)
    dense, powersgd, diloco = (
        weights_of(fork(run, 4, **options, **sync))
        for sync in ({}, dict(dp_sync="powersgd", **exact), one_step | exact)
    )
    start = tiny_model("llama_tied").state_dict()
    for name, tensor in dense.items():
        assert not torch.equal(tensor, start[name])
        torch.testing.assert_close(powersgd[name], tensor, rtol=0, atol=1e-6)
        torch.testing.assert_close(diloco[name], tensor, rtol=0, atol=1e-6)


# One sync per optimizer step, after which replicas are equal ---------------------------------------------------------


class Hashes(TrainerCallback):
    """After every optimizer step, of the weights that replicas should agree on."""

    def __init__(self, engine):
        self.engine, self.seen, self.messages = engine, [], []

    def on_step_end(self, args, state, control, **kwargs):
        with self.engine.outer_weights():
            named = sorted(self.engine.parts.named_trainable(), key=lambda pair: pair[0])
            data = b"".join(parameter.detach().numpy().tobytes() for _, parameter in named)
        self.seen.append(hashlib.sha256(data).hexdigest())
        self.messages.append(self.engine.messages)


def train_hashed(rank: int, **options) -> tuple[list[str], list[int]]:
    """Hashes after every step, and how many messages were sent between replicas until then."""
    trainer = mesh_trainer(tiny_model("llama"), 4, options.pop("folder"), pipeline_stages=2, **DENSE, **options)
    engine = trainer.engine
    engine.messages, send = 0, OverGroup.sum

    def count(exchange, messages):
        engine.messages += 1
        return send(exchange, messages)

    OverGroup.sum = count  # in this forked rank only
    callback = Hashes(engine)
    trainer.add_callback(callback)
    trainer.train()
    return callback.seen, callback.messages


@pytest.mark.parametrize(
    "sync", [POWERSGD, DILOCO | dict(outer_wire="bfloat16"), STREAMING], ids=lambda s: s["dp_sync"]
)
def test_replicas_are_equal_after_every_step_and_sync_as_often_as_they_should(tmp_path, sync):
    ranks = fork(train_hashed, 4, folder=str(tmp_path), **sync)  # with two accumulation steps
    for stage in range(2):
        (first, messages), (second, _) = ranks[stage], ranks[stage + 2]
        assert first == second and len(first) == 7
        if sync is POWERSGD:
            assert messages == [2 * step for step in range(1, 8)]
            assert len(set(first)) == 7
        elif sync["dp_sync"] == "diloco":
            assert messages == [0, 0, 1, 1, 1, 2, 3]  # after steps 3, 6 and the last
        else:
            assert messages[-1] == 5  # fragments after steps 2, 4 and 6, both after the last


# Bytes ---------------------------------------------------------------------------------------------------------------


def measure(rank: int, folder: Path, **options) -> dict[str, tuple[float, float]]:
    """Measured and planned bytes of steps 5 to 12, by axis, headers included."""
    steps, skipped = 12, 4
    settings = DENSE | dict(max_steps=steps + 1, logging_steps=1, num_rows=400)
    trainer = mesh_trainer(tiny_model("llama_tied"), 4, str(folder), pipeline_stages=2, **settings, **options)
    trainer.train()
    plan = trainer.engine.plan(4, 16, 2)
    logs = [log for log in trainer.state.log_history if "loss" in log][skipped:steps]
    figures = {}
    for axis in ("data_parallel", "tied"):
        sent = sum(log.get(f"bytes_per_token_{axis}", 0) * plan.tokens for log in logs)
        figures[axis] = (sent, (plan.axis_bytes(axis) + plan.framing_bytes(axis)) * (steps - skipped))
    return figures


@pytest.mark.parametrize(
    "sync",
    [
        POWERSGD,
        DILOCO | dict(sync_every=4),
        STREAMING | dict(outer_wire="int8", overlap_steps=0, sync_chunk_bytes=1000),
    ],
    ids=lambda sync: sync["dp_sync"],
)
def test_sockets_send_what_the_plan_says(tmp_path, sync):
    for axis, (measured, planned) in fork(measure, 4, folder=tmp_path, **sync)[0].items():
        assert measured == pytest.approx(planned, rel=0.02), axis
