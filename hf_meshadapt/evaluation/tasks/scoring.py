"""Scores one answer; lm-eval loads it from beside the task files, which name these functions."""

from hf_meshadapt.evaluation import metrics
from hf_meshadapt.evaluation.sql_match import execution_match


def summary(doc: dict, results: list[str]) -> dict[str, float]:
    """Against the only reference, which CNN/DailyMail calls highlights and XSum summary."""
    return {"rouge1": metrics.rouge1(results[0], doc.get("highlights") or doc.get("summary"))}


def short_answer(doc: dict, results: list[str]) -> dict[str, float]:
    """Against NarrativeQA's references; of an answer in several lines only the first counts."""
    references = [answer["text"] for answer in doc["answers"]]
    first_line = (results[0].strip().splitlines() or [""])[0]
    return {
        "token_f1": metrics.token_f1(first_line, references),
        "exact_match": metrics.exact_match(first_line, references),
    }


def query(doc: dict, results: list[str]) -> dict[str, float]:
    """By running it on the row's database: made by `script`, or a file at `path`."""
    place = {name: doc[name] for name in ("script", "path") if doc.get(name)}
    return {"execution_match": float(execution_match(results[0], doc["query"], **place))}
