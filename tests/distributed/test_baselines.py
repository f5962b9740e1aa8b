"""Baseline codecs over sockets: bit for bit what the emulated mesh computes, in as many bytes as planned."""

import pytest
import torch

from ..equality import train_mesh
from ..launch import run_ranks

ROWS = 4
CASES = [
    # codec, stages, replicas, schedule, further arguments
    ("quantize", 2, 2, "gpipe", {"boundary_bits": 3, "exact_first_token": True, "boundary_predictor": "token"}),
    ("quantize", 4, 1, "1f1b", {"boundary_bits": 2, "boundary_rotated": False}),
    ("topk", 2, 1, "1f1b", {"boundary_budget": 0.3}),
    ("topk", 2, 1, "gpipe", {"boundary_budget": 0.2, "boundary_error_feedback": True, "num_rows": 24}),
    ("topk", 2, 1, "interleaved", {"boundary_error_feedback": True, "num_rows": 24, "pipeline_chunks_per_rank": 2}),
    ("topk_free_indices", 2, 1, "gpipe", {"boundary_budget": 0.2}),
    ("subspace", 2, 2, "gpipe", {"boundary_budget": 0.3, "calibration_tokens": 600}),
    ("bottleneck", 2, 1, "interleaved", {"boundary_budget": 0.3, "pipeline_chunks_per_rank": 2}),
    ("tah_quant", 2, 1, "1f1b", {}),
    ("aq_sgd", 2, 1, "1f1b", {"num_rows": 24}),
    ("aq_sgd", 2, 1, "interleaved", {"num_rows": 24, "pipeline_chunks_per_rank": 2}),
]
RUN = {"max_steps": 6, "eval_steps": 3, "learning_rate": 1e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_distributed_equals_emulated_bit_for_bit(case, tmp_path):
    codec, stages, replicas, schedule, extra = case
    torch.set_num_threads(1)
    mesh = {"pipeline_stages": stages, "pipeline_schedule": schedule, "boundary_codec": codec, **RUN, **extra}
    ranks = run_ranks(_train_rank, stages * replicas, tmp_path, str(tmp_path / "mesh"), mesh)
    emulated = _train_rank(0, str(tmp_path / "emulated"), {**mesh, "data_parallel_replicas": replicas})
    for result in ranks:
        assert result["loss"] == pytest.approx(emulated["loss"], rel=1e-6)  # the logs' mean rounds, weights do not
        assert result["eval_loss"] == pytest.approx(emulated["eval_loss"], rel=1e-6)
        for name, tensor in result["weights"].items():
            assert torch.equal(emulated["weights"][name], tensor), name


def _train_rank(rank: int, folder: str, mesh: dict) -> dict:
    return train_mesh(rank, "llama", 4, ROWS, folder, **mesh)
