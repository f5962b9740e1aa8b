"""The byte plan against cases worked out by hand, and what must hold for any mesh."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.anchor.schedule import AnchorTraffic
from hf_meshadapt.config import BoundaryConfig, MeshConfig
from hf_meshadapt.planner import (
    ANCHOR_RANK,
    GLOO_MESSAGE_BYTES,
    PLAN_AXES,
    AnchorPlan,
    ModelShape,
    all_reduce_links,
    byte_plan,
)

M95 = BoundaryConfig("random_mask", mask_ratio=0.95, wire_dtype="bfloat16")


def model_of(num_chunks: int, **changes) -> ModelShape:
    shape = {"hidden_size": 2048, "vocab_size": 128256, "num_layers": 16, "chunk_parameters": (1000,) * num_chunks}
    return ModelShape(**{**shape, **changes})


def test_a_middle_stage_of_llama_sends_408_bytes_a_token_at_m95_and_8192_dense():
    plan = byte_plan(model_of(8), MeshConfig(stages=8, microbatches=4), M95, sequences=4, length=512)
    assert plan.tokens == 2048
    # FIELD: one activation to the next stage and one gradient to the one before, 102 entries of 2 bytes each.
    assert plan.uplink_bytes(3, "pipeline") == 408 * plan.tokens
    assert plan.dense().uplink_bytes(3, "pipeline") == 8192 * plan.tokens
    assert plan.uplink_bytes(0, "pipeline") == plan.uplink_bytes(7, "pipeline") == 204 * plan.tokens
    assert plan.bytes_per_token("pipeline") == 7 * 408
    assert plan.ratio_to_dense("pipeline") == pytest.approx(408 / 8192)


def test_pipeline_bytes_by_boundary_and_direction():
    mesh = MeshConfig(stages=2, replicas=2, microbatches=2)
    plan = byte_plan(model_of(2, hidden_size=8), mesh, BoundaryConfig(), sequences=4, length=3, accumulation=5)
    per_replica_bytes = 4 * 5 * 3 * 8 * 4
    assert plan.boundary_bytes(0, "forward") == plan.boundary_bytes(0, "backward") == 2 * per_replica_bytes
    assert plan.axis_bytes("pipeline") == 4 * per_replica_bytes
    assert [(link.from_rank, link.to_rank) for link in plan.links if link.axis == "pipeline"] == [
        (0, 1),
        (1, 0),
        (2, 3),
        (3, 2),
    ]
    # 2 microbatches x 5 accumulation steps x 2 directions x 2 replicas.
    assert plan.framing_bytes("pipeline") == 40 * GLOO_MESSAGE_BYTES


def test_an_anchor_adds_its_snapshots_and_priors_spread_over_a_round():
    mesh, sizes = MeshConfig(stages=2, replicas=2), dict(sequences=4, length=3)
    anchor = AnchorPlan(AnchorTraffic(snapshot_bytes=(1000, 2000), prior_bytes=(100, 300)), anchor_every=10)
    plan, without = (byte_plan(model_of(2), mesh, BoundaryConfig(), **sizes, anchor=one) for one in (anchor, None))
    assert [(link.from_rank, link.to_rank, link.bytes) for link in plan.links if link.axis == "anchor"] == [
        (0, ANCHOR_RANK, 100),
        (ANCHOR_RANK, 0, 10),
        (0, 2, 10),
        (1, ANCHOR_RANK, 200),
        (ANCHOR_RANK, 1, 30),
        (1, 3, 30),
    ]
    # Six figures of each of four ranks to another, and two counts, all-reduced over two replicas of two stages.
    assert plan.axis_bytes("control") - without.axis_bytes("control") == 4 * 6 * 8 + 2 * 2 * 2 * 8
    assert plan.dense() == without.dense() and without.axis_bytes("anchor") == 0
    assert plan.total_bytes - without.total_bytes == 380 + 256


def test_an_exact_first_token_travels_whole():
    boundary = BoundaryConfig("random_mask", mask_ratio=0.9, exact_first_token=True)
    plan = byte_plan(model_of(2, hidden_size=100), MeshConfig(stages=2), boundary, sequences=2, length=11)
    assert plan.boundary_bytes(0, "forward") == 2 * (100 + 10 * 10) * 4


def test_a_transform_boundary_spends_its_budget_three_to_one():
    boundary = BoundaryConfig("transform", budget=0.05, wire_dtype="bfloat16")
    plan = byte_plan(model_of(2, hidden_size=100), MeshConfig(stages=2), boundary, sequences=3, length=10)
    dense_bytes = 3 * 10 * 100 * 2  # of one direction
    assert plan.boundary_bytes(0, "forward") == 0.075 * dense_bytes
    assert plan.boundary_bytes(0, "backward") == 0.025 * dense_bytes
    assert plan.ratio_to_dense("pipeline") == 0.05
    assert plan.dense().axis_bytes("pipeline") == 2 * dense_bytes


def test_boundaries_may_have_budgets_of_their_own():
    boundary = BoundaryConfig("transform", budget=0.05, budgets=(0.1, 0.4))
    plan = byte_plan(model_of(3, hidden_size=100), MeshConfig(stages=3, replicas=2), boundary, sequences=3, length=10)
    dense_bytes = 2 * 3 * 10 * 100 * 2  # of one direction and both replicas
    for index, budget in enumerate(boundary.budgets):
        assert plan.boundary_bytes(index, "forward") == pytest.approx(1.5 * budget * dense_bytes)
        assert plan.boundary_bytes(index, "backward") == pytest.approx(0.5 * budget * dense_bytes)
    assert plan.axis_bytes("pipeline") == pytest.approx((0.1 + 0.4) * 2 * dense_bytes)
    assert (
        plan.uplink_bytes(1) - plan.uplink_bytes(1, "control") - plan.uplink_bytes(1, "data_parallel")
        == (plan.boundary_bytes(1, "forward") + plan.boundary_bytes(0, "backward")) // 2
    )
    assert plan.dense().axis_bytes("pipeline") == 4 * 2 * 3 * 10 * 100 * 4


@settings(max_examples=200, deadline=None)
@given(st.floats(0.001, 1.0), st.floats(0.01, 0.99), st.integers(1, 3000), st.integers(1, 4096))
def test_both_directions_together_stay_within_the_budget(budget, share, length, hidden_size):
    boundary = BoundaryConfig("transform", budget=budget, forward_share=share)
    spent = {way: boundary.sequence_bytes(length, hidden_size, way) for way in ("forward", "backward")}
    wanted = budget * 2 * length * hidden_size * 2
    assert wanted - 4 < sum(spent.values()) <= wanted * (1 + 1e-12)
    assert spent["forward"] == pytest.approx(share * wanted, abs=2.001)
    assert all(count % 2 == 0 for count in spent.values())  # the gradient's bytes travel as bfloat16


def test_interleaved_chunks_go_round_the_stages():
    mesh = MeshConfig(stages=2, chunks_per_rank=2, microbatches=2, schedule="interleaved")
    plan = byte_plan(model_of(4, hidden_size=8), mesh, BoundaryConfig(), sequences=2, length=3)
    forward = [(link.boundary, link.from_rank, link.to_rank) for link in plan.links if link.direction == "forward"]
    assert forward == [(0, 0, 1), (1, 1, 0), (2, 0, 1)]
    assert plan.axis_bytes("pipeline") == 3 * 2 * (2 * 3 * 8 * 4)


def test_chunks_of_one_rank_hand_over_in_memory():
    plan = byte_plan(model_of(2), MeshConfig(stages=1, chunks_per_rank=2), M95, sequences=1, length=1)
    assert plan.total_bytes == 0
    assert plan.ratio_to_dense("pipeline") == 1.0


def test_tied_embeddings_cost_both_ends_the_whole_matrix_once_a_step():
    model = model_of(3, hidden_size=4, vocab_size=10, tied_embeddings=True, gradient_bytes=2)
    plan = byte_plan(model, MeshConfig(stages=3, replicas=2), M95, sequences=1, length=1, accumulation=3)
    assert [(link.from_rank, link.to_rank, link.bytes) for link in plan.links if link.axis == "tied"] == [
        (0, 2, 80),
        (2, 0, 80),
        (3, 5, 80),
        (5, 3, 80),
    ]
    assert plan.ratio_to_dense("tied") == 1.0


def test_tied_gradient_of_llama_is_1_05_gb_over_both_ends():
    model = model_of(8, tied_embeddings=True, gradient_bytes=2)
    plan = byte_plan(model, MeshConfig(stages=8), M95, sequences=1, length=1)
    assert plan.uplink_bytes(0, "tied") == 128256 * 2048 * 2  # FIELD: 525 MB


def test_data_parallel_sends_each_stages_chunks_round_a_ring():
    mesh = MeshConfig(stages=2, replicas=3, chunks_per_rank=2)
    model = model_of(4, chunk_parameters=(1, 20, 300, 4000))
    plan = byte_plan(model, mesh, M95, sequences=1, length=1, accumulation=2)
    # Stage 0 holds chunks 0 and 2, stage 1 chunks 1 and 3; all ranks together send 2(n-1) times the tensor.
    assert plan.axis_bytes("data_parallel") == 2 * 2 * 4 * (301 + 4020)
    stage_0 = [link for link in plan.links if link.axis == "data_parallel" and link.from_rank % 2 == 0]
    assert [(link.from_rank, link.to_rank) for link in stage_0] == [(0, 4), (2, 0), (4, 2)]
    assert [link.bytes for link in stage_0] == [1606, 1605, 1605]


def test_one_rank_sends_nothing():
    plan = byte_plan(model_of(1, tied_embeddings=True), MeshConfig(), BoundaryConfig(), sequences=1, length=1)
    assert plan.links == ()


def test_to_dict_is_json():
    plan = byte_plan(model_of(2), MeshConfig(stages=2, replicas=2), M95, sequences=1, length=4)
    summary = json.loads(json.dumps(plan.to_dict()))
    assert summary["axes"]["total"]["bytes"] == plan.total_bytes
    assert summary["axes"]["pipeline"]["dense_bytes"] == plan.dense().axis_bytes("pipeline")
    assert summary["boundaries"] == [{"forward_bytes": 2 * 4 * 204, "backward_bytes": 2 * 4 * 204}]
    assert sum(link["bytes"] for link in summary["links"]) == plan.total_bytes


def test_errors_name_field_and_value():
    with pytest.raises(ValueError, match="chunk_parameters has 3 entries, the mesh has 2 chunks"):
        byte_plan(model_of(3), MeshConfig(stages=2), M95, sequences=1, length=1)
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        byte_plan(model_of(2), MeshConfig(stages=2), M95, sequences=1, length=0)
    plan = byte_plan(model_of(2), MeshConfig(stages=2), M95, sequences=1, length=1)
    with pytest.raises(ValueError, match="axis='pipe' is not one of pipeline, tied"):
        plan.axis_bytes("pipe")


def test_planner_imports_neither_torch_nor_transformers():
    code = "import sys, hf_meshadapt.planner; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@st.composite
def plans(draw):
    mesh = MeshConfig(
        stages=draw(st.integers(1, 5)),
        replicas=draw(st.integers(1, 4)),
        chunks_per_rank=draw(st.integers(1, 3)),
        microbatches=draw(st.integers(1, 4)),
    )
    model = ModelShape(
        hidden_size=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(1, 1000)),
        num_layers=mesh.num_chunks,
        chunk_parameters=tuple(draw(st.integers(0, 10_000)) for _ in range(mesh.num_chunks)),
        tied_embeddings=draw(st.booleans()),
        gradient_bytes=draw(st.sampled_from([2, 4])),
    )
    boundary = BoundaryConfig(
        codec=draw(st.sampled_from(["none", "random_mask", "transform"])),
        mask_ratio=draw(st.floats(0, 0.999)),
        exact_first_token=draw(st.booleans()),
        wire_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        budget=draw(st.floats(0.001, 1.0)),
        forward_share=draw(st.floats(0.1, 0.9)),
    )
    sequences = mesh.microbatches * draw(st.integers(1, 3))
    length, accumulation = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    return byte_plan(model, mesh, boundary, sequences=sequences, length=length, accumulation=accumulation)


@settings(max_examples=100, deadline=None)
@given(plans())
def test_codecs_never_increase_bytes_and_leave_other_axes_alone(plan):
    for axis in PLAN_AXES:
        assert plan.axis_bytes(axis) <= plan.dense().axis_bytes(axis)
        assert axis == "pipeline" or plan.ratio_to_dense(axis) == 1.0
    assert plan.ratio_to_dense() <= 1.0


@settings(max_examples=100, deadline=None)
@given(plans())
def test_axes_links_and_ranks_add_up(plan):
    ranks = range(plan.mesh.num_ranks)
    assert plan.total_bytes == sum(plan.axis_bytes(axis) for axis in PLAN_AXES)
    assert plan.total_bytes == sum(link.bytes for link in plan.links) == sum(map(plan.uplink_bytes, ranks))
    boundaries = range(plan.mesh.num_boundaries)
    both_ways = [plan.boundary_bytes(index, way) for index in boundaries for way in ("forward", "backward")]
    assert plan.axis_bytes("pipeline") == sum(both_ways)
    assert all(link.from_rank != link.to_rank and {link.from_rank, link.to_rank} <= set(ranks) for link in plan.links)


@given(st.integers(2, 9), st.integers(1, 10**9))
def test_all_reduce_shares_differ_by_at_most_a_byte(num_ranks, size_bytes):
    shares = [link.bytes for link in all_reduce_links("data_parallel", list(range(num_ranks)), size_bytes)]
    assert sum(shares) == 2 * (num_ranks - 1) * size_bytes
    assert max(shares) - min(shares) <= 1
