"""The mesh without masks is the single-process Trainer: over steps with accumulation 2, padding, uneven layers."""

import pytest
import torch

from ..equality import collate_fixed, train_mesh, train_single
from ..launch import run_ranks

ROWS = 4  # per replica and accumulation step
# Two epochs, which end on a partial batch, with one replica on a partial accumulation too.
RUN = {"max_steps": 10, "eval_steps": 5, "num_rows": 42}

CASES = [
    # model, layers, stages, replicas, schedule, further arguments
    ("llama", 4, 2, 1, "gpipe", {}),
    ("llama_tied", 5, 2, 1, "1f1b", {}),
    ("gpt2", 4, 2, 1, "1f1b", {"optim": "sgd", "learning_rate": 0.1}),
    ("llama", 7, 3, 1, "1f1b", {}),
    ("gpt2", 7, 3, 1, "gpipe", {"pipeline_split": "1,4,2"}),
    ("llama_tied", 5, 2, 2, "gpipe", {}),
    ("gpt2", 5, 2, 2, "1f1b", {}),
    ("llama", 4, 2, 2, "gpipe", {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5}),
    ("llama_tied", 4, 4, 1, "gpipe", {}),
    ("gpt2", 6, 4, 1, "1f1b", {}),
    ("llama_tied", 5, 2, 1, "interleaved", {"pipeline_chunks_per_rank": 2}),
    ("gpt2", 6, 2, 1, "interleaved", {"pipeline_chunks_per_rank": 3, "pipeline_microbatches": 4}),
    ("llama", 3, 1, 2, "gpipe", {}),
    ("llama", 4, 2, 1, "gpipe", {"gradient_checkpointing": True}),
    ("llama", 4, 2, 1, "gpipe", {"max_grad_norm": 0.0}),
]
# These two are lines of tests/matrix as well.
SLOW = CASES[-2:]


def assert_same_logs(mesh: dict, single: dict) -> None:
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert len(mesh[figure]) == len(single[figure]) > 0
        assert mesh[figure] == pytest.approx(single[figure], rel=5e-6), figure


def single_arguments(extra: dict) -> dict:
    return {name: value for name, value in extra.items() if not name.startswith("pipeline_")}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES],
    ids=lambda c: f"{c[0]}-{c[2]}x{c[3]}-{c[4]}-{'-'.join(c[5]) or 'adamw'}",
)
def test_distributed_equals_single_process(case, tmp_path):
    kind, layers, stages, replicas, schedule, extra = case
    torch.set_num_threads(1)
    plain = RUN | single_arguments(extra)
    single = train_single(kind, layers, ROWS * replicas, str(tmp_path / "single"), **plain)
    mesh = RUN | {"pipeline_stages": stages, "pipeline_schedule": schedule, **extra}
    ranks = run_ranks(_train_rank, stages * replicas, tmp_path, kind, layers, str(tmp_path / "mesh"), mesh)
    held: dict[str, torch.Tensor] = {}
    for result in ranks:
        assert_same_logs(result, single)
        for name, tensor in result["weights"].items():
            # Replicas hold equal weights, and so do the two copies of a tied embedding (the head's is not listed).
            assert torch.equal(held.setdefault(name, tensor), tensor), name
    expected = set(single["weights"]) - ({"lm_head.weight"} if kind != "llama" else set())
    assert set(held) - {"lm_head.weight"} == expected - {"lm_head.weight"}
    for name, tensor in held.items():
        torch.testing.assert_close(tensor, single["weights"][name], rtol=0, atol=1e-6)

    emulated = train_mesh(0, kind, layers, ROWS, str(tmp_path / "emulated"), data_parallel_replicas=replicas, **mesh)
    assert_same_logs(emulated, single)
    for name, tensor in held.items():
        assert torch.equal(emulated["weights"][name], tensor), f"{name}: emulated and distributed differ"


MASKED = [
    ("llama_tied", 4, 2, 2, "gpipe", {"mask_ratio": 0.9, "wire_dtype": "bfloat16"}),
    (
        "gpt2", 4, 2, 2, "1f1b",
        {"mask_ratio": 0.95, "wire_dtype": "bfloat16", "exact_first_token": True, "boundary_predictor": "mean"},
    ),
    ("llama", 7, 3, 1, "1f1b", {"preset": "paper", "anchor": False, "exact_first_token": True}),
    ("llama", 4, 4, 1, "gpipe", {"mask_ratio": 0.5, "boundary_predictor": "mean"}),
    ("llama_tied", 5, 2, 1, "interleaved", {"mask_ratio": 0.9, "pipeline_chunks_per_rank": 2}),
    ("llama", 4, 2, 1, "gpipe", {"preset": "paper", "anchor": False, "bf16": True}),
]  # fmt: skip


@pytest.mark.parametrize("case", MASKED, ids=lambda c: f"{c[0]}-{c[2]}x{c[3]}-{c[4]}-{'-'.join(c[5])}")
def test_masked_distributed_equals_emulated_bit_for_bit(case, tmp_path):
    kind, layers, stages, replicas, schedule, extra = case
    torch.set_num_threads(1)
    mesh = RUN | {"pipeline_stages": stages, "pipeline_schedule": schedule, **extra}
    ranks = run_ranks(_train_rank, stages * replicas, tmp_path, kind, layers, str(tmp_path / "mesh"), mesh)
    emulated = train_mesh(0, kind, layers, ROWS, str(tmp_path / "emulated"), data_parallel_replicas=replicas, **mesh)
    for result in ranks:
        assert result["loss"] == pytest.approx(emulated["loss"], rel=1e-6)  # the logs' mean rounds, weights do not
        for name, tensor in result["weights"].items():
            assert torch.equal(emulated["weights"][name], tensor), name


def test_masks_change_the_run(tmp_path):
    """The test above compares masked with masked: make sure that there is a mask at all."""
    torch.set_num_threads(1)
    runs = [
        train_mesh(
            0, "llama", 4, ROWS, str(tmp_path / name), pipeline_stages=2, max_steps=2, eval_strategy="no", **extra
        )
        for name, extra in {
            "dense": {},
            "m50": {"mask_ratio": 0.5},
            "seed": {"mask_ratio": 0.5, "mask_seed": 3},
        }.items()
    ]
    norms = [run["grad_norm"][0] for run in runs]
    assert len({round(norm, 6) for norm in norms}) == 3, norms


def _train_rank(rank: int, kind: str, layers: int, folder: str, mesh: dict) -> dict:
    return train_mesh(rank, kind, layers, ROWS, folder, collator=collate_fixed, **mesh)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_torchs_own_schedules_give_the_same_weights(schedule, tmp_path):
    """What NCCL runs on, here over gloo: torch's schedules around the same stages."""
    torch.set_num_threads(1)
    mesh = RUN | {"pipeline_stages": 2, "pipeline_schedule": schedule, "mask_ratio": 0.5}
    mesh |= {"pipeline_chunks_per_rank": 2} if schedule == "interleaved" else {}
    ranks = run_ranks(_train_rank_without_host_wire, 2, tmp_path, "llama", 4, str(tmp_path / "mesh"), mesh)
    emulated = train_mesh(0, "llama", 4, ROWS, str(tmp_path / "emulated"), **mesh)
    for result in ranks:
        for name, tensor in result["weights"].items():
            assert torch.equal(emulated["weights"][name], tensor), name


def _train_rank_without_host_wire(rank: int, kind: str, layers: int, folder: str, mesh: dict) -> dict:
    from hf_meshadapt.pipeline import runner

    class DeviceWireStage(runner.WireStage):
        def __init__(self, *args, host_wire: bool, **kwargs):
            super().__init__(*args, host_wire=False, **kwargs)

    runner.WireStage = DeviceWireStage  # in this forked rank only
    return _train_rank(rank, kind, layers, folder, mesh)
