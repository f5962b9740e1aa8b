"""The model card: filled only from `mesh_run.json` and `evaluation.json` beside the model, never from the network.

`write_card` writes README.md and the loss curve. What a user adds (licence, language, ...) is kept in `card.json`, so that
a card that is written anew keeps it.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from .card_sections import (
    adapter_rows,
    argument_code,
    evaluation_rows,
    evaluation_settings,
    figure_rows,
    launch_command,
    load_code,
    mesh_rows,
    result_rows,
    traffic_rows,
)
from .checkpoint_folder import read_json, write_json
from .extras import how_to_install
from .hub_benchmarks import write_benchmark_results
from .hub_names import hub_id, hub_ids
from .loss_curve import CURVE_NAME, draw_loss_curve, loss_points
from .run_record import load_record, same_model
from .shipped import shipped_file

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
ADDED_NAME = "card.json"
EVALUATION_NAME = "evaluation.json"
ADDABLE = (
    "model_name",
    "repo_id",
    "base_model",
    "datasets",
    "language",
    "license",
    "license_name",
    "license_link",
    "tags",
    "pipeline_tag",
)
LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")  # ISO 639-1, -2 and -3, and the Hub's special values
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def write_card(folder: Path, **added) -> Path:
    """Writes the card of a saved model, and before it the loss curve that it shows and `.eval_results/*.yaml` for the Hub's
    benchmarks.

    Args:
        folder: a folder with `mesh_run.json`.
        added: any of `ADDABLE`; remembered for the next time, and None leaves what was remembered.

    Raises:
        ValueError: no record in the folder, or a name that is not one of `ADDABLE`.
    """
    unknown = set(added) - set(ADDABLE)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: not on the card. Known are {', '.join(ADDABLE)}")
    record = load_record(folder)
    remembered = _read(folder / ADDED_NAME) | {name: value for name, value in added.items() if value is not None}
    if remembered:
        write_json(folder / ADDED_NAME, remembered)
    if loss_points(record["log_history"]):
        try:
            draw_loss_curve(record["log_history"], folder / CURVE_NAME)
        except ImportError:
            logger.warning("no loss curve on the card without matplotlib: %s", how_to_install("hub"))
    base_model = remembered.get("base_model") or record["model"]["base_model"]
    if (folder / "adapter_config.json").is_file() and hub_id(base_model) is None:
        logger.warning("the adapter in %s has no base model of the Hub: its card cannot say what to load it on. Give "
                       "base_model (meshadapt card %s --base-model OWNER/NAME)", folder, folder)  # fmt: skip
    write_benchmark_results(folder, load_evaluation(folder))
    path = folder / CARD_NAME
    partial = path.with_name(f".partial-{CARD_NAME}")
    partial.write_text(card_of(folder), encoding="utf-8")
    os.replace(partial, path)
    return path


def card_of(folder: Path) -> str:
    """The card's text for what lies in the folder now."""
    record, evaluation, added = load_record(folder), load_evaluation(folder), _read(folder / ADDED_NAME)
    is_adapter = (folder / "adapter_config.json").is_file()
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return render_card(
        record,
        evaluation,
        added,
        is_adapter=is_adapter,
        has_tokenizer=has_tokenizer,
        has_curve=(folder / CURVE_NAME).is_file(),
    )


def is_unedited(folder: Path) -> bool:
    """Whether the card is missing, or just what `card_of` says: then it may be written anew without asking."""
    path = folder / CARD_NAME
    return not path.is_file() or path.read_text(encoding="utf-8") == card_of(folder)


def load_evaluation(folder: Path) -> dict | None:
    """`evaluation.json` of this very model; None without one, or when it is of another step or another run."""
    path = folder / EVALUATION_NAME
    if not path.is_file():
        return None
    evaluation = read_json(path)
    record = load_record(folder)
    if not same_model(evaluation, record):
        run = "this" if evaluation.get("run") == record.get("run") else "another"
        logger.warning("%s is of step %s of %s run and not of this model: it stays off the card", EVALUATION_NAME,
                       evaluation.get("step"), run)  # fmt: skip
        return None
    return evaluation


def render_card(
    record: dict,
    evaluation: dict | None = None,
    added: dict | None = None,
    *,
    is_adapter: bool = False,
    has_tokenizer: bool = True,
    has_curve: bool = False,
) -> str:
    """The card's text.

    Args:
        record: as `run_record.make_record` gives.
        evaluation: as `evaluation.harness.evaluate` gives.
        added: what a user adds, by names of `ADDABLE`; wins over the record.
    """
    from huggingface_hub import ModelCard

    added = added or {}
    data = card_data(record, evaluation, added, is_adapter=is_adapter)
    name = hub_id(added.get("repo_id")) or ""
    report, versions = record["report"] or {}, record["versions"]
    card = ModelCard.from_template(
        data,
        template_path=str(shipped_file("model_cards/TEMPLATE.md")),
        title=data.model_name or name.split("/")[-1] or record["model"]["architecture"],
        architecture=record["model"]["architecture"],
        verb="adapted by a low-rank adapter" if is_adapter else "fine-tuned",
        datasets=data.datasets or [],
        base_model=data.base_model,
        load_code=load_code(name, record["model"]["architecture"], data.base_model, is_adapter, has_tokenizer),
        has_curve=has_curve,
        results=result_rows(record),
        adapter=adapter_rows(record),
        mesh=mesh_rows(record),
        traffic=traffic_rows(report),
        figures=figure_rows(report),
        evaluation=evaluation_rows(evaluation),
        has_base=bool(evaluation and evaluation.get("base")),
        limit=evaluation and evaluation.get("limit"),
        settings=evaluation_settings(evaluation),
        lm_eval_version=evaluation and evaluation["lm_eval"],
        requirements=requirements(versions),
        launch=launch_command(record["mesh"], has_anchor=bool(report.get("anchor"))),
        arguments_code=argument_code(record["arguments"], record.get("arguments_class", "MeshAdaptArguments")),
        versions=", ".join(f"{package} {version}" for package, version in versions.items()),
        package_version=versions["hf_meshadapt"],
        cites_paper=record["boundary"]["codec"] == "random_mask",
    )
    return str(card)


def card_data(record: dict, evaluation: dict | None, added: dict, *, is_adapter: bool):
    """The metadata block, as huggingface_hub's ModelCardData; what is not known is left out, never null."""
    from huggingface_hub import ModelCardData

    source = record["model"]
    base = hub_id(added.get("base_model") or source["base_model"])
    results = _eval_results(evaluation)
    architecture = source["architecture"]
    generates = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    own_tags = ["hf_meshadapt", *(["pipeline-parallel"] if record["mesh"]["stages"] > 1 else [])]
    if is_adapter:  # as peft tags its own
        own_tags += [(record.get("adapter") or {}).get("peft_type", "lora").lower()]
        own_tags += [f"base_model:adapter:{base}"] if base else []
    name = re.split(r"[/\\]", added.get("model_name") or hub_id(added.get("repo_id")) or "")[-1]
    fields = {
        "base_model": base,
        "base_model_relation": ("adapter" if is_adapter else "finetune") if base else None,
        "datasets": hub_ids(added.get("datasets") or record["datasets"], "datasets") or None,
        "language": _languages(added.get("language") or source["metadata"].get("language")) or None,
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": added.get("pipeline_tag") or ("text-generation" if generates else None),
        "tags": [*own_tags, *_texts(added.get("tags"))],
        "model_name": name or (architecture if results else None),
        "eval_results": results or None,
        **_license(added if added.get("license") else source["metadata"]),
    }
    return ModelCardData(**{key: value for key, value in fields.items() if value is not None})


def requirements(versions: dict[str, str]) -> str:
    """Of a record, what pip is to install beside a clone of this package, which is on no index."""
    others = {name: version for name, version in versions.items() if name not in ("python", "hf_meshadapt")}
    return " ".join(f"{name}=={public_version(version)}" for name, version in others.items())


def public_version(version: str) -> str:
    """Without the local part, such as `+cpu`, by which the package index knows no version."""
    return version.partition("+")[0]


def _license(stated: dict) -> dict:
    name = str(stated.get("license") or "").strip().lower()
    if not LICENSE.fullmatch(name) or (name == "other" and not stated.get("license_name")):
        if name:
            logger.warning("license=%r is not one of the Hub's identifiers: it stays off the card", name)
        return {}
    further = {key: stated[key] for key in ("license_name", "license_link") if isinstance(stated.get(key), str)}
    return {"license": name} | further


def _languages(stated) -> list[str]:
    found = [text.lower() for text in _texts(stated)]
    valid = [text for text in found if LANGUAGE.fullmatch(text)]
    if len(valid) < len(found):
        logger.warning("language: the Hub takes ISO 639 codes of two or three letters; others stay off the card")
    return valid


def _texts(stated) -> list[str]:
    values = [stated] if isinstance(stated, str) else stated or []
    return [value.strip() for value in values if isinstance(value, str) and value.strip()]


def _eval_results(evaluation: dict | None) -> list:
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=hub_id((evaluation.get("datasets") or {}).get(task)) or task,
            dataset_name=task,
            metric_type=metric.partition(",")[0],
            metric_name=metric,
            metric_value=entry["value"],
            source_name="lm-eval",
            source_url="https://github.com/EleutherAI/lm-evaluation-harness",
        )
        for task, metrics in ((evaluation or {}).get("results") or {}).items()
        for metric, entry in metrics.items()
    ]


def _read(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}
