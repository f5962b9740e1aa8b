"""The Hub's rules for a card's metadata, as its documentation states them; what the test server's validation checks.

Source: huggingface.co/docs/hub/model-cards and the metadata specification in huggingface/hub-docs (modelcard.md).
"""

from __future__ import annotations

import math
import re

import yaml

REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")
RELATIONS = ("finetune", "adapter", "merge", "quantized")
TEXTS = ("library_name", "pipeline_tag", "license", "license_name", "license_link", "base_model_relation")


def card_faults(content: str) -> list[str]:
    """What is wrong with a card's metadata, in words; empty for a valid card."""
    match = re.match(r"\A---\r?\n(.*?)\r?\n---(\r?\n|\Z)", content, re.S)
    if match is None:
        return ["no metadata block"]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata is not a mapping"]
    faults = [f"{key}: null" for key, value in data.items() if value is None]
    for key, pattern in (("base_model", REPO_ID), ("datasets", REPO_ID), ("language", LANGUAGE)):
        faults += _unmatched(key, data.get(key, []), pattern)
    faults += [f"{key}: not a text" for key in TEXTS if key in data and not isinstance(data[key], str)]
    if not IDENTIFIER.fullmatch(str(data.get("license", "mit"))):
        faults.append(f"license: {data['license']!r} is not an identifier")
    if data.get("license") == "other" and not data.get("license_name"):
        faults.append("license: other needs license_name")
    if data.get("base_model_relation", "finetune") not in RELATIONS:
        faults.append("base_model_relation: unknown")
    tags = data.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
        faults.append("tags: not a list of texts")
    return faults + _model_index_faults(data.get("model-index", []))


def numbers_in_tables(text: str) -> dict[float, float]:
    """All numbers in a card's tables, percentages as they are written, and how far each may be from the recorded one: half
    a unit of its fourth significant digit, or of the last digit behind its point where that is more."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    found = [word.replace(",", "") for word in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", rows)]
    return {float(word): _half_a_unit(word) for word in found}


def _half_a_unit(word: str) -> float:
    places = len(word.partition(".")[2])
    digits = math.floor(math.log10(float(word))) + 1 if float(word) else 1
    return max(0.5 * 10.0 ** (min(digits, 4) - 4), 0.5 * 10.0**-places if places else 0.0)


def untraced(text: str, record: dict, evaluation: dict | None) -> set[float]:
    """Numbers in a card's tables that neither stand in the run's record or results nor follow from them by one division:
    dense bytes are planned ones over their share of dense, processes are stages times replicas."""
    report = record["report"] or {}
    planned, shares = report.get("planned_bytes_per_token") or {}, report.get("bytes_ratio_to_dense") or {}
    dense = {planned[axis] / share for axis, share in shares.items() if share}
    per_cent = {100 * share for share in [report.get("wait_share") or 0.0, *shares.values()]}
    ranks = float(record["mesh"]["stages"] * record["mesh"]["replicas"])
    known = {*numbers(record), *numbers(evaluation), *dense, *per_cent, ranks}
    shown = numbers_in_tables(text)
    return {value for value, off in shown.items() if not any(abs(value - one) <= 1.001 * off for one in known)}


def numbers(value) -> list[float]:
    """All numbers within a JSON-able value, those in texts too: a mesh's device may be called H100."""
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    if isinstance(value, str):
        return [float(found) for found in re.findall(r"(?<![\w.])\d+\.?\d*", value)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _unmatched(key: str, value, pattern: re.Pattern) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in values):
        return [f"{key}: not texts"]
    return [f"{key}: {entry!r} is not valid" for entry in values if not pattern.fullmatch(entry)]


def _model_index_faults(index) -> list[str]:
    if not isinstance(index, list):
        return ["model-index: not a list"]
    faults = []
    for model in index:
        if not model.get("name") or not model.get("results"):
            faults.append("model-index: needs name and results")
        for result in model.get("results", []):
            if not result["task"].get("type"):
                faults.append("model-index: a task needs a type")
            if not result["dataset"].get("type") or not result["dataset"].get("name"):
                faults.append("model-index: a dataset needs type and name")
            for metric in result["metrics"]:
                if not metric.get("type") or not isinstance(metric.get("value"), int | float):
                    faults.append("model-index: a metric needs type and number")
    return faults
