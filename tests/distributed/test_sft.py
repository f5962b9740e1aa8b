"""Supervised fine-tuning over two stages is TRL's SFTTrainer in one process, over ranks and emulated."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.pipeline.shape_cache import ShapeCache

from ..launch import run_ranks
from ..sft import CASES, mesh_outcome, mesh_trainer, train_single

MASKED = dict(mask_ratio=0.75, exact_first_token=True, boundary_predictor="token", max_steps=2, calibration_tokens=90)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory) -> list[dict[str, dict]]:
    """What each of two ranks got in each case, all of them on one pair of processes."""
    folder = tmp_path_factory.mktemp("sft")
    return run_ranks(_train_all, 2, folder / "ranks", str(folder / "mesh"))


def _train_all(rank: int, folder: str) -> dict[str, dict]:
    results = {}
    for case, options in {**dict.fromkeys(CASES, {}), "masked": MASKED}.items():
        trainer = mesh_trainer("bfd" if case == "masked" else case, folder, **options)
        trainer.engine.runner._schedules = ShapeCache(2)  # lengths differ: schedules are dropped and made again
        trainer.train()
        results[case] = mesh_outcome(trainer)
    return results


def assert_same(mesh: dict, single: dict) -> None:
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert len(mesh[figure]) == len(single[figure]) > 0
        assert mesh[figure] == pytest.approx(single[figure], rel=5e-6), figure
    assert mesh["num_tokens"] == single["num_tokens"]
    for name, tensor in mesh["weights"].items():
        torch.testing.assert_close(tensor, single["weights"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_equals_trl_in_one_process(case, by_rank, tmp_path):
    torch.set_num_threads(1)
    single = train_single(case, str(tmp_path / "single"))
    emulated = mesh_trainer(case, str(tmp_path / "emulated"))
    emulated.train()
    meshes = [mesh_outcome(emulated), *(rank[case] for rank in by_rank)]
    for mesh in meshes:
        assert_same(mesh, single)
    held = {name for rank in by_rank for name in rank[case]["weights"]}
    assert held == set(meshes[0]["weights"]) == set(single["weights"])


def test_packed_and_masked_emulated_and_distributed_are_the_same_bits(by_rank, tmp_path):
    torch.set_num_threads(1)
    trainer = mesh_trainer("bfd", str(tmp_path), **MASKED)
    starts = [(batch["position_ids"] == 0).sum(1).max() for batch in trainer.get_train_dataloader()]
    assert max(starts) > 1
    trainer.train()
    emulated = mesh_outcome(trainer)["weights"]
    for rank in by_rank:
        for name, tensor in rank["masked"]["weights"].items():
            assert torch.equal(tensor, emulated[name]), name
