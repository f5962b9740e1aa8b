"""Does `meshadapt eval` give what lm-eval's own command gives, to the last digit? Tasks that need no Hub.

    python examples/prepare_smollm2.py
    python -m benchmarks.eval_parity --model runs/models/smollm2-135m-instruct --limit 20

Writes benchmarks/results/eval_parity.json with one row for each task and metric: task, metric, meshadapt, lm_eval, equal.
Ends with exit code 1 where two numbers differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import print_table, write_result
from hf_meshadapt.checkpoint_folder import read_json
from hf_meshadapt.child_process import child_environment
from hf_meshadapt.evaluation.local_tasks import gsm8k_heldout, write_local_tasks

TASKS = ("mmlu_prompts", "gsm8k_heldout", "gsm8k_perplexity", "humaneval_local")
RUNS_CODE = ("humaneval_local",)
# Of accuracies over few examples most are equal by chance; this has many digits.
PERPLEXITY = """
task: gsm8k_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}} {{answer}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


def run(*command: str) -> float:
    """Runs a module with this interpreter, without the Hub; returns its seconds.

    Raises:
        SystemExit: it failed; its last words go to stderr.
    """
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=child_environment(HF_HUB_OFFLINE="1", HF_ALLOW_CODE_EVAL="1", TOKENIZERS_PARALLELISM="false"),
        capture_output=True,
        text=True,
        timeout=6 * 3600,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return time.monotonic() - started


def linked(model: Path, folder: Path) -> Path:
    """A folder with links to the model's files: an evaluation writes its results beside them."""
    folder.mkdir()
    for path in model.resolve().iterdir():
        if path.is_file() and path.name not in ("evaluation.json", "README.md"):
            (folder / path.name).symlink_to(path)
    return folder


def write_tasks(tasks: list[str], folder: Path) -> Path:
    """A folder for lm-eval's `include_path` with the tasks that ship here, and the perplexity."""
    folder.mkdir()
    write_local_tasks(tasks, folder)
    if "gsm8k_perplexity" in tasks:
        data = folder / "gsm8k_perplexity.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in gsm8k_heldout()["test"]), encoding="utf-8")
        (folder / "gsm8k_perplexity.yaml").write_text(PERPLEXITY % data, encoding="utf-8")
    return folder


def by_meshadapt(model: Path, tasks: list[str], options: argparse.Namespace, folder: Path) -> tuple[dict, float]:
    """Values by task and lm-eval's own key of the metric, and seconds."""
    how = ["--limit", str(options.limit), "--device", options.device, "--batch-size", str(options.batch_size)]
    allowed = ["--allow-code-execution"] if set(tasks) & set(RUNS_CODE) else []
    further = [task for task in tasks if task == "gsm8k_perplexity"]
    where = ["--include-path", str(write_tasks(further, folder / "further"))] if further else []
    seconds = run("hf_meshadapt", "eval", str(model), "--tasks", ",".join(tasks), *how, *where, *allowed)
    results = read_json(model / "evaluation.json")["results"]
    values = {
        task: {metric if "," in metric else f"{metric},none": entry["value"] for metric, entry in metrics.items()}
        for task, metrics in results.items()
    }
    return values, seconds


def by_lm_eval(model: Path, tasks: list[str], options: argparse.Namespace, folder: Path) -> tuple[dict, float]:
    """The same from lm-eval's command."""
    how = ["--limit", str(options.limit), "--device", options.device, "--batch_size", str(options.batch_size)]
    allowed = ["--confirm_run_unsafe_code"] if set(tasks) & set(RUNS_CODE) else []
    what = ["--model", "hf", "--model_args", f"pretrained={model},dtype=auto", "--tasks", ",".join(tasks)]
    where = ["--include_path", str(write_tasks(tasks, folder / "tasks")), "--output_path", str(folder / "out")]
    seconds = run("lm_eval", "run", *what, *how, *where, *allowed)
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]
    return results, seconds


def compare(ours: dict, theirs: dict) -> list[dict]:
    """One row for each task and metric that either of them has."""
    rows = []
    for task in theirs:
        for metric, value in theirs[task].items():
            name, _, kind = metric.partition(",")
            if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            mine = ours.get(task, {}).get(metric)
            rows.append({"task": task, "metric": metric, "meshadapt": mine, "lm_eval": value, "equal": mine == value})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2-135m-instruct"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS[:3]))
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        raise SystemExit(f"--model={options.model}: holds no model. Make it with examples/prepare_smollm2.py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = linked(options.model, folder / "model")
        ours, our_seconds = by_meshadapt(model, options.tasks, options, folder)
        theirs, their_seconds = by_lm_eval(model, options.tasks, options, folder)
    rows = compare(ours, theirs)
    print_table(rows, ["task", "metric", "meshadapt", "lm_eval", "equal"])
    for row in rows:
        row |= {"limit": options.limit, "seconds": our_seconds, "lm_eval_seconds": their_seconds}
    print(write_result("eval_parity", rows, seeds=[]))
    return 0 if rows and all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
