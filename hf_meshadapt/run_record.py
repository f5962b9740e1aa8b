"""`mesh_run.json`: what a run knows about itself, written beside every model that it saves. The card reads only this.

Nothing in it names a place on a disk, a machine or a secret, since it is uploaded with the model.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import math
import platform
import re
import uuid
from pathlib import Path

import hf_meshadapt

from .checkpoint_folder import read_json, write_json
from .hub_names import dataset_ids, hub_id, is_path

logger = logging.getLogger(__name__)

RECORD_NAME = "mesh_run.json"
RECORD_FORMAT = 1
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl")
# Arguments that say where a run kept and reported things, and who reached whom, not what it computed.
UNTOLD_PREFIXES = ("hub_", "push_to_hub", "logging_", "log_", "report_to", "trackio_", "save_", "eval_")
UNTOLD = {
    "output_dir",
    "run_name",
    "project",
    "resume_from_checkpoint",
    "ignore_data_skip",
    "disable_tqdm",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "do_train",
    "do_eval",
    "do_predict",
    "local_rank",
    "use_cpu",
    "ddp_backend",
    "ddp_timeout",
    "link_timeout_seconds",
    "circuit",
    "fast_endpoint",
}
SECRETS = re.compile(r"(token|secret|password|credentials?|(^|_)key)$", re.IGNORECASE)  # in names within a dict
ADAPTER_FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")
CARD_METADATA = ("license", "license_name", "license_link", "language")


def make_record(trainer, report: dict | None) -> dict:
    """Gathers what the run recorded; JSON-able. Not collective.

    Args:
        trainer: a `MeshAdaptTrainer`.
        report: its `mesh_report()`, None before the first training step.
    """
    args, model = trainer.args, trainer.model
    source = getattr(model.config, "_name_or_path", None)
    return {
        "format": RECORD_FORMAT,
        "model": {
            "base_model": hub_id(source),
            "architecture": getattr(model, "get_base_model", lambda: model)()._get_name(),
            "model_type": model.config.model_type,
            "metadata": source_metadata(source),
        },
        "adapter": adapter_settings(getattr(model, "peft_config", None)),
        "datasets": dataset_ids(trainer.train_dataset),
        "run": trainer.run_id,
        "arguments_class": public_class(args).__name__,
        "arguments": told_arguments(args),
        "mesh": dataclasses.asdict(args.mesh_config()),
        "boundary": dataclasses.asdict(args.boundary_config()),
        "device": device_name(args.device),
        "report": finite(report),
        "global_step": trainer.state.global_step,
        "log_history": finite(trainer.state.log_history),
        "versions": versions(),
    }


def adapter_settings(peft_config: dict | None) -> dict | None:
    """Of a `PeftModel`'s only adapter what says how it was made; None where whole weights are trained."""
    if not peft_config:
        return None
    (config,) = peft_config.values()
    values = {name: getattr(config, name, None) for name in ADAPTER_FIELDS}
    targets = values["target_modules"]
    values["target_modules"] = targets if isinstance(targets, str) else sorted(targets or ())
    kind = getattr(config.peft_type, "value", config.peft_type)
    return finite({"peft_type": kind} | {name: value for name, value in values.items() if value})


def write_record(folder: Path, record: dict) -> None:
    write_json(folder / RECORD_NAME, record)


def load_record(folder: Path) -> dict:
    """
    Raises:
        ValueError: the folder has none, or one of another format; says what to do.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {RECORD_NAME}: give a folder that a MeshAdaptTrainer saved a model in")
    record = read_json(path)
    if record.get("format") != RECORD_FORMAT:
        raise ValueError(
            f"{path} has format {record.get('format')!r}, this version reads {RECORD_FORMAT}: use the version of "
            "hf_meshadapt that wrote it"
        )
    return record


def new_run_id() -> str:
    return uuid.uuid4().hex


def run_id_of(checkpoint: Path, args) -> str | None:
    """The run that a checkpoint is of, where one with these arguments carries it on; None where it becomes another."""
    try:
        record = load_record(checkpoint)
    except ValueError:  # none, or another version's
        return None
    return record.get("run") if record["arguments"] == told_arguments(args) else None


def same_model(evaluation: dict, record: dict) -> bool:
    """Whether an evaluation is of the model that the record is of: the same step of the same run."""
    return (evaluation.get("step"), evaluation.get("run")) == (record["global_step"], record.get("run"))


def public_class(args) -> type:
    """The nearest class of the arguments that this package offers: one that everybody can import."""
    return next(kind for kind in type(args).__mro__ if kind.__name__ in hf_meshadapt.__all__)


def told_arguments(args) -> dict:
    """Training arguments that differ from their defaults and say what was computed, as JSON gives them back.

    Left out are paths, secrets, and what is no plain value nor a list or dict of such.
    """
    values, told = args.to_dict(), {}
    for field in dataclasses.fields(public_class(args)):
        name, value, held = field.name, values.get(field.name), getattr(args, field.name, None)
        if name in UNTOLD or name.startswith(UNTOLD_PREFIXES) or value == default_of(field) or value in ("", [], {}):
            continue
        if dataclasses.is_dataclass(held) and held == type(held)():  # made by Trainer where nothing was given
            continue
        if value != f"<{name.upper()}>" and is_plain(value):  # a masked secret
            told[name] = json.loads(json.dumps(value))  # tuples become lists
    return told


def is_plain(value) -> bool:
    """Whether a value may stand on a card: no path, and nothing in it that could be a secret."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and not SECRETS.search(key) and is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int) or (isinstance(value, str) and not is_path(value))


def default_of(field: dataclasses.Field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return getattr(field.default, "value", field.default)  # an enumeration's member, as to_dict writes it


def source_metadata(source: str | None) -> dict:
    """Licence and language that the base model's own card states, read from its folder or the Hub's cache."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    if not source:
        return {}
    card = Path(source) / "README.md"
    if not card.is_file():
        name = hub_id(source)
        cached = try_to_load_from_cache(name, "README.md") if name else None
        if not isinstance(cached, str):
            return {}
        card = Path(cached)
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError) as error:
        logger.warning("the base model's card cannot be read (%s): the licence is not taken from it", error)
        return {}
    return {key: data[key] for key in CARD_METADATA if data.get(key)}


def versions() -> dict[str, str]:
    """Versions of this package, of what it runs on, and of Python; what is not installed is left out."""
    found = {"hf_meshadapt": hf_meshadapt.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version()}


def device_name(device) -> str:
    import torch  # not at the top: reading a record must not cost seconds

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def finite(value):
    """A JSON-able copy; numbers that JSON lacks become None, and so do texts that are places on a disk."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if hasattr(value, "item"):  # a tensor's or an array's only number
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if is_path(value) else value
