"""What synchronising replicas sends, from shapes: against figures worked out by hand for known models."""

from __future__ import annotations

import math

import pytest

from hf_meshadapt.config import BoundaryConfig, DataParallelConfig, MeshConfig
from hf_meshadapt.data_parallel.sizes import int8_bytes
from hf_meshadapt.planner import ModelShape, byte_plan
from hf_meshadapt.sync_plan import sync_messages


def llama_shapes(vocab: int, hidden: int, intermediate: int, layers: int, key_value: int) -> list[tuple[int, ...]]:
    """Trainable parameters of a Llama with tied embeddings."""
    layer = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    return [(vocab, hidden), *(layer * layers), (hidden,)]


SMOLLM2 = llama_shapes(49152, 576, 1536, 30, 192)
LLAMA_1B = llama_shapes(128256, 2048, 8192, 16, 512)


def sent_bytes(shapes, **config) -> int:
    return sum(size for _, size in sync_messages(shapes, DataParallelConfig(**config)))


@pytest.mark.parametrize("rank,megabytes", [(4, 6.7), (16, 26.7), (32, 53.4), (64, 106.9)])
def test_bytes_of_llama_1b_by_rank(rank, megabytes):
    """Factors in bfloat16, embedding included: rank x (rows + columns) x 2 bytes over all matrices, 2.47 GB dense."""
    assert sum(map(math.prod, LLAMA_1B)) == 1_235_814_400
    size = sent_bytes(LLAMA_1B, sync="powersgd", matrix_rank=rank)
    assert size == pytest.approx(megabytes * 1e6, rel=0.1)
    sides = sum(sum(shape) for shape in LLAMA_1B if len(shape) == 2)
    vectors = sum(shape[0] for shape in LLAMA_1B if len(shape) == 1)
    assert size == 2 * (rank * sides + vectors)
    assert 2.47e9 / size == pytest.approx(64 * 23.1 / rank, rel=0.1)


@pytest.mark.parametrize("rank", [4, 16, 32, 64])
def test_bytes_of_smollm2_by_rank(rank):
    """Rows + columns: 2 x 1152, 2 x 768 and 3 x 2112 in each of 30 layers, 49728 of the embedding; 61 norms of 576."""
    assert sum(map(math.prod, SMOLLM2)) == 134_515_008
    sides = 30 * (2 * 1152 + 2 * 768 + 3 * 2112) + 49_728
    assert sent_bytes(SMOLLM2, sync="powersgd", matrix_rank=rank) == 2 * (rank * sides + 61 * 576)


def test_a_rank_too_high_to_save_anything_sends_matrices_whole():
    assert sent_bytes([(64, 64)], sync="powersgd", matrix_rank=32) == 2 * 64 * 64


def test_outer_wires():
    shapes, values = [(100, 30), (7,)], 3007
    assert sent_bytes(shapes, sync="diloco", outer_wire="float32") == 4 * values
    assert sent_bytes(shapes, sync="diloco", outer_wire="bfloat16") == 2 * values
    assert sent_bytes(shapes, sync="diloco", outer_wire="int8") == int8_bytes(values) == values + 4 * 12
    low_rank = dict(outer_wire="powersgd", matrix_rank=2, factor_dtype="float32")
    assert sent_bytes(shapes, sync="diloco", **low_rank) == 4 * (2 * 130 + 7)
    streaming = DataParallelConfig("streaming_diloco", outer_wire="bfloat16", chunk_bytes=1000)
    assert sync_messages(shapes, streaming) == [("reduce", 1000)] * 6 + [("reduce", 14)]
    streaming = DataParallelConfig("streaming_diloco", outer_wire="int8", chunk_bytes=2000)
    assert sync_messages(shapes, streaming) == [("gather", 2000), ("gather", 1055)]


def plan_of(replicas: int = 2, **config):
    shape = ModelShape(
        hidden_size=30,
        vocab_size=200,
        num_layers=2,
        chunk_parameters=(6000, 6000),
        tied_embeddings=True,
        sync_parts=((((200, 30),),), (((100, 30),), ((100, 30),))),
    )
    sync = DataParallelConfig(**config)
    mesh = MeshConfig(stages=2, replicas=replicas)
    return byte_plan(shape, mesh, BoundaryConfig(), sequences=1, length=4, data_parallel=sync)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_step_has_its_share_of_a_round(replicas):
    """A ring all-reduce sends 2(n - 1) times its message over all ranks, an all-gather n(n - 1) times."""
    ring = 2 * (replicas - 1)
    dense = plan_of(replicas)
    assert dense.axis_bytes("data_parallel") == ring * 4 * 12000
    powersgd = plan_of(replicas, sync="powersgd", matrix_rank=2)
    assert powersgd.axis_bytes("data_parallel") == ring * 2 * 2 * (230 + 130 + 130)
    diloco = plan_of(replicas, sync="diloco", sync_every=10)
    assert diloco.axis_bytes("data_parallel") == pytest.approx(ring * 2 * 12000 / 10)
    int8 = plan_of(replicas, sync="diloco", sync_every=10, outer_wire="int8")
    gathered = replicas * (replicas - 1) * (int8_bytes(6000) + 2 * int8_bytes(3000))
    assert int8.axis_bytes("data_parallel") == pytest.approx(gathered / 10)
    ratio = powersgd.ratio_to_dense("data_parallel")
    assert ratio == powersgd.axis_bytes("data_parallel") / dense.axis_bytes("data_parallel") < 1


def test_tied_copies_exchange_factors_unless_all_is_dense():
    assert plan_of().axis_bytes("tied") == 2 * 2 * 4 * 6000  # two replicas, two ends, float32
    for sync in ("powersgd", "diloco", "streaming_diloco"):
        assert plan_of(sync=sync, matrix_rank=2).axis_bytes("tied") == 2 * 2 * 2 * 2 * 230


def test_replicas_that_step_apart_agree_on_a_norm_too():
    extra = plan_of(sync="diloco").axis_bytes("control") - plan_of(sync="powersgd").axis_bytes("control")
    assert extra == 2 * 2 * 8  # two stages, two replicas, a float64


def test_comparing_replicas_sends_hashes_now_and_then():
    unchecked, checked = (plan_of(sync="powersgd", **more).axis_bytes("control") for more in ({}, {"check_every": 10}))
    assert 10 * (checked - unchecked) == pytest.approx(2 * 2 * (8 + 16))  # two stages, two replicas


def test_shapes_are_needed_of_every_stage():
    model = ModelShape(hidden_size=8, vocab_size=10, num_layers=2, chunk_parameters=(1, 1))
    with pytest.raises(ValueError, match="sync_parts has 0 entries"):
        byte_plan(
            model,
            MeshConfig(stages=2, replicas=2),
            BoundaryConfig(),
            sequences=1,
            length=1,
            data_parallel=DataParallelConfig("powersgd"),
        )
