"""`.eval_results/*.yaml` beside a model: results that the Hub shows on the leaderboards of its benchmark data sets.

Only for a whole test set of a data set that is registered there as a benchmark, never for a part of one or for data of
one's own. Format: huggingface.co/docs/hub/eval-results and `huggingface_hub.EvalResultEntry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .card_sections import evaluation_settings

FOLDER = ".eval_results"
PREFIX = "meshadapt-"  # of the files that are ours, to be replaced with the model's results
HARNESS_URL = "https://github.com/EleutherAI/lm-evaluation-harness"


@dataclass(frozen=True)
class Benchmark:
    """What one task of lm-eval measures on the Hub.

    Attributes:
        dataset_id, task_id: as the data set's `eval.yaml` has them.
        metric: of lm-eval, whose value between 0 and 1 is shown in per cent.
        num_examples: of the whole test set.
    """

    dataset_id: str
    task_id: str
    metric: str
    num_examples: int


GSM8K = Benchmark("openai/gsm8k", "gsm8k", "exact_match,strict-match", 1319)
BENCHMARKS = {
    "gsm8k": GSM8K,
    "gsm8k_cot": GSM8K,
    "gsm8k_cot_zeroshot": GSM8K,
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "mmlu_pro", "exact_match,custom-extract", 12032),
    "gpqa_diamond_zeroshot": Benchmark("Idavidrein/gpqa", "gpqa_diamond", "acc", 198),
    "gpqa_diamond_cot_zeroshot": Benchmark("Idavidrein/gpqa", "gpqa_diamond", "exact_match,flexible-extract", 198),
}


def benchmark_results(evaluation: dict | None) -> dict[str, list[dict]]:
    """What each of our files must hold, by lm-eval's task, out of `evaluation.json`; empty without a benchmark."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    found = {}
    for task, metrics in ((evaluation or {}).get("results") or {}).items():
        benchmark = BENCHMARKS.get(task)
        if benchmark is None or benchmark.metric not in metrics or not _is_whole(task, benchmark, evaluation):
            continue
        settings = evaluation_settings(evaluation)
        entry = EvalResultEntry(
            dataset_id=benchmark.dataset_id,
            task_id=benchmark.task_id,
            value=round(100 * metrics[benchmark.metric]["value"], 10),  # without the noise of the last bits
            source_url=HARNESS_URL,
            source_name="lm-evaluation-harness",
            notes=f"lm-eval {evaluation['lm_eval']}, task {task}, {benchmark.metric}"
            + (f", {settings}" if settings else ""),
        )
        found[task] = eval_result_entries_to_yaml([entry])
    return found


def _is_whole(task: str, benchmark: Benchmark, evaluation: dict) -> bool:
    """Whether all of the benchmark's data set was read, by the task or by those that it is the mean of."""
    datasets, samples = evaluation.get("datasets") or {}, evaluation.get("samples") or {}
    parts = [task] if task in datasets else [name for name in datasets if name.startswith(f"{task}_")]
    count = sum(samples.get(name) or 0 for name in parts)
    ours = {benchmark.dataset_id, benchmark.dataset_id.split("/")[-1]}  # older versions of lm-eval leave the owner out
    return not evaluation.get("limit") and count == benchmark.num_examples and {datasets[n] for n in parts} <= ours


def write_benchmark_results(folder: Path, evaluation: dict | None) -> list[Path]:
    """Writes what `benchmark_results` says into the folder's `.eval_results`, in the place of what was written earlier."""
    import yaml

    found, place = benchmark_results(evaluation), folder / FOLDER
    for path in place.glob(f"{PREFIX}*.yaml"):
        path.unlink()
    paths = [place / f"{PREFIX}{task}.yaml" for task in found]
    for path, entries in zip(paths, found.values()):
        place.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()
    return paths
