"""Evaluates a saved model by lm-eval in a clean process and keeps the results beside it, in `evaluation.json`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..card import CARD_NAME, EVALUATION_NAME, is_unedited, write_card
from ..checkpoint_folder import read_json, write_json
from ..child_process import ChildFailed, child_environment
from ..extras import how_to_install
from ..hub_benchmarks import write_benchmark_results
from ..hub_names import hub_id
from ..run_record import RECORD_NAME, load_record
from .groups import check_code_execution, resolve_tasks
from .local_tasks import write_local_tasks

logger = logging.getLogger(__name__)

# What two evaluations have in common whose results may stand in one table. Batch size and device only round.
SETTINGS = ("lm_eval", "limit", "num_fewshot", "dtype", "chat_template", "step", "run")
BUILDERS = ("json", "csv", "text", "parquet", "pandas", "arrow")  # readers of local files, no data sets


@dataclass(frozen=True)
class EvaluationOptions:
    """How lm-eval is run; what is None is lm-eval's own default.

    Attributes:
        tasks: tasks of lm-eval, of `groups.LOCAL_TASKS`, or domains of `groups.DOMAINS`.
        limit: evaluate the first so many examples of every task only.
        num_fewshot: examples in the prompt.
        batch_size: rows at once.
        device: `cpu`, `cuda:0`, ...; None takes a GPU where there is one.
        dtype: of the weights.
        chat_template: ask through the tokenizer's chat template.
        include_path: folder with further task files.
        allow_code_execution: run code that the model writes.
        timeout_seconds: deadline of one model's evaluation.
    """

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    device: str | None = None
    dtype: str = "auto"
    chat_template: bool = False
    include_path: str | None = None
    allow_code_execution: bool = False
    timeout_seconds: float = 24 * 3600.0

    def resolved(self) -> list[str]:
        """The tasks to run.

        Raises:
            ValueError, NotImplementedError: see `groups`.
        """
        tasks = resolve_tasks(list(self.tasks))
        check_code_execution(tasks, self.allow_code_execution)
        return tasks


def evaluate(folder: Path, options: EvaluationOptions, base_model: str | None = None) -> dict:
    """Evaluates the model in `folder`, and before it `base_model` on the same tasks; writes `evaluation.json`.

    A card that nobody has edited is written anew with the results.

    Returns:
        What it wrote: lm-eval's version and settings, `results` as {task: {metric: {value, stderr}}}, `samples` and
        `datasets` by task, the base model's name (where it is one of the Hub), `key` (where it is not) and results, and
        the model's run and step.

    Raises:
        ValueError: no model, or tasks that do not exist.
        ImportError: lm-eval is missing.
        ChildFailed: lm-eval failed.
    """
    evaluation = run_on(folder, options, base_model)
    keep(folder, evaluation)
    return evaluation


def run_on(folder: Path, options: EvaluationOptions, base_model: str | None = None) -> dict:
    """`evaluate` without writing anything."""
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"{folder} holds no saved model: give the folder of save_model()")
    before = run_harness(base_model, options) if base_model else None
    after = run_harness(str(folder), options)
    return {
        "lm_eval": importlib.metadata.version("lm_eval"),
        **{name: getattr(options, name) for name in ("limit", "num_fewshot", "dtype", "chat_template")},
        **model_of(folder),
        **after,
        "base": before and base_of(base_model) | {"results": before["results"]},
    }


def model_of(folder: Path) -> dict:
    """`step` and `run` that tell a saved model from an earlier one in its folder; see `run_record.same_model`."""
    if not (folder / RECORD_NAME).is_file():
        return {"step": None, "run": files_key(folder)}
    record = load_record(folder)
    return {"step": record["global_step"], "run": record.get("run")}


def base_of(model: str) -> dict:
    """`model`, its name on the Hub, or None, and then a `key` in its place."""
    name = hub_id(model)
    return {"model": name, "key": None if name else files_key(Path(model))}


def files_key(folder: Path) -> str:
    """Tells models without a name apart, by their weights' files and not by the place where they lie."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin"))
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def keep(folder: Path, evaluation: dict) -> None:
    """Writes results beside a model, those of the Hub's benchmarks in its format too, and the card anew unless it was
    edited."""
    has_card = (folder / CARD_NAME).is_file() and (folder / RECORD_NAME).is_file()
    unedited = has_card and is_unedited(folder)  # before the results change what it should say
    evaluation = with_earlier(folder / EVALUATION_NAME, evaluation)
    write_results(folder, evaluation)
    write_benchmark_results(folder, evaluation)
    if unedited:
        write_card(folder)
    elif has_card:
        logger.warning("%s was edited and stays as it is: `meshadapt card %s` writes it anew", CARD_NAME, folder)


def write_results(folder: Path, evaluation: dict) -> None:
    """Writes `evaluation.json` at once, since a card may be made from it meanwhile."""
    partial = folder / f".partial-{EVALUATION_NAME}"
    write_json(partial, evaluation)
    os.replace(partial, folder / EVALUATION_NAME)


def with_earlier(path: Path, evaluation: dict) -> dict:
    """Adds the results of other tasks from an earlier evaluation of the same model in the same way (`SETTINGS`), beside the
    same base model or none."""
    if not path.is_file():
        return evaluation
    earlier = read_json(path)
    other = [name for name in SETTINGS if earlier.get(name) != evaluation.get(name)]
    # A base model's results stand beside all of a model's, or none.
    bases = [(base := one.get("base")) and (base.get("model"), base.get("key")) for one in (earlier, evaluation)]
    other += ["base"] if bases[0] != bases[1] else []
    if other:
        logger.warning("%s: earlier results differ in %s; the new ones take their place", path, ", ".join(other))
        return evaluation
    merged = {key: earlier[key] | evaluation[key] for key in ("results", "samples", "datasets")}
    base = evaluation["base"]
    if base:
        merged["base"] = base | {"results": earlier["base"]["results"] | base["results"]}
    return evaluation | merged


def run_harness(model: str, options: EvaluationOptions) -> dict:
    """lm-eval on one model, in a process of its own: `results`, `samples` and `datasets`."""
    require_lm_eval()
    tasks = options.resolved()
    with tempfile.TemporaryDirectory(prefix="meshadapt-eval-") as folder:
        tasks_folder = Path(folder, "tasks")
        tasks_folder.mkdir()
        write_local_tasks(tasks, tasks_folder)
        request = {
            **vars(options),
            **_model_and_adapter(model),
            "tasks": tasks,
            "include_path": [str(tasks_folder), *([options.include_path] if options.include_path else [])],
        }
        found = _run_worker(request, Path(folder))
    return summarise(found)


def require_lm_eval() -> None:
    """
    Raises:
        ImportError: it is missing.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError(f"evaluation needs lm-eval: {how_to_install('eval')}")


def _model_and_adapter(model: str) -> dict:
    path = Path(model, "adapter_config.json")
    if not path.is_file():
        return {"model": model, "peft": None}
    return {"model": json.loads(path.read_text())["base_model_name_or_path"], "peft": model}


def _run_worker(request: dict, folder: Path) -> dict:
    write_json(folder / "request.json", request)
    command = [sys.executable, "-m", "hf_meshadapt.evaluation.worker"]
    paths = [str(folder / "request.json"), str(folder / "result.json")]
    with (folder / "log.txt").open("w") as log:
        try:
            code = subprocess.run(
                [*command, *paths],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=request["timeout_seconds"],
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"lm-eval on {request['model']} took longer than {error.timeout:g} s: ended") from error
    if code:
        raise ChildFailed(f"lm-eval on {request['model']} failed: {last_error(folder / 'log.txt', code)}")
    return read_json(folder / "result.json")


def last_error(log: Path, code: int) -> str:
    """The exception that ended a Python process, out of what it printed: a progress bar may have printed after it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return (raised or lines or [f"exit code {code}"])[-1]


def summarise(found: dict) -> dict:
    """lm-eval's results by task and metric, its numbers untouched."""
    results: dict[str, dict] = {}
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            entry = {"value": value, "stderr": stderr if isinstance(stderr, int | float) else None}
            results.setdefault(task, {})[metric if kind == "none" else key] = entry
    samples = {task: counts["effective"] for task, counts in found["n-samples"].items()}
    sources = {task: config.get("dataset_path") for task, config in found["configs"].items()}
    datasets = {task: None if source in BUILDERS else hub_id(source) for task, source in sources.items()}
    return {"results": results, "samples": samples, "datasets": datasets}


def describe(evaluation: dict) -> str:
    """The results as a table for a terminal, with the base model's beside them."""
    from ..card_sections import evaluation_rows

    header = ["task", "metric", "examples", *(["base model"] if evaluation["base"] else []), "this model"]
    rows = [header, *map(list, evaluation_rows(evaluation))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
