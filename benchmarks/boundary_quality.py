"""Held-out loss of SmolLM2-135M after a short fine-tuning through each kind of boundary, in the emulated mesh.

Paired runs: every configuration starts from the same weights and reads the same problems in the same order; seeds
differ in the order of the data. Evaluation is uncoded. Rows already in the results file are kept, so that the study
can be run in pieces: `python -m benchmarks.boundary_quality --stage headline --minutes 60`. `--merge` adds the runs of
other results files, such as two copies of the repository write that run beside each other.

Corpora: `gsm8k`, answers to problems; `gsm8k_twice`, 80 of the problems in two epochs, for codecs that remember samples;
`gsm8k_linear`, as `gsm8k` with a learning rate that falls to zero, Trainer's default, where all others keep theirs; `kjv`,
sequences of 64 tokens from the Bible (Debian's `bible-kjv`, whose program `bible` prints it).

Gap closed is (loss before - loss) / (loss before - dense loss), against the dense runs of the same seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

from .common import RESULTS, read_runs, without_repeats, write_result

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "runs" / "models" / "smollm2-135m-instruct"
STEPS, PROBLEMS, HELD_OUT, MAX_LENGTH = 40, 4, 48, 320
KJV_LENGTH, KJV_TRAIN, KJV_HELD_OUT = 64, 2000, 128  # tokens, sequences
NAME = "boundary_quality"
SCHEDULES = {"gsm8k_linear": "linear"}  # of the learning rate, by corpus; others' is constant

# Named configurations: trainer arguments beside the common ones.
CONFIGURATIONS: dict[str, dict] = {
    "dense": {"preset": "dense"},
    "mask95_zero": {"preset": "paper", "anchor": False},
    "mask95_mean": {"preset": "paper", "anchor": False, "exact_first_token": True, "boundary_predictor": "mean"},
    # Calibrated before the first step only, or every ten steps: at this learning rate and with a few hundred tokens a
    # step, a model drifts away from its calibration within ten of them.
    "transform_5": {"preset": "anchored"},
    "transform_5_every_10": {"preset": "anchored", "calibration_every": 10},
    "transform_10_every_10": {"preset": "anchored", "calibration_every": 10, "boundary_budget": 0.1},
    "transform_5_plain": {"preset": "anchored", "loss_weighted": False},
    "transform_5_mean": {"preset": "anchored", "boundary_predictor": "mean"},
    "transform_5_whole_bits": {"preset": "anchored", "entropy_coded": False, "forward_share": 0.75},
    "rotated_1bit": {
        "boundary_codec": "quantize", "boundary_bits": 1, "exact_first_token": True, "boundary_predictor": "token",
    },
    "quantize_2bit": {"boundary_codec": "quantize", "boundary_bits": 2, "exact_first_token": True},
    "quantize_4bit": {"boundary_codec": "quantize", "boundary_bits": 4, "exact_first_token": True},
    "quantize_3bit": {"boundary_codec": "quantize", "boundary_bits": 3, "exact_first_token": True},
    "quantize_8bit": {"boundary_codec": "quantize", "boundary_bits": 8, "exact_first_token": True},
    "aq_sgd": {"boundary_codec": "aq_sgd"},
    "topk_5_feedback": {"boundary_codec": "topk", "exact_first_token": True, "boundary_error_feedback": True},
    "mask90_mean": {
        "preset": "paper", "anchor": False, "mask_ratio": 0.9, "exact_first_token": True, "boundary_predictor": "mean",
    },
    "topk_10": {
        "boundary_codec": "topk", "exact_first_token": True, "boundary_predictor": "token", "boundary_budget": 0.1,
    },
    "subspace_10": {"boundary_codec": "subspace", "boundary_budget": 0.1},
    "topk_5": {"boundary_codec": "topk", "exact_first_token": True, "boundary_predictor": "token"},
    "subspace_5": {"boundary_codec": "subspace"},
    "bottleneck_5": {"boundary_codec": "bottleneck", "exact_first_token": True, "boundary_predictor": "token"},
    "tah_quant": {"boundary_codec": "tah_quant"},
}  # fmt: skip
BASELINES = (
    "transform_5", "mask95_zero", "mask95_mean", "transform_5_plain", "rotated_1bit", "quantize_2bit",
    "quantize_3bit", "quantize_4bit", "quantize_8bit", "topk_5", "bottleneck_5", "tah_quant", "subspace_5",
)  # fmt: skip
# Codecs that remember samples, and what they are compared with on the same data.
REMEMBERING = ("dense", "aq_sgd", "topk_5_feedback", "topk_5", "transform_5")
# (configuration, stages, learning rate, seed, corpus) by part of the study, in the order of their worth.
STUDY: dict[str, list[tuple[str, int, float, int, str]]] = {
    "headline": [
        *((name, 4, 1e-4, seed, "gsm8k") for seed in (0, 1, 2) for name in ("dense", "transform_5_every_10")),
        *(("transform_5_every_10", 8, 1e-4, seed, "gsm8k") for seed in (0, 1, 2)),
        *(("transform_5_whole_bits", 4, 1e-4, seed, "gsm8k") for seed in (0, 1, 2)),
        ("transform_5_whole_bits", 8, 1e-4, 0, "gsm8k"),
    ],
    "baselines": [(name, 4, 1e-4, seed, "gsm8k") for seed in (0, 1, 2) for name in BASELINES],
    "ten_percent": [
        (name, 4, 1e-4, 0, "gsm8k") for name in ("transform_10_every_10", "subspace_10", "topk_10", "mask90_mean")
    ],
    # On the corpus whose runs are short.
    "learning_rate": [
        (name, 4, rate, 0, "kjv")
        for name in ("dense", "mask95_mean", "transform_5", "rotated_1bit", "topk_5", "subspace_5")
        for rate in (2e-4, 5e-5)
    ],
    "deep": [
        (name, 8, 1e-4, seed, "gsm8k") for seed in (0, 1, 2) for name in ("quantize_4bit", "transform_5", "rotated_1bit")
    ],
    "decaying": [
        *((name, 4, 1e-4, seed, "gsm8k_linear") for seed in (0, 1, 2) for name in ("dense", "transform_5")),
        *(("transform_5", 8, 1e-4, seed, "gsm8k_linear") for seed in (0, 1, 2)),
        *((name, 4, 1e-4, 0, "gsm8k_linear") for name in ("mask95_mean", "quantize_4bit")),
    ],
    "remembering": [
        (name, 4, 1e-4, seed, "gsm8k_twice")
        for names in (REMEMBERING[:2], REMEMBERING[2:])
        for seed in (0, 1, 2)
        for name in names
    ],
    "second_corpus": [
        (name, 4, 1e-4, seed, "kjv")
        for seed in (0, 1, 2)
        for name in ("dense", "transform_5", "mask95_mean", "rotated_1bit", "quantize_4bit", "subspace_5")
    ],
}  # fmt: skip


def load_data(corpus: str):
    """Tokenizer, training set and held-out set of a corpus."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if corpus == "kjv":
        return tokenizer, *load_kjv(tokenizer)
    sys.path.insert(0, str(ROOT / "examples"))
    from finetune_gsm8k import ScriptArguments, load_splits, tokenize

    script = ScriptArguments(model_name_or_path=str(MODEL), max_length=MAX_LENGTH)
    train, held_out = load_splits(script)
    num_problems = STEPS // 2 * PROBLEMS if corpus == "gsm8k_twice" else 1000
    return tokenizer, tokenize(train, num_problems, tokenizer, script), tokenize(held_out, HELD_OUT, tokenizer, script)


def make_trainer(args, data):
    """Trains the model of all runs on what `load_data` returned."""
    from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq

    from hf_meshadapt import MeshAdaptTrainer

    tokenizer, train, held_out = data
    return MeshAdaptTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def load_kjv(tokenizer):
    """Sequences of the Old Testament to train on, of the New held out."""
    import subprocess

    from datasets import Dataset

    def sequences(verses: str, count: int) -> Dataset:
        lines = subprocess.run(["bible", "-f", verses], capture_output=True, text=True, check=True).stdout.splitlines()
        ids = tokenizer(" ".join(line.split(" ", 1)[1] for line in lines))["input_ids"]
        step = max(1, len(ids) // KJV_LENGTH // count) * KJV_LENGTH
        rows = [ids[start : start + KJV_LENGTH] for start in range(0, step * count, step)]
        return Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows])

    return sequences("gen1:1-mal4:6", KJV_TRAIN), sequences("mat1:1-rev22:21", KJV_HELD_OUT)


def arguments(folder: str, name: str, stages: int, learning_rate: float, seed: int, steps: int = STEPS, **extra):
    """Trainer arguments of a run: a configuration, if there is one of this name, and what comes on top."""
    from hf_meshadapt import MeshAdaptArguments

    common = dict(
        output_dir=folder, pipeline_stages=stages, per_device_train_batch_size=PROBLEMS, pipeline_microbatches=1,
        per_device_eval_batch_size=8, max_steps=steps, learning_rate=learning_rate, lr_scheduler_type="constant",
        bf16=True, use_cpu=True, seed=seed, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=10,
    )  # fmt: skip
    return MeshAdaptArguments(**(common | CONFIGURATIONS.get(name, {}) | extra))


def run(
    name: str,
    stages: int,
    learning_rate: float,
    seed: int,
    corpus: str,
    data,
    before: float | None = None,
    steps: int = STEPS,
    **extra,
) -> dict:
    """One training run; returns its raw row."""
    started = time.monotonic()
    if corpus in SCHEDULES:
        extra["lr_scheduler_type"] = SCHEDULES[corpus]
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, name, stages, learning_rate, seed, steps, **extra)
        trainer = make_trainer(args, data)
        if before is None:  # the same for every run
            before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        report = trainer.mesh_report()
    boundary = args.boundary_config()
    return {
        "configuration": name, "codec": boundary.codec, "predictor": boundary.predictor,
        "budget": boundary.budget or 1.0 - boundary.mask_ratio, "forward_share": boundary.forward_share,
        "stages": stages, "corpus": corpus, "learning_rate": learning_rate, "seed": seed,
        "steps": steps, "loss_before": before, "loss": after,
        "train_loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "planned_bytes_per_token": report["planned_bytes_per_token"],
        "bytes_ratio_to_dense": report["bytes_ratio_to_dense"]["pipeline"],
        "trained_tokens": trainer.engine.ledger.run.tokens,
        # Uncoded, hence at the bytes of dense training.
        "calibration_tokens": (report["calibration"] or {}).get("tokens", 0),
        "seconds": time.monotonic() - started, **extra,
    }  # fmt: skip


def summarise(runs: list[dict]) -> list[dict]:
    """Means over seeds, one row per configuration; gaps are against the dense run of the same seed."""
    dense = {paired(run): run["loss"] for run in runs if run["configuration"] == "dense"}
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["configuration"], run["stages"], run["learning_rate"], run["corpus"]), []).append(run)
    rows = []
    for (name, stages, learning_rate, corpus), members in groups.items():
        losses = [run["loss"] for run in members]
        gaps = [
            (run["loss_before"] - run["loss"]) / (run["loss_before"] - dense[paired(run)])
            for run in members
            if paired(run) in dense
        ]
        first = members[0]
        rows.append(
            {
                "configuration": name, "codec": first["codec"], "predictor": first["predictor"],
                "budget": first["budget"], "forward_share": first["forward_share"], "anchor_every": None,
                "stages": stages, "corpus": corpus, "learning_rate": learning_rate,
                "seeds": [run["seed"] for run in members], "loss_mean": mean(losses), "loss_std": spread(losses),
                "gap_closed_mean": mean(gaps) if gaps else None,
                "gap_closed_se": spread(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
                "bytes_per_token": first["planned_bytes_per_token"], "runs": members,
            }
        )  # fmt: skip
    return rows


def paired(run: dict) -> tuple:
    """What a run has in common with the dense run that it is judged by."""
    return run["seed"], run["learning_rate"], run["corpus"]


def spread(values: list[float]) -> float | None:
    """Standard deviation of a sample; None of a single value."""
    return stdev(values) if len(values) > 1 else None


KEYS = ("configuration", "stages", "learning_rate", "seed", "corpus")


def key_of(run: dict) -> tuple:
    return tuple(run[key] for key in KEYS)


def write(runs: list[dict]) -> None:
    """Writes the results, runs in a fixed order, with the command that makes all of them."""
    order = {name: index for index, name in enumerate(CONFIGURATIONS)}
    runs = sorted(
        runs, key=lambda r: (r["corpus"], r["learning_rate"], r["stages"], order[r["configuration"]], r["seed"])
    )
    seeds, keys = sorted({run["seed"] for run in runs}), set(map(key_of, runs))
    parts = [part for part, rows in STUDY.items() if keys & set(rows)]
    write_result(NAME, summarise(runs), seeds, command=f"python -m benchmarks.{NAME} --stage {' '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", nargs="+", choices=list(STUDY), default=["headline"])
    parser.add_argument("--pipeline_stages", type=int, help="only the runs of so many stages")
    parser.add_argument("--seeds", type=int, nargs="+", help="only the runs of these seeds")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further run after so long")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="results files to add; nothing is run")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    runs = without_repeats(read_runs([RESULTS / f"{NAME}.json", *options.merge]), key_of)
    if options.merge:
        return write(runs)
    done = {key_of(run) for run in runs if run["steps"] == STEPS}
    before = {run["corpus"]: run["loss_before"] for run in runs}
    data, deadline = {}, time.monotonic() + 60 * options.minutes
    for row in (row for stage in options.stage for row in STUDY[stage]):
        name, stages, learning_rate, seed, corpus = row
        wanted = options.pipeline_stages in (None, stages) and (options.seeds is None or seed in options.seeds)
        if not wanted or row in done or time.monotonic() > deadline:
            continue
        if corpus not in data:
            data[corpus] = load_data(corpus)
        runs.append(run(name, stages, learning_rate, seed, corpus, data[corpus], before.get(corpus)))
        before[corpus] = runs[-1]["loss_before"]
        print(json.dumps({key: runs[-1][key] for key in (*KEYS, "loss", "seconds")}), flush=True)
        write(runs)


if __name__ == "__main__":
    main()
