"""The memory plan: by hand on small numbers, on fake tensors against real ones, and what it refuses."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.config import BoundaryConfig, DataParallelConfig, MeshConfig
from hf_meshadapt.memory import (
    ChunkFootprint,
    RankWeights,
    check_fits,
    memory_plan,
    optimizer_copies,
    passes_bytes,
    resident_plan,
    table_bytes,
)
from hf_meshadapt.pipeline import footprint
from hf_meshadapt.pipeline.footprint import LiveBytes, outline_weights, rank_footprint
from hf_meshadapt.pipeline.schedule import interleaved_order, rank_order
from tests.architectures import make_architecture
from tests.equality import Rows, collate_fixed, tiny_model

CHUNK = ChunkFootprint(
    held=100, forward=130, first_backward=150, backward=120, sent_forward=10, sent_backward=10, gradients=40
)
RANK = RankWeights(weights=44, trainable=40, largest=8)


def passes(order: str, chunks=None, **options) -> int:
    actions = [(kind, 0, index) for index, kind in enumerate(order)]
    return passes_bytes(chunks or {0: CHUNK}, actions, **{"keeps_sent": False, **options})


def test_passes_by_hand():
    assert passes("FB") == 150
    assert passes("FBFB") == 40 + 130  # the second forward pass, beside the gradients
    assert passes("FFBB") == 100 + 150
    assert passes("FFFBBB") == 200 + 150
    assert passes("FB", gradients_there=True) == 40 + 130
    # What was sent stays until the end of the step.
    assert passes("FBFB", keeps_sent=True) == 40 + 20 + 130


def test_1f1b_holds_no_more_microbatches_than_stages_follow():
    for stages, microbatches in itertools.product((2, 4), (4, 8)):
        for schedule in ("gpipe", "1f1b"):
            for stage in range(stages):
                mesh = MeshConfig(stages=stages, microbatches=microbatches, schedule=schedule)
                order = [kind for kind, _, _ in rank_order(mesh, stage)]
                held = max(order[: i + 1].count("F") - order[:i].count("B") for i in range(len(order)))
                assert held == (microbatches if schedule == "gpipe" else min(microbatches, stages - stage))


@pytest.mark.parametrize("microbatches,stages,chunks", [(4, 2, 2), (8, 4, 2), (4, 2, 3), (6, 2, 2), (2, 2, 2)])
def test_the_interleaved_order_is_torchs(microbatches, stages, chunks):
    torchs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    torchs.n_local_stages, torchs.pp_group_size, torchs._n_microbatches = chunks, stages, microbatches
    torchs.number_of_rounds = max(1, microbatches // stages)
    torchs.microbatches_per_round = microbatches // torchs.number_of_rounds
    for stage in range(stages):
        expected = [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in torchs._calculate_single_rank_operations(stage)
            if action
        ]
        assert interleaved_order(microbatches, stage, stages, chunks) == expected


def test_a_plan_adds_up():
    mesh = MeshConfig(stages=2, replicas=2, microbatches=3)
    plan = memory_plan(RANK, {0: CHUNK}, rank_order(mesh, 0), mesh, optimizer="adamw_torch", boundary_bytes=7)
    assert (plan.weights, plan.optimizer, plan.reducer, plan.boundary) == (44, 80, 40, 7)
    assert plan.wire == 3 * 20
    assert plan.passes == 200 + 150
    assert plan.peak_bytes == 44 + 80 + 40 + 7 + 60 + 350
    # Where activations are small the optimizer's temporaries decide.
    small = ChunkFootprint(1, 1, 41, 1, 0, 0, 40)
    assert memory_plan(RANK, {0: small}, [("F", 0, 0), ("B", 0, 0)], mesh, optimizer="adamw_torch").passes == 40 + 16
    assert resident_plan(RANK, mesh, "sgd").peak_bytes == 44 + 40 + 40
    assert resident_plan(RANK, mesh, "an optimizer nobody knows").optimizer == 0


@pytest.mark.parametrize(
    "sync,emulated,reducer,kept",
    [
        (DataParallelConfig(), False, 1, 0),
        (DataParallelConfig("powersgd"), False, 1, 1),  # errors
        (DataParallelConfig("diloco"), False, 0, 2),  # outer weights and momentum
        (DataParallelConfig("diloco", outer_wire="powersgd"), False, 0, 3),
        (DataParallelConfig("powersgd"), True, 0, 3),  # errors of three replicas
        (DataParallelConfig("diloco"), True, 0, 2 + 2 * 3),  # two more replicas' weights and AdamW state
    ],
)
def test_state_of_the_data_parallel_sync(sync, emulated, reducer, kept):
    mesh = MeshConfig(stages=2, replicas=3, emulated=emulated)
    plan = resident_plan(RANK, mesh, "adamw_torch", sync=sync)
    assert (plan.reducer, plan.sync) == (reducer * RANK.trainable, kept * RANK.trainable)
    assert plan.peak_bytes == resident_plan(RANK, mesh, "adamw_torch").peak_bytes + (
        plan.reducer + plan.sync - resident_plan(RANK, mesh, "adamw_torch").reducer
    )


def test_tables_of_boundaries():
    assert table_bytes(BoundaryConfig(), 16, 100, 8, ends=2) == 0
    mean = BoundaryConfig(codec="random_mask", mask_ratio=0.5, predictor="mean")
    assert table_bytes(mean, 16, 100, 8, ends=2) == 2 * 4 * 16
    coded = BoundaryConfig(codec="transform", predictor="token", budget=0.05)
    assert table_bytes(coded, 16, 100, 8, ends=2) == 2 * (4 * 17 * 16 + 4 * 4 * 16 * 16 + 8 * 100) + 2 * 100 * 8


# Fake tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mamba", "bloom", "phi3"])
def test_fake_passes_take_the_bytes_of_real_ones(name):
    """Held and most bytes of a whole model's forward and backward pass, gradients there from the start."""
    model = make_architecture(name).train()
    _, chunks = rank_footprint(model, MeshConfig(), 0, rows=2, length=32)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["attention_mask"][0, -4:] = 0  # real masks are read: without padding there is none
    items = torch.ones(())

    def run():
        return model(**inputs, num_items_in_batch=items, use_cache=False).loss

    run().backward()
    known = [*model.parameters(), *model.buffers(), *inputs.values(), items]
    live = LiveBytes(known + [p.grad for p in model.parameters()])
    with live:
        loss = run()
        held, forward = live.live, live.take_peak()
        loss.backward()
        backward = live.take_peak()
    assert chunks[0].held == pytest.approx(held, rel=0.02)
    assert chunks[0].forward == pytest.approx(forward, rel=0.02)
    assert chunks[0].backward == pytest.approx(backward, rel=0.02)
    assert chunks[0].gradients == sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_weights_are_known_without_loading(name):
    model = make_architecture(name)
    total = sum(p.numel() * 4 for p in model.parameters())
    for stages in (1, 2, 4):
        mesh = MeshConfig(stages=stages)
        outlined = [outline_weights(model, mesh, stage) for stage in range(stages)]
        run = [rank_footprint(model, mesh, stage, 1, 8)[0] for stage in range(stages)]
        for quick, exact in zip(outlined, run):
            # The quick count takes the final norm, which every stage holds, for trained on all of them.
            assert quick.weights == exact.weights
            assert 0 <= quick.trainable - exact.trainable <= 2 * 4 * 32
        copy = model.get_input_embeddings().weight.numel() * 4 if name == "llama" and stages > 1 else 0
        # On its own a stage cannot know who trains the final norm: chunk 0 counts it too.
        assert 0 <= sum(weights.trainable for weights in run) - total - copy <= 2 * 4 * 32


def test_half_precision_halves_the_weights():
    model = make_architecture("llama")
    single = outline_weights(model, MeshConfig(stages=2), 0)
    half = outline_weights(model, MeshConfig(stages=2), 0, torch.bfloat16)
    assert half.trainable * 2 == single.trainable


def test_a_tied_matrix_that_is_not_trained_counts_as_frozen():
    for name, num_tied in (("llama", 1), ("stablelm", 0)):
        model = make_architecture(name)
        tied_bytes = num_tied * model.get_input_embeddings().weight.numel() * 4
        for stages in (1, 2, 3):
            for stage in range(stages):
                trained, frozen = (
                    outline_weights(model, MeshConfig(stages=stages), stage, freeze_tied=freeze)
                    for freeze in (False, True)
                )
                ends = stage == 0 or stage == stages - 1
                assert frozen.weights == trained.weights
                assert trained.trainable - frozen.trainable == (tied_bytes if ends else 0)
    model = make_architecture("llama")
    for parameter in model.get_input_embeddings().parameters():
        parameter.requires_grad_(False)
    assert outline_weights(model, MeshConfig(), 0) == outline_weights(model, MeshConfig(), 0, freeze_tied=True)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_too_small_a_device(caplog):
    plan = resident_plan(RankWeights(4 * 10**9, 4 * 10**9, 10**9), MeshConfig(stages=2), "adamw_torch")
    with pytest.raises(ValueError, match="rank 1 needs at least 16 GB .weights 4 GB, optimizer state 8 GB, gradients"):
        check_fits(plan, 10**10, None, "rank 1")
    with caplog.at_level(logging.WARNING):
        check_fits(plan, 2 * 10**10, 2 * 10**10, "rank 1")
        assert not caplog.records
        check_fits(plan, 2 * 10**10, 10**10, "rank 1")
    assert "rank 1 needs at least 16 GB" in caplog.text and "only 10 GB of its device are free" in caplog.text


@pytest.mark.parametrize("by_name", [True, False])
def test_the_trainer_refuses_before_loading(by_name, monkeypatch, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(footprint, "device_memory", lambda device: (100_000, None))
    args = MeshAdaptArguments(output_dir=str(tmp_path), pipeline_stages=2, use_cpu=True, report_to="none")
    model = str(tmp_path / "model") if by_name else tiny_model("llama")
    match = r"rank 0 \(stage 0 of replica 0\) needs at least .* kB .*its device has 100 kB. Use more pipeline_stages"
    with pytest.raises(ValueError, match=match):
        MeshAdaptTrainer(model=model, args=args, train_dataset=Rows(4), data_collator=collate_fixed)


def test_a_tied_matrix_that_stays_as_it_is_needs_no_gradient_and_no_optimizer_state(monkeypatch, tmp_path):
    monkeypatch.setattr(footprint, "device_memory", lambda device: (690_000, None))
    options = dict(output_dir=str(tmp_path), pipeline_stages=2, use_cpu=True, report_to="none")
    data = dict(train_dataset=Rows(4), data_collator=collate_fixed)
    with pytest.raises(ValueError, match="needs at least 727 kB"):
        MeshAdaptTrainer(tiny_model("llama_tied"), MeshAdaptArguments(**options), **data)
    MeshAdaptTrainer(tiny_model("llama_tied"), MeshAdaptArguments(**options, tied_embeddings="freeze"), **data)


def test_state_of_few_bits_is_not_counted_as_if_it_were_whole():
    names = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit", "rmsprop_bnb_8bit")
    assert [optimizer_copies(name) for name in names] == [2, 2, 0, 0, 0]
