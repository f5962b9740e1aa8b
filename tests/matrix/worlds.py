"""Runs every feature under plain Trainer and on every mesh, and says what came out."""

from __future__ import annotations

import gc
import tempfile
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.pipeline import intake
from tests.equality import COMMON, Rows
from tests.launch import run_ranks

from . import data
from .features import FEATURES, NUM_EVAL_ROWS, NUM_ROWS, Feature
from .trainer_cases import CASES
from .trainer_runs import history

ROWS = 4  # of a replica's batch
MESHES = {"1x1": (1, 1), "2x1": (2, 1), "2x2": (2, 2)}  # stages, replicas
SETTINGS = {
    **COMMON,
    "max_steps": 3,
    "learning_rate": 0.1,
    "optim": "sgd",
    "warmup_steps": 0,
    "eval_strategy": "no",
    "per_device_train_batch_size": ROWS,
    "per_device_eval_batch_size": ROWS,
    "log_level": "error",
}
MESH_SETTINGS = {"preset": "dense", "link_timeout_seconds": 20.0}
# Depend on the clock.
TIMED = ("runtime", "_per_second", "model_preparation_time")

EQUAL, RUNS = "as Trainer", "runs"
ALL = [*FEATURES, *CASES]


def build(feature: Feature, mesh: tuple[int, int] | None, rows_factor: int, folder: str, **changes):
    """The feature's trainer on this rank; `changes` are further arguments."""
    AcceleratorState._reset_state()
    settings = {**SETTINGS, **feature.args, **changes}
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        settings[name] *= rows_factor
    mesh_settings = {**MESH_SETTINGS, "pipeline_stages": mesh[0]} if mesh else {}
    if "bfloat16" in feature.name:
        mesh_settings |= {"pipeline_microbatches": 1} if mesh else {}
    args = (MeshAdaptArguments if mesh else TrainingArguments)(output_dir=folder, **settings, **mesh_settings)
    given = {
        "model": feature.model(),
        "train_dataset": Rows(NUM_ROWS),
        "eval_dataset": Rows(NUM_EVAL_ROWS, seed=2),
        "data_collator": data.ragged,
        **feature.trainer,
    }
    given |= feature.fresh(given["model"])
    trainer = feature.derive(MeshAdaptTrainer if mesh else Trainer)(args=args, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_feature(feature: Feature, mesh: tuple[int, int] | None, rows_factor: int, folder: str) -> dict:
    """One run on this rank.

    Args:
        mesh: stages and replicas; None for plain Trainer.
        rows_factor: what plain Trainer's batches are multiplied by, to hold all replicas' rows.
    """
    trainer = build(feature, mesh, rows_factor, folder)
    figures = feature.run(trainer)
    if feature.resumes is not None:
        checkpoint, changes = feature.resumes
        if mesh:
            close_groups(trainer.engine.groups)
        trainer = build(feature, mesh, rows_factor, folder, **changes)
        trainer.train(resume_from_checkpoint=f"{folder}/{checkpoint}")
        figures = history(trainer)
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    state = model.state_dict()
    names = trainer.engine.parts.saved_names() if mesh else state
    if model is not trainer.model:  # adapters: all else is frozen, and not saved
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    logs = {
        name: [float(log[name]) for log in trainer.state.log_history if name in log]
        for name in ("loss", "grad_norm", "eval_loss", "learning_rate")
    }
    weights = {name: state[name].clone() for name in names}
    if mesh:
        close_groups(trainer.engine.groups)
    return {"logs": logs, "figures": figures, "weights": weights}


def close_groups(groups) -> None:
    """Every trainer makes its own; a process that has had fifty of them would meter all their sockets."""
    for name in ("pipeline", "data_parallel", "tied", "control", "replica_control", "save"):
        if getattr(groups, name, None) is not None:
            dist.destroy_process_group(getattr(groups, name))


def check_each_model_once() -> None:
    """In this forked rank only: most features train the same model, and what its split check finds is the same too."""
    check, passed = intake.check_split, set()

    def check_once(model, mesh) -> None:
        key = (type(model), model.config.to_json_string(), tuple(model.state_dict()), mesh)
        if key not in passed:
            check(model, mesh)
            passed.add(key)

    intake.check_split = check_once


def run_world(
    rank: int, mesh: tuple[int, int] | None, rows_factor: int, names: list[str], folder: str
) -> dict[str, dict]:
    """The named features on this rank, by name; `folder` is shared by the ranks, as checkpoints want it."""
    torch.set_num_threads(1)
    check_each_model_once()
    results = {}
    for index, feature in enumerate(feature for feature in ALL if feature.name in names):
        try:
            results[feature.name] = run_feature(feature, mesh, rows_factor, f"{folder}/{index}")
        except (ValueError, NotImplementedError) as error:
            results[feature.name] = {"refused": str(error)}
        except Exception:
            results[feature.name] = {"failed": traceback.format_exc()}
            if mesh is not None:
                break  # ranks are out of step now
        gc.collect()
        gc.freeze()  # what this trainer left alive, in caches and the like, is not for the next one's collections to walk
    return results


def outcome(feature: Feature, reference: dict, ranks: list[dict]) -> str:
    """`EQUAL`, `RUNS` or `refused: ...` for one feature on one mesh.

    Raises:
        AssertionError: a rank failed, ranks disagree, or a figure differs from plain Trainer's.
    """
    failures = [result["failed"] for result in ranks if "failed" in result]
    assert not failures, min(failures, key=lambda text: "LinkError" in text)  # who failed, not who waited for it
    refusals = {result.get("refused") for result in ranks}
    assert len(refusals) == 1, f"ranks disagree: {refusals}"
    (refusal,) = refusals
    if refusal is not None:
        return EQUAL if refusal == reference.get("refused") else f"refused: {refusal}"
    if feature.random:
        return RUNS
    assert "logs" in reference, reference
    for rank, result in enumerate(ranks):
        assert_close(result["logs"], reference["logs"], feature.tolerance, f"rank {rank}: log")
        assert_figures(result["figures"], reference["figures"], feature.tolerance, f"rank {rank}")
        for name, tensor in result["weights"].items():
            torch.testing.assert_close(tensor, reference["weights"][name], rtol=0, atol=feature.tolerance, msg=name)
    untied = reference["weights"].keys() - {"lm_head.weight", "decoder.weight"}
    assert untied <= {name for result in ranks for name in result["weights"]}
    dicts = [{name: value for name, value in result["figures"].items() if isinstance(value, dict)} for result in ranks]
    assert all(metrics == dicts[0] for metrics in dicts), dicts  # figures of the clock too
    holders = [result for result in ranks if result["figures"].get("predictions") is not None]
    assert len(holders) >= ("predictions" in reference["figures"])
    return EQUAL


def assert_close(mine: dict, reference: dict, tolerance: float, what: str) -> None:
    for name in reference:
        np.testing.assert_allclose(mine[name], reference[name], rtol=tolerance, err_msg=f"{what} {name}")


def assert_figures(mine: dict, reference: dict, tolerance: float, what: str) -> None:
    for name, value in reference.items():
        if isinstance(value, dict):
            kept = {key: number for key, number in value.items() if not key.endswith(TIMED)}
            assert kept.keys() == {key for key in mine[name] if not key.endswith(TIMED)}, (what, mine[name], value)
            assert_close(mine[name], kept, tolerance, f"{what} {name}")
        elif mine[name] is not None:
            real = reference["labels"] != -100 if "labels" in reference else np.s_[:]
            np.testing.assert_allclose(mine[name][real], value[real], rtol=1e-3, atol=1e-5, err_msg=f"{what} {name}")


def run_all(names: list[str] | None = None) -> dict[str, dict[str, str]]:
    """Outcome of every feature on every mesh that it is for; `DIFFERS: ...` for what a test must report."""
    wanted = [feature for feature in ALL if names is None or feature.name in names]
    references: dict[int, dict] = {}
    table: dict[str, dict[str, str]] = {feature.name: {} for feature in wanted}
    for mesh_name, mesh in MESHES.items():
        features = [feature for feature in wanted if mesh_name in feature.meshes]
        titles = [feature.name for feature in features]
        if mesh[1] not in references:
            references[mesh[1]] = run_ranks_of(None, mesh[1], 1, titles)[0]
        ranks = run_ranks_of(mesh, 1, mesh[0] * mesh[1], titles)
        for feature in features:
            if not all(feature.name in rank for rank in ranks):  # after a failure
                continue
            try:
                said = outcome(feature, references[mesh[1]][feature.name], [rank[feature.name] for rank in ranks])
            except AssertionError as error:
                said = f"DIFFERS: {error}"
            table[feature.name][mesh_name] = said
    return table


def run_ranks_of(mesh, rows_factor: int, num_ranks: int, names: list[str]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(
            run_world, num_ranks, Path(folder, "results"), mesh, rows_factor, names, folder, timeout_seconds=600.0
        )
