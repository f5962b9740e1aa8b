"""`meshadapt eval` and lm-eval's own command give the same numbers, to the last digit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_meshadapt.checkpoint_folder import read_json
from hf_meshadapt.child_process import child_environment
from hf_meshadapt.evaluation.local_tasks import write_local_tasks
from tests.tiny_language import save_tiny_language_model

TASKS = ["mmlu_prompts", "gsm8k_heldout", "perplexity"]
LIMIT = 4
# A task whose results have many digits.
PERPLEXITY = """
task: perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


def run(*command: str) -> str:
    environment = child_environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    result = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_lm_evals_own_command_gives_the_same_to_the_last_digit(tmp_path):
    model, tasks = save_tiny_language_model(tmp_path / "model"), tmp_path / "tasks"
    tasks.mkdir()
    texts = [{"text": f"The {number}th text is about {number * number} things."} for number in range(9)]
    (tasks / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (tasks / "perplexity.yaml").write_text(PERPLEXITY % (tasks / "texts.jsonl"))
    how = ["--tasks", ",".join(TASKS), "--limit", str(LIMIT), "--device", "cpu"]
    table = run("hf_meshadapt", "eval", str(model), *how, "--batch-size", "4", "--include-path", str(tasks))
    ours = read_json(model / "evaluation.json")

    write_local_tasks(TASKS, tasks)
    arguments = f"pretrained={model},dtype=auto"
    where = ["--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    run("lm_eval", "run", "--model", "hf", "--model_args", arguments, *how, "--batch_size", "4", *where)
    theirs = json.loads(next(Path(tmp_path, "out").rglob("results_*.json")).read_text())["results"]
    compared = 0
    for task in TASKS:
        for metric, entry in ours["results"][task].items():
            name, _, kind = metric.partition(",")
            assert entry["value"] == theirs[task][f"{name},{kind or 'none'}"]
            error = theirs[task][f"{name}_stderr,{kind or 'none'}"]
            assert entry["stderr"] == (error if error != "N/A" else None)
            compared += 1
    assert compared == 5 and all(task in table for task in TASKS)
