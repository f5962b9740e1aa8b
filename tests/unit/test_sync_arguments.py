"""How replicas synchronise: what the arguments refuse, fill in, and hand on."""

from __future__ import annotations

import dataclasses

import pytest

from hf_meshadapt import MeshAdaptArguments
from hf_meshadapt.config import DataParallelConfig

TWO = {"data_parallel_replicas": 2}
POWERSGD = {**TWO, "dp_sync": "powersgd"}
DILOCO = {**TWO, "dp_sync": "diloco"}
STREAMING = {**TWO, "dp_sync": "streaming_diloco"}


@pytest.fixture
def make(tmp_path):
    return lambda **fields: MeshAdaptArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **fields)


# Fields, then what the message must hold: field=value, and a word of the remedy.
REFUSED = [
    ({**TWO, "dp_sync": "gossip"}, "dp_sync='gossip'", "allreduce, powersgd"),
    ({"dp_sync": "powersgd"}, "dp_sync='powersgd'", "Launch two replicas"),
    ({"dp_sync": "diloco", "pipeline_stages": 2}, "dp_sync='diloco'", "Launch two replicas"),
    ({"tied_embeddings": "thaw"}, "tied_embeddings='thaw'", "sync, freeze"),
    ({**TWO, "matrix_rank": 4}, "matrix_rank=4", "Use it with powersgd or diloco"),
    ({**TWO, "sync_every": 4}, "sync_every=4", "Use it with diloco or streaming_diloco"),
    ({**POWERSGD, "outer_wire": "int8"}, "outer_wire='int8'", "Use it with diloco"),
    ({**DILOCO, "overlap_steps": 1}, "overlap_steps=1", "Use it with streaming_diloco"),
    ({**DILOCO, "mixing": 0.5}, "mixing=0.5", "Use it with streaming_diloco"),
    ({**POWERSGD, "matrix_rank": 0}, "matrix_rank=0", "Use 1 or more"),
    ({**POWERSGD, "factor_dtype": "int8"}, "factor_dtype='int8'", "float32, bfloat16"),
    ({**DILOCO, "outer_wire": "int4"}, "outer_wire='int4'", "int8, powersgd"),
    ({**DILOCO, "sync_every": 0}, "sync_every=0", "Use 1 or more"),
    ({**DILOCO, "outer_learning_rate": 0.0}, "outer_learning_rate=0.0", "Try 0.7"),
    ({**DILOCO, "outer_learning_rate": float("nan")}, "outer_learning_rate=nan", "Try 0.7"),
    ({**DILOCO, "outer_momentum": 1.0}, "outer_momentum=1.0", "Try 0.9"),
    ({**STREAMING, "mixing": 1.0}, "mixing=1.0", "Try 0.5"),
    ({**STREAMING, "num_fragments": 31}, "num_fragments=31", "raise sync_every"),
    ({**STREAMING, "overlap_steps": 10}, "overlap_steps=10", "raise sync_every"),
    ({**STREAMING, "overlap_steps": -1}, "overlap_steps=-1", "Lower it"),
    ({"check_replicas_every": 10}, "check_replicas_every=10", "Launch two replicas"),
    ({**TWO, "check_replicas_every": 0}, "check_replicas_every=0", "Use 1 or more"),
    ({**STREAMING, "sync_chunk_bytes": 0}, "sync_chunk_bytes=0", "Use 1 or more"),
    ({**DILOCO, "outer_wire": "int8", "matrix_rank": 8}, "matrix_rank=8", "Use outer_wire=powersgd"),
    ({**STREAMING, "factor_dtype": "float32"}, "factor_dtype='float32'", "Use outer_wire=powersgd"),
]


@pytest.mark.parametrize("fields,named,remedy", REFUSED, ids=lambda value: str(value)[:50])
def test_wrong_values_are_refused_with_field_value_and_remedy(make, fields, named, remedy):
    with pytest.raises(ValueError) as error:
        make(**fields)
    assert named in str(error.value) and remedy in str(error.value)


def test_defaults(make):
    assert make().data_parallel_config() == DataParallelConfig()
    assert make(**POWERSGD).data_parallel_config() == DataParallelConfig("powersgd")
    assert make(**TWO, check_replicas_every=10).data_parallel_config() == DataParallelConfig(check_every=10)
    assert make(**DILOCO).data_parallel_config() == DataParallelConfig("diloco", sync_every=30)
    streaming = make(**STREAMING).data_parallel_config()
    expected = DataParallelConfig("streaming_diloco", sync_every=30, num_fragments=3, overlap_steps=5, mixing=0.5)
    assert streaming == expected


@pytest.mark.parametrize("every,fragments,overlap", [(1, 1, 0), (2, 2, 0), (7, 3, 1), (100, 3, 5)])
def test_defaults_of_fragments_fit_short_rounds(make, every, fragments, overlap):
    config = make(**STREAMING, sync_every=every).data_parallel_config()
    assert (config.num_fragments, config.overlap_steps) == (fragments, overlap)


def test_factors_travel_where_replicas_or_tied_copies_exchange_them(make):
    for fields in ({"outer_wire": "powersgd"}, {"pipeline_stages": 2}):
        assert make(**DILOCO, **fields, matrix_rank=8).data_parallel_config().matrix_rank == 8
    args = make(**DILOCO)
    assert args.matrix_rank is None and dataclasses.replace(args, seed=1).matrix_rank is None


def test_the_papers_preset_lets_replicas_step_apart(make):
    paper = dict(preset="paper", pipeline_stages=2)
    streaming = dict(sync="streaming_diloco", outer_wire="powersgd", num_fragments=3, overlap_steps=5, mixing=0.5)
    assert make(**TWO, **paper).data_parallel_config() == DataParallelConfig(**streaming, sync_every=30)
    assert make(**paper).data_parallel_config() == DataParallelConfig()  # one replica
    assert make(**TWO, pipeline_stages=2).dp_sync == "allreduce"
    # What is given wins, and its fields are checked against it.
    given = make(**TWO, **paper, outer_wire="int8", sync_every=6).data_parallel_config()
    assert (given.outer_wire, given.sync_every, given.overlap_steps) == ("int8", 6, 1)
    assert make(**TWO, **paper, dp_sync="allreduce").data_parallel_config() == DataParallelConfig()
    assert make(**DILOCO, **paper).data_parallel_config().outer_wire == "powersgd"
    for fields in (dict(**TWO, dp_sync="allreduce", sync_every=6), dict(sync_every=6)):
        with pytest.raises(ValueError, match="^sync_every=6: has no effect with dp_sync=allreduce"):
            make(**paper, **fields)


def test_replicas_of_a_launch_are_known_where_the_sync_is_chosen(make, monkeypatch):
    # Without the others whom a launcher would have started.
    monkeypatch.setattr("hf_meshadapt.arguments.join_world", lambda *_: None)
    monkeypatch.setattr("transformers.TrainingArguments.__post_init__", lambda self: None)
    for world, sync in ((4, "streaming_diloco"), (2, "allreduce")):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert make(preset="paper", pipeline_stages=2).dp_sync == sync


def test_the_anchor_circuit_takes_the_fast_circuits_arguments(make, monkeypatch):
    monkeypatch.setenv("HF_MESHADAPT_ANCHOR_SECRET", "a secret of the tests")
    anchor = dict(anchor=True, circuit="anchor", fast_endpoint="127.0.0.1:29600")
    assert make(**anchor, dp_sync="powersgd", check_replicas_every=5).data_parallel_config() == DataParallelConfig()
    # Whose replicas it does not know.
    paper = dict(preset="paper", pipeline_stages=2, sync_every=6, matrix_rank=4)
    assert make(**anchor, **paper).data_parallel_config() == DataParallelConfig()
