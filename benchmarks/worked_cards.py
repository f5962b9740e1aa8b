"""The worked cards of model_cards/: short runs of SmolLM2 on GSM8K, and the cards that the package writes for them.

    python examples/prepare_smollm2.py
    python -m benchmarks.worked_cards

Each run takes at most three minutes on two idle cores. A card's folder in model_cards/ holds what it was made from too: the
run's own record (mesh_run.json), the loss curve, and the command with what else it printed (run.json).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import machine
from hf_meshadapt.card import CARD_NAME, write_card
from hf_meshadapt.checkpoint_folder import read_json, write_json
from hf_meshadapt.loss_curve import CURVE_NAME
from hf_meshadapt.run_record import RECORD_NAME, load_record

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
OUTPUT = Path("runs/worked_cards")
MODEL = Path("runs/models/smollm2-135m-instruct")
# What the card needs, and what tells it whether there is a tokenizer and whether it is an adapter.
KEPT = (CARD_NAME, RECORD_NAME, CURVE_NAME, "card.json", "tokenizer_config.json", "adapter_config.json")
# A run of a folder on this disk cannot know these.
ADDED = {
    "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "datasets": ["openai/gsm8k"],
    "license": "apache-2.0",
    "language": ["en"],
}
COMMON = [
    *[
        "--model_name_or_path",
        str(MODEL),
        "--max_length",
        "320",
        "--num_eval_problems",
        "24",
        "--pipeline_stages",
        "2",
    ],
    *["--use_cpu", "--bf16", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4"],
    *["--lr_scheduler_type", "constant", "--logging_steps", "1", "--save_strategy", "no", "--seed", "0"],
    *["--report_to", "none"],
]


@dataclass(frozen=True)
class Run:
    """One card's run, on 2 stages x 2 replicas.

    Attributes:
        script: in examples/.
        num_steps: as many as take less than three minutes.
        options: beside `COMMON`.
    """

    script: str
    num_steps: int
    options: tuple[str, ...]


RUNS = {
    "smollm2-gsm8k-anchored": Run(
        "finetune_gsm8k.py",
        12,
        (
            *(
                "--preset",
                "anchored",
                "--calibration_tokens",
                "4096",
                "--dp_sync",
                "powersgd",
                "--learning_rate",
                "1e-4",
            ),
            *("--anchor", "--anchor_every", "3", "--fast_endpoint", "127.0.0.1:29653"),
        ),
    ),
    "smollm2-gsm8k-paper": Run(
        "finetune_gsm8k.py",
        16,
        # Replicas step apart: the outer model that is evaluated moves with every sync.
        ("--preset", "paper", "--learning_rate", "1e-4", "--sync_every", "6"),
    ),
    "smollm2-gsm8k-lora": Run(
        "finetune_lora.py",
        16,
        ("--preset", "anchored", "--calibration_tokens", "4096", "--learning_rate", "5e-4"),
    ),
}


def make(name: str, num_steps: int | None = None) -> Path:
    """Runs one of `RUNS` and stores its card; returns the card's folder.

    Args:
        num_steps: fewer optimizer steps, to try it out.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from demo import launch

    run, folder = RUNS[name], OUTPUT / name
    steps = min(num_steps or run.num_steps, run.num_steps)
    evaluates = ["--eval_strategy", "steps", "--eval_steps", str(max(1, steps // 2))]
    metrics = folder / "metrics.json"
    where = ["--max_steps", str(steps), "--output_dir", str(folder), "--metrics_file", str(metrics)]
    script = [f"examples/{run.script}", *COMMON, *run.options, *evaluates, *where]
    started = time.monotonic()
    launch(script, folder, with_anchor="--anchor" in run.options)
    seconds = time.monotonic() - started
    command = shlex.join(["accelerate", "launch", "--config_file", "accelerate_configs/cpu_2x2.yaml", *script])
    return store(folder, CARDS / name, read_json(metrics), command=command, seconds=seconds)


def store(folder: Path, place: Path, metrics: dict, *, command: str, seconds: float) -> Path:
    """Writes the card of a saved model and keeps it, with all that it was made from, in `place`.

    Args:
        metrics: as the script writes them.
        seconds: that the run took, from launch to end.
    """
    config = folder / "adapter_config.json"
    if config.is_file():  # which names the folder that the base model was read from
        write_json(config, read_json(config) | {"base_model_name_or_path": ADDED["base_model"]})
    write_card(folder, model_name=place.name, **ADDED)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in KEPT:
        if (folder / name).is_file():
            shutil.copy2(folder / name, place)
    about = {"command": command, "machine": machine(), "seconds": seconds, "metrics": metrics}
    write_json(place / "run.json", about)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, metavar="N", help="so many optimizer steps only, to try it out")
    options = parser.parse_args()
    os.chdir(ROOT)
    if not (MODEL / "config.json").is_file():
        raise SystemExit(f"{MODEL} holds no model. Make it with examples/prepare_smollm2.py")
    for name in options.cards:
        place = make(name, options.steps)
        steps, seconds = load_record(place)["global_step"], read_json(place / "run.json")["seconds"]
        print(f"{place.relative_to(ROOT)}: {steps} steps, {seconds:.0f} s")
        print(json.dumps(read_json(place / "run.json")["metrics"], indent=1))


if __name__ == "__main__":
    main()
