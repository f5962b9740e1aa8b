"""Preference training over two stages is TRL's DPOTrainer in one process, over ranks and emulated."""

from __future__ import annotations

import pytest
import torch

from ..dpo import mesh_outcome, mesh_trainer, pairs, train_single
from ..launch import run_ranks

LOSSES = {
    "sigmoid": {"per_device_eval_batch_size": 2},  # 4 rows, up to 4 microbatches: must become 2 of a pair each
    "mixed": {"loss_type": ["ipo", "apo_zero"], "loss_weights": [0.1, 1.0]},
}
# The last batch leaves one replica nothing but repeats; an evaluation's leaves it one pair of two.
REPLICAS = dict(
    pipeline_stages=1, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=1,
    max_steps=6, learning_rate=1e-3, trainer={"train_dataset": pairs(22, 1), "eval_dataset": pairs(7, 2)},
)  # fmt: skip
MASKED = dict(mask_ratio=0.75, exact_first_token=True, max_steps=2)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory) -> list[dict[str, dict]]:
    """What each of two ranks got in each case, all of them on one pair of processes."""
    folder = tmp_path_factory.mktemp("dpo")
    return run_ranks(_train_all, 2, folder / "ranks", str(folder / "mesh"))


def _train_all(rank: int, folder: str) -> dict[str, dict]:
    return {
        case: _train(folder, **options)
        for case, options in [*LOSSES.items(), ("replicas", REPLICAS), ("masked", MASKED)]
    }


def _train(folder: str, **options) -> dict:
    trainer = mesh_trainer(folder, **options)
    trainer.train()
    return mesh_outcome(trainer)


def assert_same(mesh: dict, other: dict) -> None:
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert len(mesh[figure]) == len(other[figure]) > 0
        assert mesh[figure] == pytest.approx(other[figure], rel=2e-5), figure
    for name, tensor in mesh["weights"].items():
        torch.testing.assert_close(tensor, other["weights"][name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", LOSSES)
def test_equals_trl_in_one_process(case, by_rank, tmp_path):
    torch.set_num_threads(1)
    single = train_single(str(tmp_path / "single"), **LOSSES[case])
    emulated = _train(str(tmp_path / "emulated"), **LOSSES[case])
    assert single["loss"][0] != pytest.approx(single["loss"][-1], rel=1e-3)
    for mesh in (emulated, *(rank[case] for rank in by_rank)):
        assert_same(mesh, single)
    assert {name for rank in by_rank for name in rank[case]["weights"]} == set(single["weights"])


def test_replicas_count_pairs_once(by_rank, tmp_path):
    torch.set_num_threads(1)
    emulated = _train(str(tmp_path), **{**REPLICAS, "data_parallel_replicas": 2})
    for rank in by_rank:
        assert_same(rank["replicas"], emulated)


def test_masked_emulated_and_distributed_are_the_same_bits(by_rank, tmp_path):
    torch.set_num_threads(1)
    emulated = _train(str(tmp_path), **MASKED)["weights"]
    for rank in by_rank:
        for name, tensor in rank["masked"]["weights"].items():
            assert torch.equal(tensor, emulated[name]), name
