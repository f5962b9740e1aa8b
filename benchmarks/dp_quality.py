"""Held-out loss of SmolLM2-135M on GSM8K after 200 steps of two replicas, by what keeps the replicas one model.

Emulated mesh of one stage, so that nothing but the data-parallel axis differs. Paired runs: equal start, order of the
data, steps and tokens. Rows already in the results file are kept: `python -m benchmarks.dp_quality --minutes 30`; `--merge`
adds those of other results files.
Target: within 1% of the dense all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

from .boundary_quality import load_data, make_trainer
from .common import RESULTS, print_table, read_runs, without_repeats, write_result

NAME, STEPS, MAX_LENGTH = "dp_quality", 200, 160
SEEDS = (0, 1, 2)
SYNCS: dict[str, dict] = {
    "allreduce": {},
    "powersgd": {"dp_sync": "powersgd", "matrix_rank": 32},
    # Each fragment is synchronised every 30 steps: six times, and once at the end.
    "streaming_diloco": {"dp_sync": "streaming_diloco", "sync_every": 30},
}


def run(sync: str, seed: int, data) -> dict:
    """One training run; returns its raw row."""
    from hf_meshadapt import MeshAdaptArguments

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        args = MeshAdaptArguments(
            output_dir=folder, data_parallel_replicas=2, per_device_train_batch_size=1, per_device_eval_batch_size=8,
            max_steps=STEPS, learning_rate=2e-5, lr_scheduler_type="constant", bf16=True, use_cpu=True, seed=seed,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=20, **SYNCS[sync],
        )  # fmt: skip
        trainer = make_trainer(args, data)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        report = trainer.mesh_report()
    return {
        "dp_sync": sync, "seed": seed, "steps": STEPS, "loss": loss,
        "train_loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "planned_bytes_per_token": report["planned_bytes_per_token"],
        "trained_tokens": trainer.engine.ledger.run.tokens, "seconds": time.monotonic() - started,
    }  # fmt: skip


def summarise(runs: list[dict]) -> list[dict]:
    """Means over seeds; the ratio is to the dense run of the same seed."""
    dense = {run["seed"]: run["loss"] for run in runs if run["dp_sync"] == "allreduce"}
    rows = []
    for sync in SYNCS:
        members = [run for run in runs if run["dp_sync"] == sync]
        losses = [run["loss"] for run in members]
        ratios = [run["loss"] / dense[run["seed"]] for run in members if run["seed"] in dense]
        if members:
            rows.append(
                {
                    "dp_sync": sync, "seeds": [run["seed"] for run in members], "loss_mean": mean(losses),
                    "loss_std": stdev(losses) if len(losses) > 1 else None,
                    "ratio_to_dense": mean(ratios) if ratios else None,
                    "ratio_se": stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None, "runs": members,
                }
            )  # fmt: skip
    return rows


def key_of(run: dict) -> tuple:
    return run["dp_sync"], run["seed"]


def write(runs: list[dict]) -> None:
    seeds = sorted({run["seed"] for run in runs})
    write_result(NAME, summarise(sorted(runs, key=key_of)), seeds, command=f"python -m benchmarks.{NAME}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="results files to add; nothing is run")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further run after so long")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    runs = without_repeats(read_runs([RESULTS / f"{NAME}.json", *options.merge]), key_of)
    if options.merge:
        return write(runs)
    done = set(map(key_of, runs))
    tokenizer, train, held_out = load_data("gsm8k")
    data = (tokenizer, train.filter(lambda row: len(row["input_ids"]) <= MAX_LENGTH), held_out)
    deadline = time.monotonic() + 60 * options.minutes
    for seed in options.seeds:
        for sync in SYNCS:
            if (sync, seed) not in done and time.monotonic() < deadline:
                runs.append(run(sync, seed, data))
                print(json.dumps({key: runs[-1][key] for key in ("dp_sync", "seed", "loss", "seconds")}), flush=True)
                write(runs)
    print_table(summarise(runs), ["dp_sync", "seeds", "loss_mean", "ratio_to_dense", "ratio_se"])


if __name__ == "__main__":
    main()
