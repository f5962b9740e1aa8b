"""Metrics and predictions over ranks: who holds them, that all ranks get the same, and that nobody waits for an error."""

from __future__ import annotations

import re
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_meshadapt.pipeline.runner import PipelineRunner

from ..equality import Rows, collate, mesh_trainer, tiny_model
from ..matrix.data import accuracy, greedy
from ..runs import INTERLEAVED, fork

ROWS = 4
METRICS = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": greedy}
MESHES = [(2, INTERLEAVED), (2, {"pipeline_stages": 1}), (6, {"pipeline_stages": 2})]


def ragged(rows):
    return collate(rows, multiple=4)


def make_trainer(rank: int, folder, functions: dict, **mesh):
    model = tiny_model("llama")
    return mesh_trainer(model, ROWS, str(folder), collator=ragged, trainer=functions, link_timeout_seconds=20, **mesh)


def evaluate(rank: int, *, functions: dict, **mesh) -> dict:
    trainer = make_trainer(rank, tempfile.mkdtemp(), functions, **mesh)
    metrics = trainer.evaluate()
    assert not held_passes(trainer.engine.runner)
    return metrics


def held_passes(runner) -> list:
    """What torch's stages of a pipeline keep of passes that are over."""
    made = runner._schedules._made.values() if isinstance(runner, PipelineRunner) else ()
    return [kept for _, stages in made for stage in stages for kept in stage.fwd_cache.values()]


@pytest.mark.parametrize("num_ranks,mesh", MESHES, ids=["interleaved", "1x2", "2x3"])
def test_all_ranks_get_the_same_metrics(num_ranks, mesh, tmp_path):
    replicas = num_ranks // mesh["pipeline_stages"]
    first, *others = fork(evaluate, num_ranks, functions=METRICS, **mesh)
    assert all(metrics == first for metrics in others)  # runtime too
    emulated = evaluate(0, functions=METRICS, data_parallel_replicas=replicas, **mesh)
    counted = [name for name in emulated if name.startswith(("eval_a", "eval_p", "eval_su"))]
    assert len(counted) == 3 and {name: first[name] for name in counted} == {name: emulated[name] for name in counted}
    assert first["eval_loss"] == pytest.approx(emulated["eval_loss"], rel=1e-6)


def fails(prediction):
    raise KeyError("no such metric")


def returns_an_array(prediction):
    return {"confusion": np.eye(2)}


def refuse(rank: int, *, metric) -> str:
    with pytest.raises(RuntimeError) as caught:
        evaluate(rank, functions={**METRICS, "compute_metrics": metric}, pipeline_stages=2)
    assert (caught.value.__cause__ is not None) == (rank == 1)  # where it happened, with its own traceback
    return str(caught.value)


@pytest.mark.parametrize(
    "function,message",
    [
        (fails, "compute_metrics: KeyError: 'no such metric'"),
        (returns_an_array, "compute_metrics: TypeError.*ndarray"),
    ],
)
def test_an_error_in_the_metrics_reaches_all_ranks(function, message):
    for said in fork(refuse, 4, metric=function):
        assert re.match(message, said), said


def fails_on_some(logits, labels):
    if dist.get_rank() == 3:
        raise IndexError("no such token")
    return greedy(logits, labels)


def returns_text(logits, labels):
    return ["a"] * len(logits)


def refuse_preprocessing(rank: int, *, preprocess, **others) -> str:
    with pytest.raises(RuntimeError) as caught:
        evaluate(rank, functions={**METRICS, **others, "preprocess_logits_for_metrics": preprocess}, pipeline_stages=2)
    return str(caught.value)


def test_an_error_in_the_preprocessing_reaches_all_ranks():
    """Of one replica alone, and where it shows only when the rows are to be sent; without metrics too."""
    for said in fork(refuse_preprocessing, 4, preprocess=fails_on_some):
        assert said == "preprocess_logits_for_metrics: IndexError: no such token (rank 3 (stage 1 of replica 1))"
    for said in fork(refuse_preprocessing, 2, preprocess=returns_text):
        assert re.match("preprocess_logits_for_metrics: TypeError.*rank 1", said), said


def predict(rank: int, *, functions: dict, **mesh):
    return make_trainer(rank, tempfile.mkdtemp(), functions, **mesh).predict(Rows(10, seed=5))


def test_whole_logits_stay_on_the_last_stages():
    ranks = fork(predict, 4, functions={}, pipeline_stages=2)
    emulated = predict(0, functions={}, pipeline_stages=2, data_parallel_replicas=2)
    assert ranks[0].predictions is None and ranks[2].label_ids is None
    assert all(rank.metrics == ranks[0].metrics for rank in ranks)
    # Batches of 2 x 4 rows: replica 0 read rows 0-3 and 8-9, replica 1 rows 4-7.
    for rank, rows in ((1, [0, 1, 2, 3, 8, 9]), (3, [4, 5, 6, 7])):
        held, labels = ranks[rank].predictions, emulated.label_ids[rows][:, : ranks[rank].label_ids.shape[1]]
        assert held.shape[:1] + held.shape[2:] == (len(rows), 97)
        assert np.array_equal(ranks[rank].label_ids, labels)
        real = labels != -100
        np.testing.assert_allclose(
            held[real], emulated.predictions[rows][:, : held.shape[1]][real], rtol=1e-4, atol=1e-6
        )


def test_reduced_predictions_are_where_the_metrics_are_computed():
    ranks = fork(predict, 4, functions=METRICS, pipeline_stages=2)
    assert [rank.predictions is not None for rank in ranks] == [False, True, False, False]
    assert len(ranks[1].predictions) == len(ranks[1].label_ids) == 10


def test_rows_are_read_from_bytes_not_pickles():
    from hf_meshadapt.evaluation_loop import flatten, unflatten

    tree = {"a": (torch.ones(2), [torch.zeros(1)]), "b": torch.ones(3, dtype=torch.bool)}
    flat = dict(flatten(tree))
    assert list(flat) == ["/a/0", "/a/1/0", "/b"]
    again = unflatten(tree, flat)
    assert torch.equal(again["a"][1][0], tree["a"][1][0]) and isinstance(again["a"], tuple)
